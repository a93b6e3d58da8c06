"""Make the workflow files with ComfyUI's own frontend: workflows/*.json, a picture of each beside it, their API twins.

    COMFYUI_DIR=... COMFYUI_PYTHON=... python tests/support/make_workflows.py

Needs playwright in this Python and a Chromium (see comfyui_browser.py). The graphs are data; positions and
sizes are in canvas px, widget values by input id (workflow_graphs.py).
"""

from __future__ import annotations

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
from workflow_graphs import (  # noqa: E402
    AUDIO_VAE,
    DETAIL,
    DEV,
    DISTILLED,
    LORA,
    PICTURE,
    SOUND,
    TEMPORAL,
    TEXT_ENCODER,
    UPSCALER,
    VIDEO,
    VIDEO_VAE,
    folder,
    tiny,
    url,
    workflows,
)

CANVAS = (80, 84, 1864, 660)  # px of a 1900 x 900 page; further down where the graph goes there
MARGIN = 16  # px


def main() -> None:
    with tempfile.TemporaryDirectory() as files, Host({"ltx25": PACK}, models=_placeholders(Path(files))) as host:
        host.assert_pack_loaded("ltx25")
        _inputs(host.base / "input")
        with open_ui(host, size=(1900, 900)) as ui:
            for name, (nodes, links) in workflows(default_negative()).items():
                workflow = json.loads(ui.page.evaluate(_BUILD, {"nodes": nodes, "links": links, "extras": _extras(nodes)}))
                workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"ltx25-engine/{name}"))  # the same at every making
                seen = ui.load(workflow)
                assert not seen["missing"] and not seen["errors"], seen
                api = ui.to_api()
                _picture(ui, PACK / "workflows" / f"{name}.jpg")
                _write(PACK / "workflows" / f"{name}.json", workflow)
                _write(PACK / "workflows" / "api" / f"{name}.json", api)
                _write(PACK / "workflows" / "api" / f"{name}_tiny.json", tiny(api))
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
        left, top, right, bottom = CANVAS
        bottom = max(bottom, ui.screenshot(whole.name) + MARGIN)
        with Image.open(whole.name) as image:
            image.crop((left, top, right, bottom)).convert("RGB").save(path, quality=88)


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
        own = "LTX25" in type_ or type_ in ("EncodeGemmaText", "DecodeVideoVAE", "DecodeAudioVAE", "EncodeVideoVAE", "EncodeAudioVAE")
        extras[key] = dict(ours if own else core)
        if type_ in ("LoadLTX25Checkpoint", "LTX25LatentUpscale", "LTX25LoRA", "LTX25TemporalRounds"):
            files = {slot: name for slot, name in widgets.items() if isinstance(name, str) and name.endswith(".safetensors")}
            extras[key]["models"] = [{"name": name, "url": url(name, slot), "directory": folder(slot)} for slot, name in files.items()]
    return extras


def _placeholders(folder_: Path) -> dict[str, list[Path]]:
    """Empty files with the published names, so that the combos offer them."""
    names = {"diffusion_models": [DEV, DISTILLED], "text_encoders": [TEXT_ENCODER], "vae": [VIDEO_VAE, AUDIO_VAE], "latent_upscale_models": [UPSCALER, TEMPORAL], "loras": [LORA, DETAIL]}
    for name in (name for files in names.values() for name in files):
        (folder_ / name).touch()
    return {category: [folder_ / name for name in files] for category, files in names.items()}


def _inputs(folder_: Path) -> None:
    """What the workflows load: a picture, and files that only have to be there."""
    Image.new("RGB", (96, 64), (90, 120, 150)).save(folder_ / PICTURE)
    for name in (SOUND, VIDEO):
        (folder_ / name).touch()


def _write(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
