"""Make the workflow files with ComfyUI's own frontend: workflows/*.json, a picture of each beside it, their API twins.

    COMFYUI_DIR=... COMFYUI_PYTHON=... python tests/support/make_workflows.py

Needs playwright in this Python and a Chromium (see comfyui_browser.py). The graphs are described below; positions and
sizes are in canvas px, widget values by input id.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import tempfile
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACK = HERE.parents[1]
sys.path.insert(0, str(HERE))

from comfyui_browser import Ui, open_ui  # noqa: E402
from comfyui_host import Host  # noqa: E402
from PIL import Image  # noqa: E402

CANVAS = (80, 84, 1864, 660)  # px of a 1900 x 900 page

REPOSITORY = "https://huggingface.co/Lightricks/LTX-2.5/resolve/main"
TEXT_ENCODER = "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
VIDEO_VAE = "ltx-2.5-video-vae-conv-bf16.safetensors"
AUDIO_VAE = "ltx-2.5-audio-vae-bf16.safetensors"
DEV = "ltx-2.5-22b-dev-transformer-bf16.safetensors"
DISTILLED = "ltx-2.5-22b-distilled-transformer-bf16.safetensors"
GIGABYTES = {DEV: 42.0, DISTILLED: 42.0, TEXT_ENCODER: 26.3, VIDEO_VAE: 1.5, AUDIO_VAE: 0.4}

PROMPT = (
    "A narrow harbour at dawn, seen from a slow dolly along the quay. An old fisherman in a yellow oilskin coils a wet rope, "
    "looks up and says in a warm, tired voice: \"The tide is early today.\" Gulls call overhead, water slaps against the hulls, "
    "a bell rings twice far away. Soft pink light, thin mist over the water, shallow depth of field, handheld calm."
)


def text_to_video(transformer: str, distilled: bool) -> tuple[list, list]:
    """(nodes, links): nodes as (key, type, title, (x, y, w, h), widgets), links as ((key, output), (key, input))."""
    files = {"transformer": transformer, "text_encoder": TEXT_ENCODER, "video_vae": VIDEO_VAE, "audio_vae": AUDIO_VAE}
    guidance = (
        {"video_cfg": 1.0, "video_stg": 0.0, "video_modality": 1.0, "audio_cfg": 1.0, "audio_stg": 0.0, "audio_modality": 1.0}
        if distilled
        else {}
    )
    schedule = {"schedule": "distilled", "steps": 8} if distilled else {"schedule": "ltx2", "steps": 30}
    nodes = [
        ("load", "LoadLTX25Checkpoint", None, (0, 60, 470, 250), files),
        ("note", "MarkdownNote", "Files and settings", (0, 360, 470, 300), {"": _note(files, distilled)}),
        ("positive", "EncodeGemmaText", "Prompt", (520, 60, 460, 200), {"text": PROMPT}),
        ("latent", "EmptyLTX25Latent", None, (520, 540 if not distilled else 310, 460, 180), {}),
        ("guider", "LTX25Guider", None, (1030, 60, 360, 350), guidance),
        ("sample", "LTX25Sampler", None, (1440, 60, 360, 280), {"seed": 42, **schedule}),
        ("report", "PreviewAny", "Report", (1440, 390, 360, 330), {}),
        ("video", "DecodeVideoVAE", None, (1850, 60, 300, 120), {}),
        ("audio", "DecodeAudioVAE", None, (1850, 230, 300, 80), {}),
        ("create", "CreateVideo", None, (1850, 360, 300, 130), {}),
        ("save", "SaveVideo", None, (2200, 60, 460, 560), {"filename_prefix": "video/LTX-2.5"}),
    ]
    links = [
        (("load", "engine"), ("positive", "engine")),
        (("load", "engine"), ("guider", "engine")),
        (("load", "engine"), ("video", "engine")),
        (("load", "engine"), ("audio", "engine")),
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
    if not distilled:
        nodes.insert(3, ("negative", "EncodeGemmaText", "Negative prompt", (520, 310, 460, 180), {"text": default_negative()}))
        links.insert(1, (("load", "engine"), ("negative", "engine")))
        links.insert(6, (("negative", "conditioning"), ("guider", "negative")))
    return nodes, links


WORKFLOWS = {
    "text_to_video": lambda: text_to_video(DEV, distilled=False),
    "text_to_video_distilled": lambda: text_to_video(DISTILLED, distilled=True),
}

# What a *_tiny API twin changes, so that it runs on any CPU in seconds with the files of `ltx25 tiny`.
TINY_TRANSFORMER = {DEV: "ltx-2.5-tiny-dev-transformer-bf16.safetensors", DISTILLED: "ltx-2.5-tiny-distilled-transformer-bf16.safetensors"}
TINY = {
    "LoadLTX25Checkpoint": {
        "text_encoder": "gemma4-tiny-with-proj-ltx-2.5-bf16.safetensors",
        "video_vae": "ltx-2.5-tiny-video-vae-conv-bf16.safetensors",
        "audio_vae": "ltx-2.5-tiny-audio-vae-bf16.safetensors",
    },
    "EmptyLTX25Latent": {"width": 96, "height": 64, "frames": 17},
    "LTX25Guider": {"stg_blocks": "1"},
    "LTX25Sampler": {"steps": 4},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Host({"ltx25": PACK}, models=_placeholders(Path(folder))) as host:
        host.assert_pack_loaded("ltx25")
        with open_ui(host, size=(1900, 900)) as ui:
            for name, describe in WORKFLOWS.items():
                nodes, links = describe()
                workflow = json.loads(ui.page.evaluate(_BUILD, {"nodes": nodes, "links": links, "extras": _extras(nodes)}))
                workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"ltx25-engine/{name}"))  # the same at every making
                seen = ui.load(workflow)
                assert not seen["missing"] and not seen["errors"], seen
                api = ui.to_api()
                _picture(ui, PACK / "workflows" / f"{name}.jpg")
                _write(PACK / "workflows" / f"{name}.json", workflow)
                _write(PACK / "workflows" / "api" / f"{name}.json", api)
                _write(PACK / "workflows" / "api" / f"{name}_tiny.json", _tiny(api))
                print(f"{name}: {len(api)} nodes")  # noqa: T201


_BUILD = """async ({nodes, links, extras}) => {
  const app = window.app ?? window.comfyAPI.app.app;
  await app.loadGraphData({last_node_id: 0, last_link_id: 0, nodes: [], links: [], groups: [], config: {}, extra: {}, version: 0.4});
  const graph = app.rootGraph ?? app.graph, made = {};
  for (const [key, type, title, [x, y, w, h], widgets] of nodes) {
    const node = LiteGraph.createNode(type);
    if (title) node.title = title;
    graph.add(node);
    node.pos = [x, y];
    for (const [name, value] of Object.entries(widgets)) {
      const widget = name ? node.widgets.find(w => w.name === name) : node.widgets[0];
      if (!widget) throw new Error(`${type} has no widget ${name}`);
      widget.value = value;
      widget.callback?.(value);
    }
    for (const widget of node.widgets ?? []) if (widget.name === "control_after_generate") widget.value = "fixed";
    const least = node.computeSize();
    node.setSize([Math.max(w, least[0]), Math.max(h, least[1])]);
    Object.assign(node.properties, extras[key] ?? {});
    made[key] = node;
  }
  for (const [[from, output], [to, input]] of links) {
    const a = made[from], b = made[to];
    const slot = a.outputs.findIndex(o => o.name === output), into = b.inputs.findIndex(i => i.name === input);
    if (slot < 0 || into < 0) throw new Error(`no link ${from}.${output} -> ${to}.${input}`);
    a.connect(slot, b, into);
  }
  await new Promise(r => setTimeout(r, 500));
  const saved = graph.serialize();
  saved.extra = {};
  return JSON.stringify(saved);  // keys without a value would come out as null
}"""


def _picture(ui: Ui, path: Path) -> None:
    """The canvas without the frontend's bars; ComfyUI shows it beside the template's name."""
    with tempfile.NamedTemporaryFile(suffix=".png") as whole:
        ui.screenshot(whole.name)
        with Image.open(whole.name) as image:
            image.crop(CANVAS).convert("RGB").save(path, quality=88)


def default_negative() -> str:
    return _module("ltx25.request").DEFAULT_NEGATIVE


def version() -> str:
    text = (PACK / "pyproject.toml").read_text()
    return next(line.split('"')[1] for line in text.splitlines() if line.startswith("version"))


def _module(name: str):
    if "comfyui_ltx25" not in sys.modules:
        spec = importlib.util.spec_from_file_location("comfyui_ltx25", PACK / "__init__.py")
        sys.modules["comfyui_ltx25"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["comfyui_ltx25"])
    return importlib.import_module(f"comfyui_ltx25.{name}")


def _extras(nodes: list) -> dict[str, dict]:
    """Node properties: which pack to offer when it is missing, and which files to download where."""
    ours = {"cnr_id": "ltx25-engine", "ver": version()}
    core = {"cnr_id": "comfy-core", "ver": "0.33.0"}
    extras = {}
    for key, type_, _, _, widgets in nodes:
        own = "LTX25" in type_ or type_ in ("EncodeGemmaText", "DecodeVideoVAE", "DecodeAudioVAE")
        extras[key] = dict(ours if own else core)
        if type_ == "LoadLTX25Checkpoint":
            extras[key]["models"] = [
                {"name": name, "url": f"{REPOSITORY}/{_folder(slot)}/{name}", "directory": _folder(slot)} for slot, name in widgets.items()
            ]
    return extras


def _folder(slot: str) -> str:
    return {"transformer": "diffusion_models", "text_encoder": "text_encoders"}.get(slot, "vae")


def _note(files: dict[str, str], distilled: bool) -> str:
    rows = "\n".join(f"| {_folder(slot)} | [{name}]({REPOSITORY}/{_folder(slot)}/{name}) | {GIGABYTES[name]} GB |" for slot, name in files.items())
    recipe = (
        "The distilled file wants 8 steps and no guidance: cfg and modality 1, stg 0, no negative prompt."
        if distilled
        else "The dev file wants 30 guided steps: the values in LTX-2.5 Guider are the official ones."
    )
    return (
        f"Files (accept the licence at huggingface.co/Lightricks/LTX-2.5 first):\n\n| models/ | file | size |\n|---|---|---|\n{rows}\n\n"
        f"{recipe}\n\nWidth and height are multiples of 32, frames are 8 n + 1; the size asked for is the size rendered."
    )


def _placeholders(folder: Path) -> dict[str, list[Path]]:
    """Empty files with the published names, so that the combos offer them."""
    names = {"diffusion_models": [DEV, DISTILLED], "text_encoders": [TEXT_ENCODER], "vae": [VIDEO_VAE, AUDIO_VAE]}
    for name in (name for files in names.values() for name in files):
        (folder / name).touch()
    return {category: [folder / name for name in files] for category, files in names.items()}


def _tiny(api: dict) -> dict:
    api = copy.deepcopy(api)
    for node in api.values():
        node["inputs"].update(TINY.get(node["class_type"], {}))
        if node["class_type"] == "LoadLTX25Checkpoint":
            node["inputs"]["transformer"] = TINY_TRANSFORMER[node["inputs"]["transformer"]]
        if node["class_type"] == "SaveVideo":
            node["inputs"]["filename_prefix"] += "_tiny"
    return api


def _write(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
