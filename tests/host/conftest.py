"""One real ComfyUI server for all host tests, with this pack (under an odd name), a probe pack, and the tiny checkpoint.

COMFYUI_DIR and COMFYUI_PYTHON say where ComfyUI is; a pack that sits in a custom_nodes folder finds its own. Without a
host these tests skip.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.tiny import write_tiny
from comfyui_ltx25.tests.support.comfyui_host import Host
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.tiny import tiny_files

PACK = Path(__file__).resolve().parents[2]
NAME = "ltx25-engine.v1"  # a folder name that is no Python identifier
PROBE = Path(__file__).parent / "probe_pack"


def comfyui():
    """(folder, python) of the host, or None."""
    folder = os.environ.get("COMFYUI_DIR")
    if not folder and PACK.parent.name == "custom_nodes" and (PACK.parents[1] / "main.py").is_file():
        folder = str(PACK.parents[1])
    return (folder, os.environ.get("COMFYUI_PYTHON") or sys.executable) if folder else None


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.host)
            if comfyui() is None:
                item.add_marker(pytest.mark.skip(reason="no COMFYUI_DIR"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of the tiny checkpoint, laid out like ComfyUI's models folder."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    tiny_lora(folder / "loras" / "tiny-style.safetensors")
    shutil.copyfile(tiny_files().audio_vae, folder / "loras" / "no-lora.safetensors")
    return folder


def start(tiny, **options):
    """A server with the pack, the probe pack and the tiny files; `options` as in Host."""
    folder, python = comfyui()
    models = {}
    for path in sorted(tiny.rglob("*.safetensors")):
        models.setdefault(path.parent.name, []).append(path)
    return Host({NAME: PACK, "probe_pack": PROBE}, models=models, comfyui=folder, python=python, **options)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """A folder beside the server's own, with empty folders of models that its configuration names."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("latent_upscale_models", "diffusion_models"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="session")
def host(tiny, elsewhere):
    """The server that tests share. A test that breaks it on purpose, or needs other flags, starts its own."""
    config = elsewhere / "extra_model_paths.yaml"
    config.write_text(f"ltx:\n  base_path: {elsewhere}\n" + "".join(f"  {path.name}: {path.name}\n" for path in elsewhere.iterdir() if path.is_dir()))
    with start(tiny, args=["--extra-model-paths-config", str(config)]) as server:
        yield server


@pytest.fixture
def placed(host):
    """Put a file into a models folder of the server, until the test is over."""
    made = []

    def place(folder, name, data):
        made.append(host.base / "models" / folder / name)
        made[-1].write_bytes(data)
        return name

    yield place
    for path in made:
        path.unlink()


@pytest.fixture(scope="session")
def api():
    """A fresh copy of a workflow in API format, by name."""

    def load(name="text_to_video_tiny"):
        return json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text())

    return load


@pytest.fixture(scope="session")
def find():
    """The id of the one node of a class (and title) in an API prompt."""

    def of(prompt, kind, title=None):
        (found,) = [
            key for key, node in prompt.items() if node["class_type"] == kind and title in (None, node.get("_meta", {}).get("title"))
        ]
        return found

    return of


@pytest.fixture(scope="session")
def inspect():
    """Add a node that tells what an output holds; `seen(run)` reads it."""

    def add(prompt, source, slot=0):
        key = f"inspect-{source}-{slot}"
        prompt[key] = {"class_type": "ProbeInspect", "inputs": {"value": [source, slot], "tag": ""}}

        def seen(run):
            assert run.ok, run.error and run.error["exception_message"]
            return json.loads(run.outputs[key]["seen"][0])

        return seen

    return add
