"""Diffusion fidelity rendering on a real server: the shipped workflow, padded clips, and what its nodes refuse."""

import io

import av
import pytest
from comfyui_ltx25.tests.support.comfyui_host import Rejected


@pytest.fixture
def dfr(api, find):
    """The tiny workflow at 41 frames of 64 x 64 px, a clip that is no whole number of segments, with widgets changed."""

    def of(frames=41, **widgets):
        prompt = api("dfr_tiny")
        prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(width=64, height=64, frames=frames)
        prompt[find(prompt, "LTX25TemporalRounds")]["inputs"].update(widgets)
        return prompt

    return of


def test_two_rounds_of_a_padded_clip_end_in_four_times_the_frames_that_were_asked_for(host, dfr, find, inspect):
    prompt = dfr(rounds=2)
    rounds = find(prompt, "LTX25TemporalRounds")
    small, large = (find(prompt, "LTX25Sampler", title) for title in ("LTX-2.5 Sampler", "Stage 2"))
    prompt["sound"] = {"class_type": "ProbeFrames", "inputs": {"latent": [small, 0], "start": 0, "count": 1, "audio": 44}}  # 41 / 24 s
    seen = {name: inspect(prompt, *where) for name, where in {"small": (small, 0), "sound": ("sound", 0), "marks": (large, 2), "made": (rounds, 0), "report": (rounds, 1), "fps": (find(prompt, "DecodeVideoVAE"), 1)}.items()}
    run = host.run(prompt, timeout=400)
    made, report = seen["made"](run), seen["report"](run)
    stage1 = seen["small"](run)
    assert [part["shape"] for part in stage1["samples"]["nested"]] == [[1, 128, 7, 2, 2], [1, 8, 51, 16]]  # 49 frames
    assert stage1["clip_frames"] == 41
    marks = seen["marks"](run)
    assert marks["keyframes"] == [24, 48] and marks["samples"]["shape"] == [2, 128, 1, 4, 4]
    video, sound = made["samples"]["nested"]
    assert video["shape"] == [1, 128, 21, 4, 4] and video["finite"] and made["frame_rate"] == 96
    assert sound["digest"] == seen["sound"](run)["samples"]["nested"][1]["digest"]  # of stage 1, to the bit, without the padding's
    assert "conditions" not in made and "clip_frames" not in made and "noise_mask" not in made
    assert "forwards of this node: 24 (24 x cond)" in report and "refine" in report
    last = run.texts(rounds)[-1][1].splitlines()[-1]
    outer, _, inner = last.partition(" (")
    assert outer.startswith("refine ") and " - sample " in f" - {inner}" and last.endswith(")")  # inside it: their seconds are no sum
    assert seen["fps"](run) == 96
    (file,) = run.files(find(prompt, "SaveVideo"))
    with av.open(io.BytesIO(host.fetch(file))) as container:
        assert sum(1 for _ in container.decode(video=0)) == 161 and container.streams.video[0].average_rate == 96
        assert (container.streams.video[0].width, container.streams.video[0].height) == (128, 128)
    with av.open(io.BytesIO(host.fetch(file))) as container:
        assert abs(sum(frame.samples for frame in container.decode(audio=0)) - round(161 / 96 * 48000)) <= 1024


def test_an_extension_in_segments_is_one_clip_once_it_is_sampled(host, api, find, inspect):
    """17 frames, 24 more and a loop, in a canvas of 49: the mask of the extension goes, what it kept is as it was."""
    prompt = api("text_to_video_distilled_tiny")
    load, sampler = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25Sampler")
    prompt["clip"] = {"class_type": "ProbeLatent", "inputs": {"video": "[1, 128, 3, 2, 2]", "audio": "[1, 8, 18, 16]"}}
    prompt["longer"] = {"class_type": "LTX25Extend", "inputs": {"engine": [load, 0], "latent": ["clip", 0], "frames": 24, "loop": True}}
    prompt["slots"] = {"class_type": "LTX25KeyframeSlots", "inputs": {"engine": [load, 0], "latent": ["longer", 0], "count": 0, "frames": "", "grid": "segments"}}
    prompt["levels"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": "1.0, 0.0"}}
    prompt[sampler]["inputs"].update(latent=["slots", 0], sigmas=["levels", 0], sampler="euler")
    prompt["kept"] = {"class_type": "ProbeFrames", "inputs": {"latent": [sampler, 0], "start": 0, "count": 3, "audio": 18}}
    asked, given, made, kept = (inspect(prompt, key) for key in ("slots", "clip", sampler, "kept"))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert "noise_mask" in asked(run) and asked(run)["clip_frames"] == 41
    assert [part["shape"][2] for part in made(run)["samples"]["nested"]] == [7, 51] and "noise_mask" not in made(run)
    assert [part["digest"] for part in kept(run)["samples"]["nested"]] == [part["digest"] for part in given(run)["samples"]["nested"]]


def test_a_padded_clip_is_decoded_as_long_as_it_was_asked_for(host, api, find, inspect):
    """Also without any round: 17 frames in a canvas of 25, picture and sound; and zero rounds cut it as the decoders do."""
    prompt = api("dfr_tiny")
    sample = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler")
    keep = {sample}
    while new := {v[0] for key in keep for v in prompt[key]["inputs"].values() if isinstance(v, list)} - keep:
        keep |= new
    small = {key: node for key, node in prompt.items() if key in keep}
    engine = [find(prompt, "LoadLTX25Checkpoint"), 0]
    small["video"] = {"class_type": "DecodeVideoVAE", "inputs": {"engine": engine, "latent": [sample, 0], "tiling": "auto"}}
    small["audio"] = {"class_type": "DecodeAudioVAE", "inputs": {"engine": engine, "latent": [sample, 0]}}
    rounds = {**prompt[find(prompt, "LTX25TemporalRounds")]["inputs"], "latent": [sample, 0], "keyframes": [sample, 2], "rounds": 0}
    small["cut"] = {"class_type": "LTX25TemporalRounds", "inputs": rounds}
    small["apart"] = {"class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": [sample, 0]}}
    small["alone"] = {"class_type": "DecodeAudioVAE", "inputs": {"engine": engine, "latent": ["apart", 1]}}
    small["longer"] = {"class_type": "LTX25Extend", "inputs": {"engine": engine, "latent": ["cut", 0], "frames": 8, "loop": False}}
    seen = {key: inspect(small, key) for key in ("video", "audio", "cut", "alone", "longer")}
    seen["whole"] = inspect(small, sample)
    run = host.run(small, timeout=240)
    assert seen["whole"](run)["samples"]["nested"][0]["shape"][2] == 4
    assert seen["video"](run)["shape"] == [17, 64, 96, 3]
    assert seen["audio"](run)["waveform"]["shape"] == seen["alone"](run)["waveform"]["shape"] == [1, 2, round(17 / 24 * 48000)]
    sounds = [seen[key](run)["samples"]["nested"][1] for key in ("whole", "cut", "longer")]
    assert [sound["shape"][2] for sound in sounds] == [26, 19, 26]  # 19 are what 17 / 24 s are decoded from
    made = seen["longer"](run)["noise_mask"]["nested"][1]
    assert made["max"] == 1.0 and made["min"] == 0.0, "what the extension adds has its sound made: that of the padding is not kept"
    cut = seen["cut"](run)
    assert cut["samples"]["nested"][0]["shape"][2] == 3 and cut["frame_rate"] == 24


def test_an_upscaler_that_does_not_double_the_frames_is_refused_before_anything_runs(host, dfr, find):
    prompt = dfr()
    spatial = prompt[find(prompt, "LTX25LatentUpscale", "Upscale keyframes")]["inputs"]["upscale_model"]
    with pytest.raises(Rejected, match="choose the temporal upscaler"):
        host.run(dfr(upscale_model=spatial))


@pytest.mark.parametrize(
    "first, second, rounds, clip, node, words",
    [
        ({}, {"grid": "even"}, {}, {}, "Keyframes, stage 2", "of frames [24] and the slots stand at [6, 12, 18]; use the same grid"),
        ({"grid": "even"}, {"grid": "even", "count": 2}, {}, {}, "Keyframes, stage 2", "of frames [6, 12, 18] and the slots stand at [8, 16]"),
        ({"grid": "even"}, {"grid": "even", "frames": "6, 12, 30"}, {}, {}, "Keyframes, stage 2", "wanted rising numbers from 0 to 24"),
        ({"grid": "even"}, {"grid": "even"}, {}, {}, "LTX-2.5 Temporal Rounds", "stand at [6, 12, 18] of a clip of 25 frames"),
        ({}, {}, {"rounds": 2}, {"frame_rate": 100.0}, "LTX-2.5 Temporal Rounds", "2 round(s) make 400 frames a second of 100"),
    ],
)
def test_keyframes_that_a_node_far_behind_would_refuse_are_refused_before_the_first_stage(host, dfr, find, inspect, first, second, rounds, clip, node, words):
    prompt = dfr(frames=25, **rounds)
    sampler, stages = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler"), [find(prompt, "LTX25KeyframeSlots", f"Keyframes, stage {stage}") for stage in (1, 2)]
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(clip)
    for key, widgets in zip(stages, (first, second), strict=True):
        prompt[key]["inputs"].update(widgets)
    run = host.run(prompt, timeout=240)
    (refusing,) = [key for key, one in prompt.items() if one["_meta"]["title"] == node]
    assert not run.ok and run.error["node_id"] == sampler, run.error
    assert run.error["exception_message"].startswith(f"node {refusing} ({node}) would refuse") and words in run.error["exception_message"]
    assert not [text for _, text in run.texts() if text.startswith("sample")]


def test_keyframes_are_asked_about_for_nodes_that_run_alone(host, dfr, find, inspect):
    """The first stage by itself, with a second one that is not set up yet; and frames that come over a link are not known yet."""
    prompt = dfr(frames=25)
    sampler, second = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler"), find(prompt, "LTX25KeyframeSlots", "Keyframes, stage 2")
    prompt[second]["inputs"]["grid"] = "even"
    seen = inspect(prompt, sampler, 2)
    assert seen(host.run(prompt, targets=[f"inspect-{sampler}-2"]))["keyframes"] == [24]
    prompt["text"] = {"class_type": "ProbeValue", "inputs": {"text": "3"}}
    prompt[sampler]["inputs"]["seed"] = 77
    prompt[second]["inputs"]["frames"] = ["text", 0]
    run = host.run(prompt, timeout=240)
    assert run.error["node_id"] == second and "of frames [24] and the slots stand at [3]" in run.error["exception_message"]


def test_keyframes_are_not_asked_about_for_a_branch_that_a_switch_leaves_out(host, dfr, find):
    """The host runs what is behind a lazy input only once the node asks for it."""
    prompt = dfr(frames=25)
    small, rounds = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler"), find(prompt, "LTX25TemporalRounds")
    prompt[find(prompt, "LTX25KeyframeSlots", "Keyframes, stage 2")]["inputs"]["grid"] = "even"
    prompt["which"] = {"class_type": "ComfySwitchNode", "inputs": {"switch": False, "on_false": [small, 0], "on_true": [rounds, 0]}}
    for kind in ("DecodeVideoVAE", "DecodeAudioVAE"):
        prompt[find(prompt, kind)]["inputs"]["latent"] = ["which", 0]
    prompt[find(prompt, "PreviewAny")]["inputs"]["source"] = [small, 1]
    run = host.run(prompt, timeout=240)
    assert run.ok, run.error and run.error["exception_message"]
    assert rounds not in run.executed


def test_a_mask_of_every_frame_that_was_asked_for_leaves_the_padding_to_be_made(host, dfr, find, inspect):
    """41 frames in a canvas of 49: who masks each of them knows nothing of the other 8."""
    prompt = dfr(frames=41)
    small = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler")
    prompt["clip"] = {"class_type": "ProbeLatent", "inputs": {"video": "[1,128,7,2,2]", "keys": '{"frame_rate": 24.0, "clip_frames": 41}'}}
    prompt["black"] = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 40, "color": 0}}
    prompt["white"] = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0xFFFFFF}}
    prompt["frames"] = {"class_type": "ImageBatch", "inputs": {"image1": ["black", 0], "image2": ["white", 0]}}
    prompt["mask"] = {"class_type": "ImageToMask", "inputs": {"image": ["frames", 0], "channel": "red"}}
    prompt["masked"] = {"class_type": "SetLatentNoiseMask", "inputs": {"samples": ["clip", 0], "mask": ["mask", 0]}}
    prompt[small]["inputs"]["latent"] = ["masked", 0]
    for key, source, start, count in (("given", "clip", 0, 5), ("kept", small, 0, 5), ("old end", "clip", 6, 1), ("end", small, 6, 1)):
        prompt[key] = {"class_type": "ProbeFrames", "inputs": {"latent": [source, 0], "start": start, "count": count}}
    given, kept, old, end = (inspect(prompt, key) for key in ("given", "kept", "old end", "end"))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert kept(run)["samples"]["digest"] == given(run)["samples"]["digest"] and end(run)["samples"]["digest"] != old(run)["samples"]["digest"]


def test_a_mask_that_rounds_do_not_read_is_told(host, dfr, find):
    prompt = dfr(frames=25)
    rounds = find(prompt, "LTX25TemporalRounds")
    prompt["none"] = {"class_type": "SolidMask", "inputs": {"value": 0.0, "width": 64, "height": 64}}
    prompt["kept"] = {"class_type": "SetLatentNoiseMask", "inputs": {"samples": prompt[rounds]["inputs"]["latent"], "mask": ["none", 0]}}
    told = [" ".join(text for _, text in host.run(prompt, timeout=240).texts(rounds))]
    prompt[rounds]["inputs"]["latent"] = ["kept", 0]
    told.append(" ".join(text for _, text in host.run(prompt, timeout=240).texts(rounds)))
    assert ["noise mask of the latent is not read here" in text for text in told] == [False, True]


def test_a_part_of_the_keyframes_is_told_from_all_of_them(host, dfr, find):
    prompt = dfr(frames=41, rounds=0)
    small = find(prompt, "LTX25Sampler", "LTX-2.5 Sampler")
    larger = find(prompt, "LTX25LatentUpscale", "Upscale keyframes")
    prompt["one"] = {"class_type": "LatentFromBatch", "inputs": {"samples": [small, 2], "batch_index": 0, "length": 1}}
    prompt[larger]["inputs"]["latent"] = ["one", 0]
    run = host.run(prompt, timeout=240)
    assert run.error["node_id"] == larger and "are 1 pictures, and their frames [24, 48] are 2 a clip; connect" in run.error["exception_message"]


@pytest.mark.parametrize(
    "sound, words",
    [({"video": "[1,128,3,2,2]"}, "sound is a latent without any"), ({"audio": "[2,8,26,16]"}, "sound is of 2 clips and the latent of 1")],
)
def test_a_sound_that_is_none_of_this_clip_is_refused_before_a_round_is_sampled(host, dfr, find, sound, words):
    prompt = dfr(frames=25)
    rounds = find(prompt, "LTX25TemporalRounds")
    prompt["other"] = {"class_type": "ProbeLatent", "inputs": sound}
    prompt[rounds]["inputs"]["sound"] = ["other", 0]
    run = host.run(prompt, timeout=240)
    assert not run.ok and run.error["node_id"] == rounds and words in run.error["exception_message"], run.error
    assert not [text for _, text in run.texts(rounds) if "sample" in text]


@pytest.mark.parametrize(
    "node, latents, words",
    [
        ("LTX25LatentReference", {"latent": "[1,128,3,4,6]", "reference": "[1,128,3,3,3]"}, "sides a whole number of times smaller"),
        ("LTX25LatentReference", {"latent": "[1,128,3,4,6]", "reference": "[1,128,2,2,3]"}, "wanted as many frames"),
        ("LTX25TemporalRounds", {"latent": "[1,128,3,4,6]", "keyframes": "[1,128,1,4,6]"}, "do not say where they stand"),
    ],
)
def test_latents_that_do_not_go_together_are_told(host, dfr, find, node, latents, words):
    prompt = dfr()
    key = find(prompt, node)
    for name, shape in latents.items():
        prompt[name] = {"class_type": "ProbeLatent", "inputs": {"video": shape}}
        prompt[key]["inputs"][name] = [name, 0]
    if node == "LTX25TemporalRounds":  # alone: no stage has to run for it
        prompt[key]["inputs"].pop("sound")
    run = host.run(prompt, timeout=240)
    assert not run.ok and words in run.error["exception_message"]
