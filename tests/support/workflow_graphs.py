"""The shipped workflows as data: nodes with widget values and places on the canvas, links by name.

WORKFLOWS: name -> () -> (nodes, links). Nodes are (key, type, title, (x, y, w, h) in canvas px, widgets by input id), links
((key, output), (key, input)). make_workflows.py turns them into files with the real frontend.
"""

from __future__ import annotations

from typing import Any

REPOSITORY = "https://huggingface.co/Lightricks/LTX-2.5/resolve/main"
TEXT_ENCODER = "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
VIDEO_VAE = "ltx-2.5-video-vae-conv-bf16.safetensors"
AUDIO_VAE = "ltx-2.5-audio-vae-bf16.safetensors"
DEV = "ltx-2.5-22b-dev-transformer-bf16.safetensors"
DISTILLED = "ltx-2.5-22b-distilled-transformer-bf16.safetensors"
UPSCALER = "ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors"
TEMPORAL = "ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors"
DETAIL = "ltx-2.5-22b-ic-lora-pixel-spatial-upscaler-x2-1.0.safetensors"
DETAIL_REPOSITORY = "https://huggingface.co/Lightricks/LTX-2.5-22b-IC-LoRA-Pixel-Spatial-Upscaler/resolve/main"
LORA = "ltx-2.5-22b-distilled-lora-450-bf16.safetensors"
GIGABYTES = {DEV: 42.0, DISTILLED: 42.0, TEXT_ENCODER: 26.3, VIDEO_VAE: 1.5, AUDIO_VAE: 0.4, UPSCALER: 1.0, TEMPORAL: 0.3, LORA: 8.9, DETAIL: 0.3}
FOLDERS = {"transformer": "diffusion_models", "text_encoder": "text_encoders", "upscale_model": "latent_upscale_models", "lora_name": "loras"}

PICTURE = "example.png"  # ComfyUI's own
SOUND, VIDEO = "voice.wav", "clip.mp4"  # the user's

PROMPT = (
    "A narrow harbour at dawn, seen from a slow dolly along the quay. An old fisherman in a yellow oilskin coils a wet rope, "
    "looks up and says in a warm, tired voice: \"The tide is early today.\" Gulls call overhead, water slaps against the hulls, "
    "a bell rings twice far away. Soft pink light, thin mist over the water, shallow depth of field, handheld calm."
)
NO_GUIDANCE = {f"{stream}_{name}": value for stream in ("video", "audio") for name, value in (("cfg", 1.0), ("stg", 0.0), ("modality", 1.0))}
HQ_GUIDANCE = {"video_stg": 0.0, "video_rescale": 0.45, "audio_stg": 0.0, "audio_rescale": 1.0, "stg_blocks": ""}
GUIDED, HQ = {"schedule": "ltx2", "steps": 30}, {"schedule": "ltx2", "steps": 15, "sampler": "res_2s", "token_shift": True}
STAGE_1, STAGE_2 = {"schedule": "distilled", "steps": 8}, {"schedule": "distilled_stage2", "steps": 3}
GUIDED_LORA, HQ_LORA = (0.0, 1.0), (0.25, 0.5)  # strengths of the distilled LoRA in stage 1 and 2, as in the official pipelines
HALF = {"width": 640, "height": 352}  # of 1280 x 704

Nodes, Links = list[tuple], list[tuple]


def folder(slot: str) -> str:
    """The folder under models/ of a loader's input."""
    return FOLDERS.get(slot, "vae")


def url(name: str, slot: str) -> str:
    """Where a file of a loader's input is published."""
    return f"{DETAIL_REPOSITORY}/{name}" if name == DETAIL else f"{REPOSITORY}/{folder(slot)}/{name}"


def render(
    negative: str | None,
    transformer: str,
    note: str,
    *,
    guidance: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    size: dict[str, Any] | None = None,
    prefix: str = "video/LTX-2.5",
) -> tuple[Nodes, Links]:
    """A prompt to a saved video with sound in one stage. `negative`: its text, None for a render without guidance."""
    files = {"transformer": transformer, "text_encoder": TEXT_ENCODER, "video_vae": VIDEO_VAE, "audio_vae": AUDIO_VAE}
    nodes: Nodes = [
        ("load", "LoadLTX25Checkpoint", None, (0, 60, 470, 250), files),
        ("note", "MarkdownNote", "Files and settings", (0, 360, 470, 300), {"": note}),
        ("positive", "EncodeGemmaText", "Prompt", (520, 60, 460, 200), {"text": PROMPT}),
        ("latent", "EmptyLTX25Latent", None, (520, 310 if negative is None else 540, 460, 180), size or {}),
        ("guider", "LTX25Guider", None, (1030, 60, 360, 350), NO_GUIDANCE if guidance is None else guidance),
        ("sample", "LTX25Sampler", None, (1440, 60, 360, 280), {"seed": 42, **(schedule or STAGE_1)}),
        ("report", "PreviewAny", "Report", (1440, 420, 360, 330), {}),
        ("video", "DecodeVideoVAE", None, (1850, 60, 300, 120), {}),
        ("audio", "DecodeAudioVAE", None, (1850, 230, 300, 80), {}),
        ("create", "CreateVideo", None, (1850, 360, 300, 130), {}),
        ("save", "SaveVideo", None, (2200, 60, 460, 560), {"filename_prefix": prefix}),
    ]
    links: Links = [
        *((("load", "engine"), (key, "engine")) for key in ("positive", "guider", "video", "audio")),
        (("positive", "conditioning"), ("guider", "positive")),
        (("guider", "guider"), ("sample", "guider")),
        (("latent", "latent"), ("sample", "latent")),
        (("sample", "latent"), ("video", "latent")),
        (("sample", "latent"), ("audio", "latent")),
        (("sample", "report"), ("report", "source")),
        (("video", "images"), ("create", "images")),
        (("video", "frame_rate"), ("create", "fps")),
        (("audio", "audio"), ("create", "audio")),
        (("create", "VIDEO"), ("save", "video")),
    ]
    if negative is not None:
        nodes.insert(3, ("negative", "EncodeGemmaText", "Negative prompt", (520, 310, 460, 180), {"text": negative}))
        links.insert(1, (("load", "engine"), ("negative", "engine")))
        links.insert(6, (("negative", "conditioning"), ("guider", "negative")))
    return nodes, links


def told(graph: tuple[Nodes, Links], conditions: list[tuple], sampler: str = "sample", row: int = 800) -> tuple[Nodes, Links]:
    """Condition nodes between the sampler and its latent, in order: (key, type, widgets, (source key, output), input)."""
    nodes, links = list(graph[0]), list(graph[1])
    into = (sampler, "latent")
    source = next(start for start, end in links if end == into)
    links = [link for link in links if link[1] != into]
    for index, (key, kind, widgets, given, name) in enumerate(conditions):
        nodes.append((key, kind, None, (520 + 410 * index, row, 360, 220), widgets))
        links += [(("load", "engine"), (key, "engine")), (source, (key, "latent")), (given, (key, name))]
        source = (key, "latent")
    return nodes, [*links, (source, into)]


def pictures(frames: tuple[int, ...], strength: float = 1.0, suffix: str = "") -> list[tuple]:
    """Image conditions of the pictures that `loaded` brings, at these frames."""
    return [(f"picture{i}{suffix}", "LTX25ImageCondition", {"frame": at, "strength": strength}, (f"load{i}", "IMAGE"), "image") for i, at in enumerate(frames)]


def loaded(graph: tuple[Nodes, Links], count: int) -> tuple[Nodes, Links]:
    """With `count` pictures from disk."""
    titles = ("Picture",) if count == 1 else ("First picture", *(f"Picture {i + 1}" for i in range(1, count - 1)), "Last picture")
    nodes = [(f"load{i}", "LoadImage", title, (-340, 60 + 360 * i, 300, 330), {"image": PICTURE}) for i, title in enumerate(titles)]
    return [*graph[0], *nodes], graph[1]


def second_stage(graph: tuple[Nodes, Links], widgets: dict[str, Any], guider: str = "guider", engine: str = "load", keep_sound: bool = False) -> tuple[Nodes, Links]:
    """The clip upscaled and sampled again. keep_sound: the first stage's sound is the one that is decoded.

    Every output hangs on the upscaler: the host runs outputs that need nothing wrong, and a wrong file shall stop it all.
    """
    nodes, links = list(graph[0]), list(graph[1])
    decoders = [("video", "latent")] + ([] if keep_sound else [("audio", "latent")])
    links = [link for link in links if link[0] != ("sample", "report") and not (link[0] == ("sample", "latent") and link[1] in decoders)]
    nodes += [
        ("upscale", "LTX25LatentUpscale", None, (1440, 800, 360, 120), {"upscale_model": UPSCALER}),
        ("refine", "LTX25Sampler", "Stage 2", (1850, 560, 360, 280), {"seed": 43, **widgets}),
    ]
    links += [
        ((engine, "engine"), ("upscale", "engine")),
        (("sample", "latent"), ("upscale", "latent")),
        ((guider, "guider"), ("refine", "guider")),
        (("upscale", "latent"), ("refine", "latent")),
        (("refine", "report"), ("report", "source")),
        *((("refine", "latent"), end) for end in decoders),
    ]
    return nodes, links


def refined_by_lora(graph: tuple[Nodes, Links], widgets: dict[str, Any], strengths: tuple[float, float]) -> tuple[Nodes, Links]:
    """A guided first stage, a second one of the same file with the distilled LoRA; the first one's sound is kept.

    strengths: of the LoRA in stage 1 and 2; 0: no node. Each stage's LoRA hangs on the loader, so that they do not add up.
    """
    nodes, links = list(graph[0]), list(graph[1])
    for stage, strength, row in ((1, strengths[0], 700), (2, strengths[1], 860)):
        if strength:
            nodes.append((f"lora{stage}", "LTX25LoRA", f"Stage {stage}", (0, row, 470, 120), {"lora_name": LORA, "strength": strength}))
            links.append((("load", "engine"), (f"lora{stage}", "engine")))
    if strengths[0]:
        links.remove((("load", "engine"), ("guider", "engine")))
        links.append((("lora1", "engine"), ("guider", "engine")))
    nodes.append(("guider2", "LTX25Guider", "Stage 2", (1030, 800, 360, 350), NO_GUIDANCE))
    links += [(("lora2", "engine"), ("guider2", "engine")), (("positive", "conditioning"), ("guider2", "positive"))]
    return second_stage((nodes, links), widgets, "guider2", keep_sound=True)


def fidelity(note: str) -> tuple[Nodes, Links]:
    """Diffusion fidelity rendering as officially: the dev file with the distilled LoRA makes a clip and its keyframes at half
    the size; both are enlarged, and stage 2 has the detailing LoRA and the small clip beside it; then one round in time. The
    sound is that of stage 1.
    """
    graph = render(None, DEV, note, size=HALF, schedule={**STAGE_1, "sampler": "euler"}, prefix="video/LTX-2.5-dfr")
    nodes = [
        *graph[0],
        ("lora", "LTX25LoRA", "Distilled", (0, 700, 470, 120), {"lora_name": LORA, "strength": 1.0}),
        ("detail", "LTX25LoRA", "Detailing, stage 2", (0, 870, 470, 120), {"lora_name": DETAIL, "strength": 1.0}),
        ("guider2", "LTX25Guider", "Stage 2", (1030, 800, 360, 350), NO_GUIDANCE),
    ]
    links = [link for link in graph[1] if link[1] not in (("guider", "engine"), ("sample", "latent"))]
    links += [(("load", "engine"), ("lora", "engine")), (("lora", "engine"), ("detail", "engine"))]
    links += [(("lora", "engine"), ("guider", "engine")), (("detail", "engine"), ("guider2", "engine")), (("positive", "conditioning"), ("guider2", "positive"))]
    links.append((("latent", "latent"), ("sample", "latent")))
    nodes, links = second_stage((nodes, links), STAGE_2, "guider2", keep_sound=True)
    nodes += [
        ("slots", "LTX25KeyframeSlots", "Keyframes, stage 1", (520, 580, 460, 200), {"grid": "segments"}),
        ("enlarge", "LTX25LatentUpscale", "Upscale keyframes", (1440, 970, 360, 120), {"upscale_model": UPSCALER}),
        ("slots2", "LTX25KeyframeSlots", "Keyframes, stage 2", (1440, 1140, 360, 200), {"grid": "segments"}),
        ("shown", "LTX25LatentReference", None, (1850, 900, 360, 120), {}),
        ("rounds", "LTX25TemporalRounds", None, (2260, 660, 400, 260), {"upscale_model": TEMPORAL, "seed": 44}),
    ]
    moved = (("sample", "latent"), ("refine", "latent"), ("video", "latent"), ("audio", "latent"), ("report", "source"))
    links = [link for link in links if link[1] not in moved]
    return nodes, [
        *links,
        *((("load", "engine"), (key, "engine")) for key in ("slots", "enlarge", "slots2")),
        (("latent", "latent"), ("slots", "latent")),
        (("slots", "latent"), ("sample", "latent")),
        (("sample", "keyframes"), ("enlarge", "latent")),
        (("upscale", "latent"), ("slots2", "latent")),
        (("enlarge", "latent"), ("slots2", "keyframes")),
        (("slots2", "latent"), ("shown", "latent")),
        (("sample", "latent"), ("shown", "reference")),
        (("shown", "latent"), ("refine", "latent")),
        (("guider", "guider"), ("rounds", "guider")),
        (("refine", "latent"), ("rounds", "latent")),
        (("refine", "keyframes"), ("rounds", "keyframes")),
        (("sample", "latent"), ("rounds", "sound")),
        (("rounds", "latent"), ("video", "latent")),
        (("rounds", "latent"), ("audio", "latent")),
        (("rounds", "report"), ("report", "source")),
    ]


def with_own_sound(note: str) -> tuple[Nodes, Links]:
    nodes, links = render(None, DISTILLED, note, prefix="video/LTX-2.5-audio-to-video")
    nodes = [node for node in nodes if node[0] != "audio"] + [("sound", "LoadAudio", "Your sound", (-340, 60, 300, 150), {"audio": SOUND})]
    links = [link for link in links if "audio" not in (link[0][0], link[1][0])]
    graph = told((nodes, links), [("soundtrack", "LTX25AudioCondition", {"mode": "soundtrack"}, ("sound", "AUDIO"), "audio")])
    return graph[0], [*graph[1], (("sound", "AUDIO"), ("create", "audio"))]


def sound_alone(note: str) -> tuple[Nodes, Links]:
    nodes, links = render(None, DISTILLED, note)
    gone = ("video", "create", "save")
    nodes = [node for node in nodes if node[0] not in gone] + [
        ("separate", "LTXVSeparateAVLatent", "The sound alone", (1030, 460, 360, 80), {}),
        ("save", "SaveAudio", None, (2200, 60, 360, 120), {"filename_prefix": "audio/LTX-2.5"}),
    ]
    links = [link for link in links if link[0][0] not in gone and link[1][0] not in gone and link[1] != ("sample", "latent")]
    return nodes, [
        *links,
        (("latent", "latent"), ("separate", "av_latent")),
        (("separate", "audio_latent"), ("sample", "latent")),
        (("audio", "audio"), ("save", "audio")),
    ]


def sound_for_a_video(note: str) -> tuple[Nodes, Links]:
    nodes, links = shown_a_video(render(None, DISTILLED, note, prefix="video/LTX-2.5-video-to-audio"), {"mode": "keep"})
    nodes = [node for node in nodes if node[0] != "video"]
    links = [link for link in links if "video" not in (link[0][0], link[1][0])]
    return nodes, [*links, (("parts", "images"), ("create", "images")), (("parts", "fps"), ("create", "fps"))]


def shown_a_video(graph: tuple[Nodes, Links], widgets: dict[str, Any]) -> tuple[Nodes, Links]:
    nodes = [
        *graph[0],
        ("clip", "LoadVideo", "Your video", (-340, 60, 300, 150), {"file": VIDEO}),
        ("parts", "GetVideoComponents", None, (-340, 260, 300, 120), {}),
    ]
    links = [*graph[1], (("clip", "VIDEO"), ("parts", "video"))]
    return told((nodes, links), [("shown", "LTX25VideoCondition", widgets, ("parts", "images"), "images")])


def workflows(negative: str) -> dict[str, tuple[Nodes, Links]]:
    """Every workflow by name. `negative`: the default negative prompt."""
    dev, distilled = _note(DEV, "The dev file wants 30 guided steps: the values in LTX-2.5 Guider are the official ones."), _note(DISTILLED, _DISTILLED)
    two = f"{_DISTILLED} Stage 1 runs at half the size, the latent is upscaled, stage 2 refines it in three steps: the fastest way to a large clip."
    halves = (
        "Stage 1 is guided, at half the size; stage 2 refines the upscaled clip in three steps with the distilled LoRA on the same transformer. "
        "The sound is that of stage 1."
    )

    def more(text: str) -> str:
        return _note(DISTILLED, f"{_DISTILLED} {text}")

    def two_stages(
        schedule: dict[str, Any], refine: dict[str, Any], guidance: dict[str, Any], strengths: tuple[float, float], more: str = ""
    ) -> tuple[Nodes, Links]:
        first = render(negative, DEV, _note(DEV, halves + more, LORA, UPSCALER), guidance=guidance, schedule=schedule, size=HALF)
        return refined_by_lora(first, refine, strengths)

    return {
        "text_to_video": render(negative, DEV, dev, guidance={}, schedule=GUIDED),
        "text_to_video_distilled": render(None, DISTILLED, distilled),
        "image_to_video": told(loaded(render(None, DISTILLED, more("The picture is the first frame.")), 1), pictures((0,))),
        "first_last_frame": told(loaded(render(None, DISTILLED, more("Frame -1 is the last one.")), 2), pictures((0, -1))),
        "keyframes": told(loaded(render(None, DISTILLED, more("Each picture stands at the frame its node names.")), 3), pictures((0, 60, -1))),
        "reference_video": shown_a_video(
            render(None, DISTILLED, more("The video is shown as a reference, which is made for IC-LoRAs: put LTX-2.5 LoRA behind the loader; the condition node takes its two factors from the file.")), {"mode": "reference"}
        ),
        "audio_to_video": with_own_sound(more("Your sound is kept as it is; the picture follows it.")),
        "text_to_audio": sound_alone(more("Only sound is made; nothing of the video is computed.")),
        "video_to_audio": sound_for_a_video(more("Your video is kept as it is; make the latent its size (sides in multiples of 32) and at most its length.")),
        "two_stage_distilled": second_stage(render(None, DISTILLED, _note(DISTILLED, two, UPSCALER), size=HALF), STAGE_2),
        "two_stage_guided": two_stages(GUIDED, STAGE_2, {}, GUIDED_LORA),
        "two_stage_hq": two_stages(HQ, {**STAGE_2, "sampler": "res_2s"}, HQ_GUIDANCE, HQ_LORA, " Stage 1 has the LoRA too, at half of that strength."),
        "dfr": fidelity(_note(DEV, _FIDELITY, LORA, DETAIL, UPSCALER, TEMPORAL)),
    }


_DISTILLED = "The distilled file wants 8 steps and no guidance: cfg and modality 1, stg 0, no negative prompt."


_FIDELITY = (
    "Diffusion fidelity rendering, for fast motion and fine detail: the dev file with the distilled LoRA makes the clip and single keyframes at half the "
    "size, stage 2 refines both with the detailing LoRA, and one round doubles the frame rate, to 48 a second here: rounds 2 gives 96, 0 leaves it. "
    "No guidance: cfg and modality 1, stg 0. The sound is that of stage 1."
)


_GRID = "Width and height are multiples of 32, frames are 8 n + 1"
_SIZE = f"{_GRID}: in Empty LTX-2.5 Latent set half the width and half the height that the clip is to have, 640 x 352 for 1280 x 704."


def _note(transformer: str, recipe: str, *more: str) -> str:
    slots = {transformer: "transformer", TEXT_ENCODER: "text_encoder", VIDEO_VAE: "video_vae", AUDIO_VAE: "audio_vae"}
    slots.update({name: {UPSCALER: "upscale_model", TEMPORAL: "upscale_model", LORA: "lora_name", DETAIL: "lora_name"}[name] for name in more})
    rows = "\n".join(f"| {folder(slot)} | [{name}]({url(name, slot)}) | {GIGABYTES[name]} GB |" for name, slot in slots.items())
    return (
        f"Files (accept the licence at huggingface.co/Lightricks/LTX-2.5 first):\n\n| models/ | file | size |\n|---|---|---|\n{rows}\n\n"
        f"{recipe}\n\n{_SIZE if UPSCALER in more else f'{_GRID}; the size asked for is the size rendered.'}"
    )


# What a *_tiny API twin changes, so that it runs on any CPU in seconds with the files of `ltx25 tiny`.
TINY_FILES = {
    DEV: "ltx-2.5-tiny-dev-transformer-bf16.safetensors",
    DISTILLED: "ltx-2.5-tiny-distilled-transformer-bf16.safetensors",
    TEXT_ENCODER: "gemma4-tiny-with-proj-ltx-2.5-bf16.safetensors",
    VIDEO_VAE: "ltx-2.5-tiny-video-vae-conv-bf16.safetensors",
    AUDIO_VAE: "ltx-2.5-tiny-audio-vae-bf16.safetensors",
    UPSCALER: "ltx-2.5-tiny-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
    TEMPORAL: "ltx-2.5-tiny-latent-temporal-upscaler-x2-bf16-1.0.safetensors",
    DETAIL: "ltx-2.5-tiny-distilled-lora-8-bf16.safetensors",  # the set has one LoRA; twice of it is another one
    LORA: "ltx-2.5-tiny-distilled-lora-8-bf16.safetensors",
}
TINY = {"EmptyLTX25Latent": {"width": 96, "height": 64, "frames": 17}, "LTX25Guider": {"stg_blocks": "1"}, "LTX25Sampler": {"steps": 4}}


def tiny(api: dict[str, Any]) -> dict[str, Any]:
    """The twin of an API prompt; the prompt itself stays as it is."""
    twin = {}
    for key, node in api.items():
        inputs = {name: TINY_FILES.get(value, value) if isinstance(value, str) else value for name, value in node["inputs"].items()}
        changes = dict(TINY.get(node["class_type"], {}))
        if inputs.get("stg_blocks") == "":
            changes.pop("stg_blocks", None)
        if node["class_type"] == "LTX25ImageCondition" and inputs["frame"] > 0:
            changes["frame"] = 9
        inputs.update(changes)
        if "filename_prefix" in inputs:
            inputs["filename_prefix"] += "_tiny"
        twin[key] = {**node, "inputs": inputs}
    return twin
