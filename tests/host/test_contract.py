"""The pack as the host sees it: nodes, help pages, templates, start-up cost."""

import re
import shutil

import pytest
from comfyui_ltx25.tests.host.conftest import NAME, PACK
from comfyui_ltx25.tests.support.contract import FOLDERS, NO_DEFAULT, NODES, OPTIONAL


def test_pack_loads_and_offers_the_nodes_of_the_contract(host):
    start_up = host.log().split("Starting server")[0]  # later errors are those that other tests provoke
    assert "Traceback" not in start_up and "IMPORT FAILED" not in start_up, start_up
    assert host.assert_pack_loaded(NAME) == sorted(NODES)


def test_x2_start_up_costs_less_than_a_second(host):
    seconds = re.search(rf"([\d.]+) seconds.*{re.escape(NAME)}", host.log())
    assert float(seconds.group(1)) < 1.0


@pytest.mark.parametrize("node", NODES)
def test_inputs_outputs_and_defaults_are_those_of_the_contract(host, tiny, node):
    info = host.get(f"/object_info/{node}")[node]
    inputs, outputs = NODES[node]
    declared = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert list(declared) == [name for name, _, _ in inputs]
    assert set(info["input"].get("optional", {})) == {name for kind, name in OPTIONAL if kind == node}
    for name, kind, default in inputs:
        got, options = declared[name]
        assert options.get("tooltip"), f"{name} has no tooltip"
        if isinstance(kind, tuple) or kind in FOLDERS:
            wanted = list(kind) if isinstance(kind, tuple) else sorted(path.name for path in (tiny / kind).iterdir())
            assert got == "COMBO" and sorted(options["options"]) == sorted(wanted), name
            assert isinstance(kind, str) or options["options"] == wanted, name
        else:
            assert got == kind, name
        if default is not NO_DEFAULT and default is not None and (node, name) != ("LTX25Sampler", "seed"):
            assert options["default"] == default, name
    assert list(zip(info["output_name"], info["output"], strict=True)) == outputs
    assert all(info["output_tooltips"])
    assert info["category"] == "LTX-2.5" and info["search_aliases"]


@pytest.mark.parametrize("node", NODES)
def test_help_page_is_served(host, node):
    served = host.request("GET", f"/extensions/{NAME}/docs/{node}.md").decode()
    assert served == (PACK / "nodes" / "web" / "docs" / f"{node}.md").read_text()


def test_templates_are_the_ui_workflows_and_nothing_else(host):
    assert sorted(host.templates()[NAME]) == sorted(path.stem for path in (PACK / "workflows").glob("*.json"))


def test_l1_every_combo_lists_the_files_of_its_own_folder_without_a_checkpoints_folder(host):
    info = host.get("/object_info/LoadLTX25Checkpoint")["LoadLTX25Checkpoint"]["input"]["required"]
    assert host.get("/models/checkpoints") == []
    for slot in ("transformer", "text_encoder", "video_vae", "audio_vae"):
        assert info[slot][1]["options"], slot


def test_l6_files_of_extra_folders_are_listed_also_when_they_come_after_the_start(host, tiny, elsewhere):
    places = {"LTX25LatentUpscale": ("latent_upscale_models", "upscale_model"), "LoadLTX25Checkpoint": ("diffusion_models", "transformer")}

    def listed(node):
        return host.get(f"/object_info/{node}")[node]["input"]["required"][places[node][1]][1]["options"]

    assert not any("later.safetensors" in listed(node) for node in places)
    for node, (folder, _) in places.items():
        later = elsewhere / folder / "later.safetensors"
        shutil.copy(next((tiny / folder).glob("*.safetensors")), later)
        assert "later.safetensors" in listed(node), node
        later.unlink()
        assert "later.safetensors" not in listed(node), node
