"""The workflow files against the node contract, without a host: tests/host asks a real one."""

import json
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.request import DEFAULT_NEGATIVE
from comfyui_ltx25.tests.support.contract import NO_DEFAULT, NODES, OPTIONAL, WIDGETS

WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows"
UI = sorted(WORKFLOWS.glob("*.json"))
API = sorted((WORKFLOWS / "api").glob("*.json"))
CORE = {"CreateVideo", "SaveVideo", "PreviewAny", "MarkdownNote"}
FILES = {"diffusion_models", "text_encoders", "vae"}


def nodes_of(path, kind):
    nodes = json.loads(path.read_text())
    return [(node, node["class_type"]) for node in nodes.values()] if kind == "api" else [(n, n["type"]) for n in nodes["nodes"]]


def test_every_workflow_has_its_api_twin_and_one_that_runs_tiny():
    names = {path.stem for path in UI}
    assert names == {"text_to_video", "text_to_video_distilled"}
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
                outputs = NODES.get(prompt[source]["class_type"], ([], []))[1]
                assert outputs[slot][1] == kind, f"{key}.{name}"
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
        sent = {name: value for name, value in api[str(node["id"])]["inputs"].items() if not isinstance(value, list)}
        assert saved == sent, kind


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_ui_workflow_offers_the_pack_and_every_file_it_needs(path):
    for node, kind in nodes_of(path, "ui"):
        if kind in NODES:
            assert node["properties"]["cnr_id"] == "ltx25-engine" and node["properties"]["ver"], kind
        if kind == "LoadLTX25Checkpoint":
            chosen = dict(zip(WIDGETS[kind], node.get("widgets_values", []), strict=True))
            offered = {model["name"]: model for model in node["properties"]["models"]}
            for name, folder in [(name, folder) for name, folder, _ in NODES[kind][0] if folder in FILES]:
                model = offered.pop(chosen[name])
                assert model["directory"] == folder
                assert model["url"] == f"https://huggingface.co/Lightricks/LTX-2.5/resolve/main/{folder}/{chosen[name]}"
            assert not offered


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_workflow_ends_in_a_saved_video_at_the_latents_own_rate(path):
    prompt = json.loads((WORKFLOWS / "api" / path.name).read_text())
    kinds = {key: node["class_type"] for key, node in prompt.items()}
    create = next(node for node in prompt.values() if node["class_type"] == "CreateVideo")
    save = next(node for node in prompt.values() if node["class_type"] == "SaveVideo")
    assert kinds[create["inputs"]["fps"][0]] == "DecodeVideoVAE" and create["inputs"]["fps"][1] == 1
    assert kinds[create["inputs"]["audio"][0]] == "DecodeAudioVAE"
    assert kinds[save["inputs"]["video"][0]] == "CreateVideo"


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
