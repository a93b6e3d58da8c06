"""LTX25LoRA on a real server: between loader and guider, chained, taken off, and with a file that is no LoRA."""

import re

import pytest
from comfyui_ltx25.tests.host.test_instrument import newest_record


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
    run = host.run(prompt)
    assert not run.ok and re.search(r"none of its \d+ layers", str(run.error))


@pytest.mark.parametrize("name", ["two_stage_guided_tiny", "two_stage_hq_tiny"])
def test_k4_k5_the_stages_of_a_workflow_have_their_own_strength_on_one_base(host, api, inspect, name):
    """The base is read once for both stages and both runs, and stage 1 behind stage 2 is the one before it to the bit."""
    host.free()
    made = []
    for seed, frame_rate in ((43, 0.0), (44, 24.0)):
        prompt = api(name)
        first, second = [key for key, node in prompt.items() if node["class_type"] == "LTX25Sampler"]
        prompt[first]["inputs"]["frame_rate"] = frame_rate  # both are the latent's own; another value makes it run again
        prompt[second]["inputs"]["seed"] = seed
        latents, report = [inspect(prompt, key) for key in (first, second)], inspect(prompt, second, 1)
        run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
        made.append([latent(run)["samples"] for latent in latents])
        assert f"-lora-8-bf16.safetensors at strength {'0.5' if 'hq' in name else '1'}: 164 of 164 layers matched" in report(run)
        opened = [line for line in newest_record(host) if line["event"] == "phase" and line["state"] == "opened"]
        assert len([line for line in opened if line["name"] == "sample"]) == 2
        assert len([line for line in opened if line["name"] == "load.read" and line["part"] == "transformer"]) == (1 if seed == 43 else 0)
    assert made[0][0] == made[1][0] and made[0][1] != made[1][1]
