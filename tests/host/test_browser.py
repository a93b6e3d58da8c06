"""The UI workflows in ComfyUI's real frontend: they load without a red node and send what their API twins say."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from comfyui_ltx25.tests.host.conftest import PACK, comfyui

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
UI = sorted((PACK / "workflows").glob("*.json"))


@pytest.fixture(scope="module")
def published(host):
    """Empty files with the names the workflows ask for, so that a combo can show them."""
    made = []
    for path in UI:
        for node in json.loads(path.read_text())["nodes"]:
            for model in node.get("properties", {}).get("models", ()):
                file = host.base / "models" / model["directory"] / model["name"]
                file.touch()
                made.append(file)
    for name in ("example.png", "voice.wav", "clip.mp4"):
        file = host.base / "input" / name
        if not file.exists():
            file.touch()
            made.append(file)
    yield
    for file in set(made):
        file.unlink()


@pytest.fixture(scope="module")
def seen(host, published):
    _, python = comfyui()
    if subprocess.run([python, "-c", "import playwright"], capture_output=True).returncode or not Path(CHROMIUM).exists():
        pytest.skip("no playwright in COMFYUI_PYTHON, or no Chromium")
    script = PACK / "tests" / "host" / "browser_check.py"
    run = subprocess.run([python, script, host.url, *UI], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_x2_workflow_loads_without_a_missing_type_or_a_red_node(seen, path):
    found = seen[path.stem]
    assert (found["missing"], found["errors"], found["dialogs"]) == ([], [], [])


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_x5_the_run_button_sends_the_api_twin(seen, path):
    sent = seen[path.stem]["api"]
    for node in sent.values():
        node["inputs"].pop("video-preview", None)  # of the frontend's own, there once it has looked at the file
    assert sent == json.loads((PACK / "workflows" / "api" / path.name).read_text())
