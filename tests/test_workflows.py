"""The workflow files against the node contract, without a host: tests/host asks a real one."""

import json
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.request import DEFAULT_NEGATIVE
from comfyui_ltx25.tests.support.contract import FOLDERS, NO_DEFAULT, NODES, OPTIONAL, WIDGETS

WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows"
UI = sorted(WORKFLOWS.glob("*.json"))
API = sorted((WORKFLOWS / "api").glob("*.json"))
CORE = {
    *("CreateVideo", "SaveVideo", "SaveAudio", "PreviewAny", "MarkdownNote"),
    *("LoadImage", "LoadAudio", "LoadVideo", "GetVideoComponents", "LTXVSeparateAVLatent"),
}
NAMES = {
    *("text_to_video", "text_to_video_distilled", "image_to_video", "first_last_frame", "keyframes", "reference_video"),
    *("audio_to_video", "text_to_audio", "video_to_audio", "two_stage_distilled", "two_stage_guided", "two_stage_hq", "dfr"),
}
HUB = "https://huggingface.co/Lightricks"
DETAIL = "ltx-2.5-22b-ic-lora-pixel-spatial-upscaler-x2-1.0.safetensors"
SOUND_ALONE, OWN_SOUND, OWN_VIDEO = {"text_to_audio"}, {"audio_to_video"}, {"video_to_audio"}


def nodes_of(path, kind):
    nodes = json.loads(path.read_text())
    return [(node, node["class_type"]) for node in nodes.values()] if kind == "api" else [(n, n["type"]) for n in nodes["nodes"]]


def test_every_workflow_has_its_api_twin_and_one_that_runs_tiny():
    names = {path.stem for path in UI}
    assert names == NAMES
    assert {path.stem for path in API} == names | {f"{name}_tiny" for name in names}


@pytest.mark.parametrize("path", API, ids=lambda path: path.stem)
def test_api_workflow_names_only_nodes_and_inputs_that_exist(path):
    prompt = json.loads(path.read_text())
    for key, node in prompt.items():
        if node["class_type"] not in NODES:
            assert node["class_type"] in CORE
            continue
        inputs, _ = NODES[node["class_type"]]
        optional = {name for kind, name in OPTIONAL if kind == node["class_type"]}
        assert {name for name, _, _ in inputs} - optional <= set(node["inputs"]) <= {name for name, _, _ in inputs}, key
        for name, kind, default in inputs:
            value = node["inputs"].get(name)
            if isinstance(value, list):
                source, slot = value
                if prompt[source]["class_type"] in NODES:  # a host test runs the rest
                    assert NODES[prompt[source]["class_type"]][1][slot][1] == kind, f"{key}.{name}"
            elif default is not NO_DEFAULT and isinstance(kind, tuple):
                assert value in kind, f"{key}.{name}"


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_ui_workflow_keeps_its_widget_values_in_contract_order(path):
    api = json.loads((WORKFLOWS / "api" / path.name).read_text())
    for node, kind in nodes_of(path, "ui"):
        if kind not in NODES:
            assert kind in CORE
            continue
        saved = dict(zip(WIDGETS[kind], node.get("widgets_values", []), strict=True))
        saved.pop("control_after_generate", None)
        linked = {link["name"] for link in node["inputs"] if link.get("link") is not None}
        saved = {name: value for name, value in saved.items() if name not in linked}
        sent = {name: value for name, value in api[str(node["id"])]["inputs"].items() if not isinstance(value, list)}
        assert saved == sent, kind


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_ui_workflow_offers_the_pack_and_every_file_it_needs(path):
    for node, kind in nodes_of(path, "ui"):
        if kind in NODES:
            assert node["properties"]["cnr_id"] == "ltx25-engine" and node["properties"]["ver"], kind
        if kind in ("LoadLTX25Checkpoint", "LTX25LatentUpscale", "LTX25LoRA", "LTX25TemporalRounds"):
            chosen = dict(zip(WIDGETS[kind], node.get("widgets_values", []), strict=True))
            elsewhere = {DETAIL: f"{HUB}/LTX-2.5-22b-IC-LoRA-Pixel-Spatial-Upscaler/resolve/main/{DETAIL}"}
            offered = {model["name"]: model for model in node["properties"]["models"]}
            for name, folder in [(name, folder) for name, folder, _ in NODES[kind][0] if isinstance(folder, str) and folder in FOLDERS]:
                model = offered.pop(chosen[name])
                assert model["directory"] == folder
                assert model["url"] == elsewhere.get(chosen[name], f"{HUB}/LTX-2.5/resolve/main/{folder}/{chosen[name]}")
            assert not offered


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_workflow_ends_in_a_saved_video_at_the_latents_own_rate(path):
    prompt = json.loads((WORKFLOWS / "api" / path.name).read_text())
    kinds = {key: node["class_type"] for key, node in prompt.items()}
    if path.stem in SOUND_ALONE:
        assert "DecodeVideoVAE" not in kinds.values() and "SaveAudio" in kinds.values()
        return
    create = next(node for node in prompt.values() if node["class_type"] == "CreateVideo")
    save = next(node for node in prompt.values() if node["class_type"] == "SaveVideo")
    frames = ("GetVideoComponents", 2) if path.stem in OWN_VIDEO else ("DecodeVideoVAE", 1)
    assert (kinds[create["inputs"]["fps"][0]], create["inputs"]["fps"][1]) == frames
    assert kinds[create["inputs"]["audio"][0]] == ("LoadAudio" if path.stem in OWN_SOUND else "DecodeAudioVAE")
    assert kinds[save["inputs"]["video"][0]] == "CreateVideo"


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_the_note_says_what_size_comes_out_of_the_latents(path):
    """With an upscaler behind it, Empty LTX-2.5 Latent has half the sides that are rendered."""
    nodes = nodes_of(path, "ui")
    (note,) = [node["widgets_values"][0] for node, kind in nodes if kind == "MarkdownNote"]
    enlarged = any(kind == "LTX25LatentUpscale" for _, kind in nodes)
    assert ("half the width and half the height that the clip is to have" in note) == enlarged
    assert ("the size asked for is the size rendered" in note) != enlarged


def test_f8_stage_two_starts_from_the_distilled_levels_and_not_from_noise():
    for name in ("two_stage_distilled", "two_stage_guided", "two_stage_hq"):
        prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())
        first, second = [node["inputs"] for node in prompt.values() if node["class_type"] == "LTX25Sampler"]
        assert second["schedule"] == "distilled_stage2" and first["schedule"] != "distilled_stage2"
        assert prompt[second["latent"][0]]["class_type"] == "LTX25LatentUpscale"


def test_two_stage_guided_ships_the_sound_of_stage_one_and_distilled_that_of_stage_two():
    for name, schedule in (("two_stage_distilled", "distilled_stage2"), ("two_stage_guided", "ltx2"), ("two_stage_hq", "ltx2")):
        prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())
        (sound,) = [node["inputs"]["latent"][0] for node in prompt.values() if node["class_type"] == "DecodeAudioVAE"]
        assert prompt[sound]["inputs"]["schedule"] == schedule


@pytest.mark.parametrize("name, strengths", [("two_stage_guided", (None, 1.0)), ("two_stage_hq", (0.25, 0.5))])
def test_guided_stages_share_one_transformer_and_differ_in_their_lora(name, strengths):
    """Per the official pipelines: two strengths of the distilled LoRA on one file, each for its own stage, not added up."""
    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())
    assert len([node for node in prompt.values() if node["class_type"] == "LoadLTX25Checkpoint"]) == 1
    assert len([node for node in prompt.values() if node["class_type"] == "EncodeGemmaText"]) == 2
    stages = [node["inputs"] for node in prompt.values() if node["class_type"] == "LTX25Sampler"]
    for stage, strength in zip(stages, strengths, strict=True):
        engine = prompt[prompt[stage["guider"][0]]["inputs"]["engine"][0]]
        if strength is not None:
            assert (engine["class_type"], engine["inputs"]["strength"]) == ("LTX25LoRA", strength)
            assert engine["inputs"]["lora_name"] == "ltx-2.5-22b-distilled-lora-450-bf16.safetensors"
            engine = prompt[engine["inputs"]["engine"][0]]
        assert engine["class_type"] == "LoadLTX25Checkpoint" and engine["inputs"]["transformer"] == "ltx-2.5-22b-dev-transformer-bf16.safetensors"


def test_dfr_workflow_is_the_official_pipeline():
    """ltx_pipelines.dfr_pipeline: plain Euler in both stages, keyframes seeded in stage 2, the small clip itself as reference, the
    detailing LoRA in stage 2 alone and on top of the distilled one, sound of stage 1, one set of weights for stage 1 and the rounds.
    """
    prompt = json.loads((WORKFLOWS / "api" / "dfr.json").read_text())

    def node(link, kind):
        assert prompt[link[0]]["class_type"] == kind
        return prompt[link[0]]["inputs"]

    (key,) = [key for key, one in prompt.items() if one["class_type"] == "LTX25TemporalRounds"]
    rounds = prompt[key]["inputs"]
    second, first = node(rounds["latent"], "LTX25Sampler"), node(rounds["sound"], "LTX25Sampler")
    assert [(one["schedule"], one["sampler"]) for one in (first, second)] == [("distilled", "euler"), ("distilled_stage2", "auto")]
    assert rounds["keyframes"] == [rounds["latent"][0], 2] and rounds["guider"] == first["guider"]
    shown = node(second["latent"], "LTX25LatentReference")
    assert shown["reference"] == rounds["sound"]
    seeded, empty = node(shown["latent"], "LTX25KeyframeSlots"), node(first["latent"], "LTX25KeyframeSlots")
    assert seeded["grid"] == empty["grid"] == "segments" and "keyframes" not in empty
    assert node(seeded["keyframes"], "LTX25LatentUpscale")["latent"] == [rounds["sound"][0], 2]
    assert node(seeded["latent"], "LTX25LatentUpscale")["latent"] == rounds["sound"]
    detail = node(node(second["guider"], "LTX25Guider")["engine"], "LTX25LoRA")
    distilled = node(detail["engine"], "LTX25LoRA")
    assert (detail["lora_name"], distilled["lora_name"]) == (DETAIL, "ltx-2.5-22b-distilled-lora-450-bf16.safetensors")
    assert node(first["guider"], "LTX25Guider")["engine"] == detail["engine"] and detail["strength"] == distilled["strength"] == 1
    assert node(distilled["engine"], "LoadLTX25Checkpoint")["transformer"] == "ltx-2.5-22b-dev-transformer-bf16.safetensors"
    for kind in ("DecodeVideoVAE", "DecodeAudioVAE"):
        assert [one["inputs"]["latent"] for one in prompt.values() if one["class_type"] == kind] == [[key, 0]]


def test_hq_workflow_is_the_official_preset():
    prompt = json.loads((WORKFLOWS / "api" / "two_stage_hq.json").read_text())
    first, second = [node["inputs"] for node in prompt.values() if node["class_type"] == "LTX25Sampler"]
    assert (first["sampler"], first["steps"], first["token_shift"], second["sampler"]) == ("res_2s", 15, True, "res_2s")
    guider = prompt[first["guider"][0]]["inputs"]
    scales = ("cfg", "stg", "modality", "rescale")
    assert [guider[f"video_{name}"] for name in scales] == [3, 0, 3, 0.45] and [guider[f"audio_{name}"] for name in scales] == [7, 0, 3, 1]
    assert guider["stg_blocks"] == ""


def test_x4_no_workflow_uses_the_enhancer_and_every_file_has_its_size():
    for path in UI:
        prompt = json.loads((WORKFLOWS / "api" / path.name).read_text())
        assert "LTX25EnhancePrompt" not in {node["class_type"] for node in prompt.values()}
        note = next(node["widgets_values"][0] for node in json.loads(path.read_text())["nodes"] if node["type"] == "MarkdownNote")
        names = [value for node in prompt.values() for value in node["inputs"].values() if isinstance(value, str) and value.endswith(".safetensors")]
        assert names and all(f"[{name}]" in note for name in names)


def test_e4_the_negative_prompt_is_the_default_one_in_plain_sight():
    texts = [node["inputs"]["text"] for node, kind in nodes_of(WORKFLOWS / "api" / "text_to_video.json", "api") if kind == "EncodeGemmaText"]
    assert DEFAULT_NEGATIVE in texts and len(texts) == 2


def test_distilled_workflow_runs_one_forward_per_step():
    prompt = json.loads((WORKFLOWS / "api" / "text_to_video_distilled.json").read_text())
    (guider,) = [node["inputs"] for node in prompt.values() if node["class_type"] == "LTX25Guider"]
    (sampler,) = [node["inputs"] for node in prompt.values() if node["class_type"] == "LTX25Sampler"]
    for stream in ("video", "audio"):
        assert [guider[f"{stream}_{scale}"] for scale in ("cfg", "stg", "modality")] == [1, 0, 1]
    assert "negative" not in guider
    assert sampler["schedule"] == "distilled"


@pytest.mark.parametrize("path", UI + API, ids=lambda path: path.stem)
def test_no_workflow_carries_a_path_of_the_machine_that_made_it(path):
    assert str(Path.home()) not in path.read_text() and "/tmp/" not in path.read_text()
