"""Cancel, failures, and what comes after them."""

import json

import pytest
from comfyui_ltx25.tests.support.comfyui_host import Event


def interrupt_when(host, met):
    """An on_event that interrupts once `met(event)`; `at` holds the time of it."""
    at = []

    def on_event(item, run):
        if not at and isinstance(item, Event) and met(item):
            at.append(item.t)
            host.interrupt(run.prompt_id)

    return on_event, at


def long(api, find, seed):
    """Long enough to be caught in the middle."""
    prompt = api()
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(width=256, height=256, frames=49)
    prompt[find(prompt, "LTX25Sampler")]["inputs"].update(seed=seed, steps=40)
    return prompt


def told(node, word):
    return lambda event: event.type == "text" and event.data["node"] == node and word in event.data["text"]


def test_i4_cancel_while_sampling_interrupts_and_the_next_prompt_equals_a_fresh_one(host, api, find, inspect):
    reference = api()
    seen = inspect(reference, find(reference, "LTX25Sampler"))
    before = seen(host.run(reference))
    prompt = long(api, find, 201)
    sampler = find(prompt, "LTX25Sampler")
    on_event, at = interrupt_when(host, told(sampler, "step 2/40"))
    run = host.run(prompt, on_event=on_event)
    assert run.status == "interrupted" and run.seconds - at[0] < 2.0
    assert prompt[run.executed[-1]]["class_type"] == "LTX25Sampler", "nothing below the cancelled node ran"
    host.free()
    assert seen(host.run(reference)) == before


def test_the_record_of_a_cancelled_prompt_names_the_forward_it_stopped_at(host, api, find):
    prompt = long(api, find, 202)
    sampler = find(prompt, "LTX25Sampler")
    on_event, _ = interrupt_when(host, told(sampler, "step 3/40"))
    assert host.run(prompt, on_event=on_event).status == "interrupted"
    newest = max((host.base / "output" / "ltx25_runs").iterdir(), key=lambda path: path.stat().st_mtime)
    last = json.loads(newest.read_text().splitlines()[-1])
    assert last["event"] == "end" and last["status"] == "cancelled" and last["phase"] == "sample"
    assert "forward" in json.dumps(last)


@pytest.mark.parametrize("kind,word", [("DecodeAudioVAE", "decode.audio"), ("DecodeVideoVAE", "decode.video")])
def test_cancel_while_decoding_interrupts_within_two_seconds(host, api, find, inspect, kind, word):
    prompt = api("text_to_video_distilled_tiny")
    node = find(prompt, kind)
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": {"video": "[1, 128, 16, 10, 10]", "audio": "[1, 8, 126, 16]"}}
    prompt[node]["inputs"]["latent"] = ["latent", 0]
    inspect(prompt, node)
    on_event, at = interrupt_when(host, told(node, word))
    run = host.run(prompt, on_event=on_event, targets=[key for key in prompt if key.startswith("inspect")])
    assert run.status == "interrupted" and run.seconds - at[0] < 2.0


def test_i3_cancel_while_loading_leaves_nothing_half_loaded(host, api, find):
    host.free()
    prompt = api()
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 204
    sampler = find(prompt, "LTX25Sampler")
    on_event, at = interrupt_when(host, told(sampler, "load.read"))
    run = host.run(prompt, on_event=on_event)
    assert run.status == "interrupted" and run.seconds - at[0] < 2.0
    models = {"m": {"class_type": "ProbeModels", "inputs": {}}}
    held = json.loads(host.run(models).outputs["m"]["models"][0])
    assert all(entry["bytes"] in (0, entry["size"]) for entry in held)
    assert host.run(prompt).ok


def test_h7_a_failing_node_is_an_error_in_the_history_and_the_server_goes_on(host, api, find):
    prompt = api()
    prompt[find(prompt, "LTX25Guider")]["inputs"]["stg_blocks"] = "99"
    run = host.run(prompt)
    assert run.status == "error" and "99" in run.error["exception_message"]
    assert host.history(run.prompt_id)["status"]["status_str"] == "error"
    assert host.run(api()).ok


def test_q3_a_failing_job_does_not_poison_the_next(host, api, find):
    sizes = ((96, 64, 9), (100, 64, 9), (64, 96, 17))
    outcomes = []
    for width, height, frames in sizes:
        prompt = api("text_to_video_distilled_tiny")
        prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(width=width, height=height, frames=frames)
        outcomes.append(host.run(prompt).status)
    assert outcomes == ["success", "error", "success"]


def test_h4_the_server_answers_while_a_prompt_runs(host, api, find):
    import time

    prompt = long(api, find, 205)
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["steps"] = 2
    slowest = []

    def poll(item, run):
        begin = time.monotonic()
        host.queue()
        slowest.append(time.monotonic() - begin)

    assert host.run(prompt, on_event=poll).ok
    assert max(slowest) < 1.0
