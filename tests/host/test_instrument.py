"""PlanLTX25Render and LTX25RunReport on a real server, and what a prompt leaves in ltx25_runs."""

import json

import pytest
from comfyui_ltx25.tests.support.contract import NO_DEFAULT, NODES


def planned(api, find, **inputs):
    """A prompt that plans only, with `see(name)` nodes on its outputs."""
    prompt = {key: node for key, node in api().items() if node["class_type"] == "LoadLTX25Checkpoint"}
    (loader,) = prompt
    usual = {name: default for name, _, default in NODES["PlanLTX25Render"][0] if default is not NO_DEFAULT}
    small = {"width": 96, "height": 64, "seconds": 0.7, "steps": 4}
    prompt["plan"] = {"class_type": "PlanLTX25Render", "inputs": {"engine": [loader, 0], **usual, **small, **inputs}}
    for slot, name in enumerate(("text", "fits", "width", "height", "frames")):
        prompt[name] = {"class_type": "ProbeInspect", "inputs": {"value": ["plan", slot]}}
    return prompt


def seen(run, name):
    return json.loads(run.outputs[name]["seen"][0])


def newest_record(host):
    path = max((host.base / "output" / "ltx25_runs").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_plan_names_every_phase_and_what_it_rests_on(host, api, find):
    run = host.run(planned(api, find))
    assert run.ok, run.error
    text = seen(run, "text")
    for phase in ("load.read", "text.tower", "sample", "decode.video", "decode.audio"):
        assert phase in text
    assert "mux" not in text  # another node writes the clip
    assert "96x64, 17 frames at 24/s" in text and "peak host memory" in text and "it fits" in text
    assert [seen(run, name) for name in ("fits", "width", "height", "frames")] == [True, 96, 64, 17]


def test_a_plan_without_guidance_is_of_one_leg_in_a_model_with_fewer_blocks_than_the_published_one(host, api, find):
    run = host.run(planned(api, find, guidance=False))
    assert run.ok, run.error
    assert "tokens, 4 forwards, with" in seen(run, "text")


def test_two_stages_are_planned_with_the_upscaler_between_them(host, api, find):
    run = host.run(planned(api, find, width=128, two_stages=True))
    assert run.ok, run.error
    assert "19 forwards in two stages, the first at 64x32" in seen(run, "text") and "\nupscale " in seen(run, "text")
    run = host.run(planned(api, find, two_stages=True))
    assert not run.ok and "width 96 px is not a multiple of 64 (use 64 or 128)" in str(run.error)


def test_a_plan_reads_no_weights(host, api, find):
    host.free()
    assert host.run(planned(api, find, steps=5)).ok
    held = json.loads(host.run({"m": {"class_type": "ProbeModels", "inputs": {}}}).outputs["m"]["models"][0])
    assert not any(entry["bytes"] for entry in held)


def test_a_plan_is_made_again_for_a_newer_record_and_not_for_the_one_its_own_prompt_wrote(host, api, find):
    """What is linked to it runs again with it: the same prompt once more must not render once more, whatever was recorded."""
    folder = host.base / "output" / "ltx25_runs"
    prompt = {**api("text_to_video_distilled_tiny"), **planned(api, find, steps=8, schedule="distilled", guidance=False)}
    sampler, empty = find(prompt, "LTX25Sampler"), find(prompt, "EmptyLTX25Latent")
    prompt["plan"]["inputs"].update(engine=prompt[find(prompt, "LTX25Guider")]["inputs"]["engine"])
    prompt[empty]["inputs"].update({name: ["plan", slot] for slot, name in ((2, "width"), (3, "height"), (4, "frames"))})
    prompt[sampler]["inputs"]["seed"] = 320
    runs = [host.run(prompt) for _ in range(2)]  # now this size is measured
    before = len(list(folder.glob("*.jsonl")))
    runs += [host.run(prompt), host.run(prompt)]
    assert all(run.ok for run in runs)
    assert not {"plan", sampler} & {*runs[2].executed, *runs[3].executed}
    assert len(list(folder.glob("*.jsonl"))) == before
    newer = folder / "9.jsonl"
    newer.write_bytes(max(folder.glob("*.jsonl")).read_bytes())
    try:
        told = host.run(planned(api, find, steps=8, schedule="distilled", guidance=False))
        assert "plan" in told.executed and told.texts("plan")[-1][1].startswith("plan.read ")
        assert len(list(folder.glob("*.jsonl"))) == before + 1  # a plan is no run
    finally:
        newer.unlink()


def test_what_does_not_fit_is_said_with_the_largest_that_does(host, api, find):
    run = host.run(planned(api, find, width=1280, height=704, seconds=20.0, steps=30, time_budget="5s"))
    assert run.ok, run.error
    assert seen(run, "fits") is False
    assert "it does not fit: it takes about" in seen(run, "text")
    assert "the largest that fits" in seen(run, "text") or "nothing fits" in seen(run, "text")
    assert seen(run, "width") <= 1280 and seen(run, "height") <= 704


@pytest.mark.parametrize(("name", "value"), [("time_budget", "soon"), ("memory_budget", "much")])
def test_a_budget_nobody_can_read_is_one_sentence(host, api, find, name, value):
    run = host.run(planned(api, find, **{name: value}))
    assert not run.ok and value in str(run.error) and "write it like" in str(run.error)


def test_the_report_draws_the_run_that_was_just_done(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 301
    prompt["report"] = {"class_type": "LTX25RunReport", "inputs": {"record": "last", "after": [find(prompt, "DecodeVideoVAE"), 0]}}
    image, text = inspect(prompt, "report"), inspect(prompt, "report", 1)
    run = host.run(prompt)
    assert run.ok, run.error
    picture = image(run)
    assert picture["shape"][0] == 1 and picture["shape"][2:] == [1280, 3] and picture["shape"][1] > 300
    assert picture["dtype"] == "torch.float32" and 0 <= picture["min"] < picture["max"] <= 1
    assert "sample" in text(run) and "decode.video" in text(run)


def test_a_record_that_does_not_exist_is_one_sentence(host):
    run = host.run({"report": {"class_type": "LTX25RunReport", "inputs": {"record": "no such record"}}, "see": {"class_type": "ProbeInspect", "inputs": {"value": ["report", 1]}}})
    assert not run.ok and "no such record" in str(run.error) and "ltx25 runs show" in str(run.error)


def test_a_profiled_step_is_in_the_report_and_the_record(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    sampler = find(prompt, "LTX25Sampler")
    prompt[sampler]["inputs"].update(seed=302, profile=True)
    report = inspect(prompt, sampler, 1)
    run = host.run(prompt)
    assert run.ok, run.error
    for kind in ("matrix products", "attention", "element-wise", "copies", "host gaps"):
        assert kind in report(run)
    (traced,) = [event for event in newest_record(host) if event["event"] == "profile"]
    assert sum(traced["seconds"].values()) == pytest.approx(traced["wall"], rel=0.02)


def test_one_prompt_leaves_one_whole_record_without_its_words(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 303
    words = "a heron that nobody else writes about"
    prompt[find(prompt, "EncodeGemmaText")]["inputs"]["text"] = words
    before = len(list((host.base / "output" / "ltx25_runs").glob("*.jsonl")))
    assert host.run(prompt).ok
    assert len(list((host.base / "output" / "ltx25_runs").glob("*.jsonl"))) == before + 1
    events = newest_record(host)
    assert events[0]["event"] == "run" and events[-1]["event"] == "end" and events[-1]["status"] == "done"
    names = {event["name"] for event in events if event["event"] == "phase"}
    assert {"text.tower", "sample", "decode.video", "decode.audio"} <= names
    assert words not in json.dumps(events)
    done = [event for event in events if event["event"] == "forward" and event["state"] == "done"]
    assert done[-1]["last"] == done[-1]["of"]
    prompt = api("text_to_video_tiny")  # two texts, known by now or not: both are counted
    prompt[find(prompt, "LTX25Guider")]["inputs"]["stg_blocks"] = "99"
    for legs in ("auto", "sequential"):  # another engine, which has both texts from memory
        prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]["legs"] = legs
        assert host.run(prompt).status == "error"
    (*_, about) = [event for event in newest_record(host) if event["event"] == "about"]
    texts = [len(node["inputs"]["text"]) for node in prompt.values() if node["class_type"] == "EncodeGemmaText"]
    assert sorted(told["characters"] for told in about["prompts"].values()) == sorted(texts) and len(texts) == 2


def test_clips_of_one_prompt_are_booked_at_their_own_sizes(host, api, find):
    """Every sampler of a graph describes its clip in the one header; the last of these makes a sound alone."""
    prompt = api("text_to_video_distilled_tiny")
    sampler, empty = find(prompt, "LTX25Sampler"), find(prompt, "EmptyLTX25Latent")
    video, audio = find(prompt, "DecodeVideoVAE"), find(prompt, "DecodeAudioVAE")
    targets = []
    for n, size in enumerate(({"width": 64, "height": 64, "frames": 9, "batch_size": 2}, {"width": 128, "height": 64, "frames": 17})):
        copies = {empty: f"empty{n}", sampler: f"sampler{n}", video: f"video{n}", audio: f"audio{n}"}
        for old, new in copies.items():
            inputs = {name: [copies.get(value[0], value[0]), value[1]] if isinstance(value, list) else value for name, value in prompt[old]["inputs"].items()}
            prompt[new] = {"class_type": prompt[old]["class_type"], "inputs": inputs}
        prompt[f"empty{n}"]["inputs"].update(size)
        prompt[f"sampler{n}"]["inputs"]["seed"] = 310 + n
        targets += [f"video{n}", f"audio{n}"]
    prompt["apart"] = {"class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": ["empty1", 0]}}
    prompt["sound"] = {"class_type": "LTX25Sampler", "inputs": {**prompt["sampler1"]["inputs"], "latent": ["apart", 1], "seed": 312}}
    prompt["heard"] = {"class_type": "DecodeAudioVAE", "inputs": {**prompt["audio1"]["inputs"], "latent": ["sound", 0]}}
    for target in (*targets, "heard"):
        prompt[f"see {target}"] = {"class_type": "ProbeInspect", "inputs": {"value": [target, 0], "tag": ""}}
    run = host.run(prompt, targets=[f"see {target}" for target in (*targets, "heard")])
    assert run.ok, run.error
    closed = [event for event in newest_record(host) if event["event"] == "phase" and event["state"] == "closed"]
    sizes = sorted(tuple(row["facts"][name] for name in ("width", "height", "frames", "batch")) for row in closed if row["name"] == "decode.video")
    assert sizes == [(64, 64, 9, 2), (128, 64, 17, 1)]
    assert sorted((row["facts"]["latent_frames"], row["facts"]["batch"]) for row in closed if row["name"] == "decode.audio") == [(9, 2), (18, 1), (18, 1)]


@pytest.mark.parametrize(
    ("node", "inputs", "word"), [("LTX25Guider", {"stg_blocks": "99"}, "99"), ("LTX25Sampler", {"sampler": "euler_cfg_pp"}, "euler_cfg_pp")]
)
def test_a_prompt_that_fails_in_any_node_is_recorded_as_failed(host, api, find, inspect, node, inputs, word):
    """The encode node's part was done, and a guider runs no phase that could fail."""
    prompt = api("text_to_video_distilled_tiny" if node == "LTX25Sampler" else "text_to_video_tiny")
    words = f"a heron for {node}"
    for entry in prompt.values():
        if entry["class_type"] == "EncodeGemmaText":
            entry["inputs"]["text"] = words
    prompt[find(prompt, node)]["inputs"].update(inputs)
    run = host.run(prompt)
    assert run.status == "error" and word in run.error["exception_message"]
    ends = [event for event in newest_record(host) if event["event"] == "end"]
    assert [end["status"] for end in ends[-2:]] == ["done", "failed"]  # the encode's part, then the one failure
    assert word in ends[-1]["error"] and "InputError" in ends[-1]["error"]
    report = {"report": {"class_type": "LTX25RunReport", "inputs": {"record": "last"}}}
    text = inspect(report, "report", 1)
    said = text(host.run(report))
    assert ": failed" in said.splitlines()[0] and word in said
    assert node != "LTX25Guider" or said.splitlines()[0].endswith("failed in LTX25Guider")
