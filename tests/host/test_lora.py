"""LTX25LoRA on a real server: between loader and guider, chained, taken off, and with a file that is no LoRA."""

import re

import pytest
import torch
from comfyui_ltx25.ltx25.tiny import TinyFiles
from comfyui_ltx25.tests.host.test_instrument import newest_record
from comfyui_ltx25.tests.support.comfyui_host import Rejected
from safetensors.torch import save


def styled(api, find, *loras):
    """The distilled workflow with (file, strength) LoRAs between loader and guider; the prompt and its sampler's id."""
    prompt = api("text_to_video_distilled_tiny")
    link = [find(prompt, "LoadLTX25Checkpoint"), 0]
    for number, (name, strength) in enumerate(loras):
        prompt[f"lora{number}"] = {"class_type": "LTX25LoRA", "inputs": {"engine": link, "lora_name": name, "strength": strength}}
        link = [f"lora{number}", 0]
    prompt[find(prompt, "LTX25Guider")]["inputs"]["engine"] = link
    return prompt, find(prompt, "LTX25Sampler")


def ran(host, api, find, inspect, *loras):
    prompt, sampler = styled(api, find, *loras)
    latent, report = inspect(prompt, sampler), inspect(prompt, sampler, 1)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert run.ok, run.error
    for key in {*run.executed} & {key for key in prompt if key.startswith("lora")}:
        assert re.fullmatch(r"LoRA tiny-style.safetensors at strength [^\n]* matched\.", run.texts(key)[-1][1])
    return latent(run)["samples"], str(report(run))


def test_k3_k4_a_lora_acts_adds_up_and_leaves_nothing_behind(host, api, find, inspect):
    style = "tiny-style.safetensors"
    plain, _ = ran(host, api, find, inspect)
    changed, report = ran(host, api, find, inspect, (style, 1.0))
    assert changed != plain and "96 of 96 layers matched" in report
    assert ran(host, api, find, inspect, (style, 0.0))[0] == plain
    assert ran(host, api, find, inspect, (style, 0.5), (style, 0.5))[0] not in (plain, changed)
    assert ran(host, api, find, inspect)[0] == plain


def test_the_combo_lists_models_loras_and_a_file_that_is_no_lora_is_refused(host, api, find):
    info = host.get("/object_info/LTX25LoRA")["LTX25LoRA"]["input"]["required"]["lora_name"]
    assert "tiny-style.safetensors" in str(info)
    prompt, _ = styled(api, find, ("no-lora.safetensors", 1.0))
    with pytest.raises(Rejected) as refused:
        host.run(prompt)
    assert "no-lora.safetensors is an audio VAE with vocoder, wanted a LoRA like" in str(refused.value.node_errors)


BROKEN = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8899889568\n", "Git-LFS pointer"),
    "cut": (b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "cut"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("kind", [*BROKEN, "missing"])
def test_r5_a_broken_lora_of_stage_two_is_refused_before_anything_runs(host, api, placed, kind):
    prompt = api("two_stage_hq_tiny")
    lora = next(node for node in prompt.values() if node["class_type"] == "LTX25LoRA" and node["inputs"]["strength"] == 0.5)
    lora["inputs"]["lora_name"] = placed("loras", f"wrong-{kind}.safetensors", BROKEN[kind][0]) if kind in BROKEN else "missing.safetensors"
    with pytest.raises(Rejected) as refused:
        host.run(prompt)
    assert (BROKEN[kind][1] if kind in BROKEN else "missing.safetensors") in str(refused.value.node_errors)


def refused_before_sampling(host, prompt, words, key):
    """The run ends at node `key` with `words`, and no forward was run, though stage 1 needs nothing of that node."""
    run = host.run(prompt)
    assert run.status == "error" and words in run.error["exception_message"] and run.error["node_id"] == key
    assert not [text for _, text in run.texts() if "forward" in text]


def test_r5_a_lora_that_fits_no_layer_is_found_out_before_the_first_forward(host, api, find, placed):
    layers = {f"unet.down_blocks.0.lora_{end}.weight": torch.ones(4, 4) for end in "AB"}
    prompt = api("two_stage_guided_tiny")
    key = find(prompt, "LTX25LoRA")
    prompt[key]["inputs"]["lora_name"] = placed("loras", "other.safetensors", save(layers))
    refused_before_sampling(host, prompt, "none of its 1 layers", key)


@pytest.mark.parametrize("kind", ["another part", *BROKEN])
def test_r5_the_file_of_stage_two_is_checked_before_the_first_forward(host, api, find, tiny, placed, kind):
    """Stage 2 with a transformer of its own, as in graphs that users have."""
    data = TinyFiles.below(tiny).video_vae.read_bytes() if kind == "another part" else BROKEN[kind][0]
    prompt = api("two_stage_guided_tiny")
    load, lora = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25LoRA")
    name = placed("diffusion_models", "wrong-distilled.safetensors", data)
    prompt["second"] = {"class_type": "LoadLTX25Checkpoint", "inputs": {**prompt[load]["inputs"], "transformer": name}}
    (guider,) = [node for node in prompt.values() if node["inputs"].get("engine") == [lora, 0]]
    guider["inputs"]["engine"] = ["second", 0]
    del prompt[lora]
    refused_before_sampling(host, prompt, "wrong-distilled.safetensors", "second")


@pytest.mark.parametrize(("name", "residency"), [("two_stage_guided_tiny", "auto"), ("two_stage_hq_tiny", "auto"), ("two_stage_hq_tiny", "stream")])
def test_k4_k5_the_stages_of_a_workflow_have_their_own_strength_on_one_base(host, api, find, inspect, name, residency):
    """The base is read once for both stages and both runs, and stage 1 behind stage 2 is the one before it to the bit."""
    host.free()
    made = []
    for seed, frame_rate in ((43, 0.0), (44, 24.0)):
        prompt = api(name)
        prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]["residency"] = residency
        first, second = [key for key, node in prompt.items() if node["class_type"] == "LTX25Sampler"]
        prompt[first]["inputs"]["frame_rate"] = frame_rate  # both are the latent's own; another value makes it run again
        prompt[second]["inputs"]["seed"] = seed
        latents, report = [inspect(prompt, key) for key in (first, second)], inspect(prompt, second, 1)
        run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
        made.append([latent(run)["samples"] for latent in latents])
        assert f"-lora-8-bf16.safetensors at strength {'0.5' if 'hq' in name else '1'}: 164 of 164 layers matched" in report(run)
        closed = [line for line in newest_record(host) if line["event"] == "phase" and line["state"] == "closed"]
        assert {line["facts"]["residency"] for line in closed if line["name"] == "sample"} == {"stream" if residency == "stream" else "resident"}
        assert len([line for line in closed if line["name"] == "sample"]) == 2
        assert len([line for line in closed if line["name"] == "load.read" and line["facts"]["part"] == "transformer"]) == (1 if seed == 43 else 0)
    assert made[0][0] == made[1][0] and made[0][1] != made[1][1]
