"""The straight path: a prompt to a file that plays, and what runs again when something changes."""

import io
import json
import re
from fractions import Fraction

import av
import pytest
import torch
from comfyui_ltx25.ltx25.hdr import CURVES, to_linear
from comfyui_ltx25.tests.support.exr import read_exr

SAMPLE = 1 / 48000


def decoded(data):
    """Frames, size, rate and audio samples of a video file."""
    with av.open(io.BytesIO(data)) as container:
        video = container.streams.video[0]
        facts = {"codec": video.codec_context.name, "size": (video.width, video.height), "rate": video.average_rate}
        facts["frames"] = sum(1 for _ in container.decode(video=0))
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        facts["audio"] = {"codec": stream.codec_context.name, "rate": stream.rate, "channels": stream.codec_context.channels}
        facts["samples"] = sum(frame.samples for frame in container.decode(audio=0))
    return facts


@pytest.mark.parametrize("name", ["text_to_video_tiny", "text_to_video_distilled_tiny"])
def test_workflow_ends_in_a_file_that_plays_with_exactly_what_was_asked_for(host, api, find, name):
    prompt = api(name)
    asked = prompt[find(prompt, "EmptyLTX25Latent")]["inputs"]
    run = host.run(prompt)
    assert run.ok, run.error
    (file,) = run.files(find(prompt, "SaveVideo"))
    facts = decoded(host.fetch(file))
    assert facts["codec"] == "h264" and facts["audio"] == {"codec": "aac", "rate": 48000, "channels": 2}
    assert (facts["frames"], facts["size"], facts["rate"]) == (asked["frames"], (asked["width"], asked["height"]), Fraction(24))
    assert abs(facts["samples"] - round(asked["frames"] / 24 * 48000)) <= 1024


@pytest.mark.parametrize("frames,rate", [(17, 23.976), (9, 24.0), (1, 24.0), (17, 60.0)])
def test_frames_and_sound_are_exactly_as_long_as_asked_for(host, api, find, inspect, frames, rate):
    prompt = api("text_to_video_distilled_tiny")
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(frames=frames, frame_rate=rate)
    video, audio = find(prompt, "DecodeVideoVAE"), find(prompt, "DecodeAudioVAE")
    images, fps, sound = inspect(prompt, video), inspect(prompt, video, 1), inspect(prompt, audio)
    run = host.run(prompt)
    assert images(run)["shape"] == [frames, 64, 96, 3] and images(run)["dtype"] == "torch.float32" and images(run)["device"] == "cpu"
    assert images(run)["min"] >= 0 and images(run)["max"] <= 1 and images(run)["finite"]
    assert fps(run) == rate
    assert sound(run)["waveform"]["shape"] == [1, 2, round(frames / rate * 48000)]
    assert sound(run)["waveform"]["dtype"] == "torch.float32" and sound(run)["sample_rate"] == 48000


def test_a6_audio_is_a_plain_dict_that_the_native_saver_takes(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    prompt["save"] = {"class_type": "SaveAudio", "inputs": {"audio": [find(prompt, "DecodeAudioVAE"), 0], "filename_prefix": "audio/tiny"}}
    run = host.run(prompt)
    assert run.ok, run.error
    (file,) = run.files("save")
    with av.open(io.BytesIO(host.fetch(file))) as container:
        assert container.streams.audio[0].rate == 48000
        assert sum(frame.samples for frame in container.decode(audio=0)) == round(17 / 24 * 48000)


@pytest.mark.parametrize("curve", CURVES)
def test_linear_light_reaches_the_native_exr_saver_unclipped_and_sdr_stays_what_it_was(host, api, find, inspect, curve):
    """A prompt saved before `transfer` existed does not have it, and decodes to the same bits as sdr."""
    prompt, latent = api("text_to_video_distilled_tiny"), {"class_type": "ProbeLatent", "inputs": {"video": "[1,128,3,2,3]"}}
    engine = [find(prompt, "LoadLTX25Checkpoint"), 0]
    small = {engine[0]: prompt[engine[0]], "latent": latent}
    given = {"old": {}, "sdr": {"transfer": "sdr"}, "hdr": {"transfer": curve}}
    for name, more in given.items():
        small[name] = {"class_type": "DecodeVideoVAE", "inputs": {"engine": engine, "latent": ["latent", 0], "tiling": "auto", **more}}
    seen = {name: inspect(small, name) for name in given}
    fmt = {"format": "exr", "format.bit_depth": "32-bit float", "format.input_color_space": "linear"}
    small["save"] = {"class_type": "SaveImageAdvanced", "inputs": {"images": ["hdr", 0], "filename_prefix": f"light/{curve}", **fmt}}
    small["signal"] = {"class_type": "SaveImageAdvanced", "inputs": {"images": ["sdr", 0], "filename_prefix": f"signal/{curve}", **fmt}}
    run = host.run(small)
    assert run.ok, run.error and run.error["exception_message"]
    assert seen["old"](run)["digest"] == seen["sdr"](run)["digest"] and seen["sdr"](run)["max"] <= 1
    light = torch.stack([read_exr(host.fetch(file)) for file in run.files("save")])
    assert light.shape == (17, 64, 96, 3)
    assert (float(light.min()), float(light.max())) == (seen["hdr"](run)["min"], seen["hdr"](run)["max"]) and light.max() > 2
    signal = torch.stack([read_exr(host.fetch(file)) for file in run.files("signal")])  # written as it is: "linear" changes nothing
    torch.testing.assert_close(light, to_linear(signal, curve), rtol=1e-5, atol=1e-6)


def test_the_same_prompt_again_runs_nothing_and_a_new_seed_runs_the_sampler_and_below(host, api, find):
    prompt = api()
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 1
    assert host.run(prompt).ok
    assert host.run(prompt).executed == []
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 2
    again = host.run(prompt)
    below = ("LTX25Sampler", "PreviewAny", "DecodeVideoVAE", "DecodeAudioVAE", "CreateVideo", "SaveVideo")
    assert {prompt[key]["class_type"] for key in again.executed} == set(below)


def test_a_new_text_encodes_once_and_reads_no_file_again(host, api, find):
    prompt = api()
    words = prompt[find(prompt, "EncodeGemmaText", "Prompt")]["inputs"]
    words["text"] = "A day and a prompt that no engine has encoded."  # or the encoder would not be read for it
    assert host.run(prompt).ok
    words["text"] = "Another day, another prompt."
    again = host.run(prompt)
    assert again.ok
    kinds = [prompt[key]["class_type"] for key in again.executed]
    assert kinds.count("EncodeGemmaText") == 1 and "LoadLTX25Checkpoint" not in kinds
    assert not [text for _, text in again.texts() if text.startswith("load.")]


def test_b7_e4_a_prompt_that_was_cut_is_told_by_its_node_and_by_the_sampler_also_from_a_cache(host, api, find, inspect):
    prompt = api()
    for title, words in (("Prompt", 3000), ("Negative prompt", 2000)):
        prompt[find(prompt, "EncodeGemmaText", title)]["inputs"]["text"] = "fox " * words
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    cut = re.compile(r"(negative )?prompt has \d+ tokens, the first 1023 \+ BOS are used")
    run = host.run(prompt)
    for kind, title in (("EncodeGemmaText", "Prompt"), ("EncodeGemmaText", "Negative prompt"), ("LTX25Sampler", None)):
        assert any(cut.search(text) for _, text in run.texts(find(prompt, kind, title))), kind
    wanted = sorted(match.group() for match in cut.finditer(report(run)))
    assert [line.startswith("negative ") for line in wanted] == [True, False]
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] += 1  # its texts are not encoded again
    assert sorted(match.group() for match in cut.finditer(report(host.run(prompt)))) == wanted


def test_b2_the_same_seed_gives_the_same_latent_whatever_ran_between(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    sampler = find(prompt, "LTX25Sampler")
    seen = inspect(prompt, sampler)

    def latent(seed):
        prompt[sampler]["inputs"]["seed"] = seed
        return [part["digest"] for part in seen(host.run(prompt))["samples"]["nested"]]

    first, other = latent(5), latent(6)
    host.free()
    assert latent(5) == first
    assert first[0] != other[0] and first[1] != other[1]


def test_b1_item_i_of_a_batch_equals_a_single_run_with_seed_plus_i(host, api, find, inspect):
    prompt = api()
    sampler, video = find(prompt, "LTX25Sampler"), find(prompt, "DecodeVideoVAE")
    images = inspect(prompt, video)
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(frames=9, batch_size=2)
    prompt["one"] = {"class_type": "ImageFromBatch", "inputs": {"image": [video, 0], "batch_index": 9, "length": 9}}
    second = inspect(prompt, "one")
    run = host.run(prompt)
    assert images(run)["shape"] == [18, 64, 96, 3]
    batch = second(run)
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"]["batch_size"] = 1
    prompt[sampler]["inputs"]["seed"] += 1
    del prompt["one"], prompt["inspect-one-0"]
    alone = images(host.run(prompt))
    for name in ("min", "max", "std"):
        assert alone[name] == pytest.approx(batch[name], abs=1e-5)


def test_report_is_a_phase_table_with_the_forwards_that_ran_and_the_record_of_the_run(host, api, find, inspect):
    prompt = api()
    prompt[find(prompt, "LTX25Sampler")]["inputs"]["seed"] = 77
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    text = report(host.run(prompt))
    assert "sample" in text and "16 forwards" in text
    assert "forwards of this node: 16 (4 x cond+uncond+stg+mod)" in text
    record = host.base / "output" / "ltx25_runs" / text.rsplit("/", 1)[1]
    events = [json.loads(line) for line in record.read_text().splitlines()]
    assert events[0]["event"] == "run" and events[-1]["event"] == "end" and events[-1]["status"] == "done"
    assert {"sample", "decode.video", "decode.audio"} <= {event.get("name") for event in events if event["event"] == "phase"}


def test_c4_h3_prompts_stay_out_of_the_record_unless_asked_for(host, api):
    assert host.run(api()).ok
    for record in (host.base / "output" / "ltx25_runs").iterdir():
        assert "fisherman" not in record.read_text()


def test_r1_a_size_off_the_grid_is_refused_with_the_nearest_ones(host, api, find):
    prompt = api()
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(width=100, height=100, frames=10)
    run = host.run(prompt)
    assert run.status == "error"
    message = run.error["exception_message"]
    for part in ("width 100", "96 or 128", "height 100", "frames 10", "9 or 17"):
        assert part in message
