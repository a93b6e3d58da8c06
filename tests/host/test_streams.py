"""Latents of one stream or two, between our nodes and native ones, and our guider under the native sampler."""

import pytest

EMPTY = {"fill": "zeros"}
VIDEO, AUDIO = "[1, 128, 3, 2, 3]", "[1, 8, 18, 16]"


def sampled(api, find, name="text_to_video_tiny", **latent):
    """The workflow on another latent; returns the prompt and the sampler's id."""
    prompt = api(name)
    sampler = find(prompt, "LTX25Sampler")
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": latent}
    prompt[sampler]["inputs"]["latent"] = ["latent", 0]
    return prompt, sampler


def natively(api, find, name="text_to_video_tiny", sampler="euler", seed=7):
    """The workflow with SamplerCustomAdvanced in place of our sampler, at the same noise levels."""
    prompt = api(name)
    ours = find(prompt, "LTX25Sampler")
    inputs = prompt[ours]["inputs"]
    prompt["noise"] = {"class_type": "RandomNoise", "inputs": {"noise_seed": seed}}
    prompt["select"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler}}
    prompt["sigmas"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": "1.0, 0.9, 0.6, 0.3, 0.0"}}
    prompt["native"] = {
        "class_type": "SamplerCustomAdvanced",
        "inputs": {
            "noise": ["noise", 0], "guider": inputs["guider"], "sampler": ["select", 0], "sigmas": ["sigmas", 0], "latent_image": inputs["latent"],
        },
    }  # fmt: skip
    return prompt, ours


def test_video_alone_is_sampled_and_decoded_without_the_modality_forward(host, api, find, inspect):
    prompt, sampler = sampled(api, find, video=VIDEO, **EMPTY)
    latent, report, images = inspect(prompt, sampler), inspect(prompt, sampler, 1), inspect(prompt, find(prompt, "DecodeVideoVAE"))
    targets = [key for key in prompt if key.startswith("inspect")]
    run = host.run(prompt, targets=targets)
    assert latent(run)["samples"]["shape"] == [1, 128, 3, 2, 3]
    assert "forwards of this node: 12 (4 x cond+uncond+stg)" in report(run) and "no second stream" in report(run)
    assert images(run)["shape"] == [17, 64, 96, 3]


def test_audio_alone_is_sampled_and_decoded(host, api, find, inspect):
    prompt, sampler = sampled(api, find, audio=AUDIO, **EMPTY)
    latent, sound = inspect(prompt, sampler), inspect(prompt, find(prompt, "DecodeAudioVAE"))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert latent(run)["samples"]["shape"] == [1, 8, 18, 16]
    assert sound(run)["waveform"]["shape"][:2] == [1, 2] and sound(run)["sample_rate"] == 48000


@pytest.mark.parametrize("kind,latent,word", [("DecodeVideoVAE", {"audio": AUDIO}, "audio only"), ("DecodeAudioVAE", {"video": VIDEO}, "video only")])
def test_decoding_a_stream_that_is_not_there_says_which_node_decodes_it(host, api, find, inspect, kind, latent, word):
    prompt, sampler = sampled(api, find, **latent, **EMPTY)
    inspect(prompt, find(prompt, kind))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert run.status == "error" and word in run.error["exception_message"]


def test_native_nodes_take_our_latent_apart_and_put_it_together_again(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    sampler = find(prompt, "LTX25Sampler")
    before = inspect(prompt, sampler)
    prompt["apart"] = {"class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": [sampler, 0]}}
    prompt["together"] = {"class_type": "LTXVConcatAVLatent", "inputs": {"video_latent": ["apart", 0], "audio_latent": ["apart", 1]}}
    after = inspect(prompt, "together")
    for kind in ("DecodeVideoVAE", "DecodeAudioVAE"):
        prompt[find(prompt, kind)]["inputs"]["latent"] = ["together", 0]
    run = host.run(prompt)
    assert before(run)["samples"] == after(run)["samples"]
    assert run.files(find(prompt, "SaveVideo"))


def test_a_native_empty_latent_is_sampled_as_it_is(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    sampler = find(prompt, "LTX25Sampler")
    prompt["empty"] = {"class_type": "EmptyLTXVLatentVideo", "inputs": {"width": 96, "height": 64, "length": 17, "batch_size": 1}}
    prompt[sampler]["inputs"]["latent"] = ["empty", 0]
    latent = inspect(prompt, sampler)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert latent(run)["samples"]["shape"] == [1, 128, 3, 2, 3] and latent(run)["frame_rate"] == 24.0


@pytest.mark.parametrize("stream", [0, 1])
def test_a9_a10_what_a_noise_mask_keeps_is_bit_equal_afterwards(host, api, find, inspect, stream):
    prompt, sampler = sampled(api, find, video=VIDEO, audio=AUDIO, mask=f"[{stream}, 1000]")
    given, made = inspect(prompt, "latent"), inspect(prompt, sampler)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    before, after = given(run)["samples"]["nested"], made(run)["samples"]["nested"]
    assert before[stream]["digest"] == after[stream]["digest"]
    assert before[1 - stream]["digest"] != after[1 - stream]["digest"] and after[1 - stream]["finite"]


def test_our_keys_and_the_frame_rate_travel_with_the_latent(host, api, find, inspect):
    prompt, sampler = sampled(api, find, name="text_to_video_distilled_tiny", video=VIDEO, audio=AUDIO, keys='{"frame_rate": 30.0, "other": 5}', **EMPTY)
    prompt[sampler]["inputs"]["seed"] = 9
    latent, fps = inspect(prompt, sampler), inspect(prompt, find(prompt, "DecodeVideoVAE"), 1)
    run = host.run(prompt)
    assert (latent(run)["frame_rate"], latent(run)["seed"], latent(run)["other"]) == (30.0, 9, 5)
    assert fps(run) == 30.0
    prompt[sampler]["inputs"]["frame_rate"] = 23.976  # as long a sound
    assert latent(host.run(prompt))["frame_rate"] == 23.976
    prompt[sampler]["inputs"]["frame_rate"] = 12.0
    for keys in ('{"frame_rate": 30.0}', "{}"):  # with a rate of its own or without
        prompt["latent"]["inputs"]["keys"] = keys
        message = host.run(prompt).error["exception_message"]
        assert "is 0.72 s long, and its 17 frames at 12 a second are 1.42 s; set frame_rate to 0 here, and to 12 in the node" in message, message


def test_native_conditioning_before_the_connectors_is_accepted(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    guider = prompt[find(prompt, "LTX25Guider")]["inputs"]
    prompt["changed"] = {"class_type": "ProbeConditioning", "inputs": {"conditioning": guider["positive"], "how": "unprocessed"}}
    guider["positive"] = ["changed", 0]
    latent = inspect(prompt, find(prompt, "LTX25Sampler"))
    assert all(part["finite"] for part in latent(host.run(prompt))["samples"]["nested"])


def test_native_conditioning_brings_its_frame_rate(host, api, find, inspect):
    prompt, sampler = sampled(api, find, name="text_to_video_distilled_tiny", video=VIDEO, audio=AUDIO, **EMPTY)
    guider = prompt[find(prompt, "LTX25Guider")]["inputs"]
    prompt["rate"] = {"class_type": "LTXVConditioning", "inputs": {"positive": guider["positive"], "negative": guider["positive"], "frame_rate": 50.0}}
    guider["positive"] = ["rate", 0]
    latent = inspect(prompt, sampler)
    run = host.run(prompt)
    assert latent(run)["frame_rate"] == 50.0
    said = "The sound of the latent is 0.72 s long, and its 17 frames at 50 a second are 0.34 s: is another frame_rate meant?"
    assert said in " ".join(text for _, text in run.texts())  # it was made for 24
    prompt["rate"]["inputs"]["frame_rate"] = 25.0  # a latent frame more is a rounding
    assert "is another frame_rate meant" not in " ".join(text for _, text in host.run(prompt).texts())
    prompt, _ = natively(api, find, name="text_to_video_distilled_tiny")  # no key of a latent reaches a guider of the host's sampler
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"]["frame_rate"] = 12.0
    inspect(prompt, "native")
    run = host.run(prompt, targets=["inspect-native-0"])
    assert "1.40 s long, and its 17 frames at 24 a second are 0.71 s: is another" in " ".join(text for _, text in run.texts())


def test_the_native_sampler_runs_our_guider_and_counts_its_forwards(host, api, find, inspect):
    prompt, _ = natively(api, find)
    latent, denoised = inspect(prompt, "native"), inspect(prompt, "native", 1)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")], preview_method="latent2rgb")
    streams = latent(run)["samples"]["nested"]
    assert [part["shape"] for part in streams] == [[1, 128, 3, 2, 3], [1, 8, 18, 16]] and all(part["finite"] for part in streams)
    assert [part["shape"] for part in denoised(run)["samples"]["nested"]] == [part["shape"] for part in streams]
    values = [(value, most) for _, value, most in run.progress("native")]
    assert values == sorted(values) and values[-1] == (16, 16)
    assert len(run.previews) == 4


def test_the_native_euler_and_ours_make_the_same_clip(host, api, find, inspect):
    prompt, ours = natively(api, find, seed=42)
    prompt[ours]["inputs"].update(seed=42, sampler="euler", sigmas=["sigmas", 0])
    native, own = inspect(prompt, "native"), inspect(prompt, ours)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    for a, b in zip(native(run)["samples"]["nested"], own(run)["samples"]["nested"], strict=True):
        for name in ("min", "max", "std"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), "noise is drawn as RandomNoise does, steps are Euler's"


@pytest.mark.parametrize("sampler", ["euler_ancestral", "heun", "dpmpp_2m", "res_multistep", "dpmpp_sde", "uni_pc", "lms"])
def test_native_samplers_of_every_kind_run(host, api, find, inspect, sampler):
    prompt, _ = natively(api, find, name="text_to_video_distilled_tiny", sampler=sampler)
    latent = inspect(prompt, "native")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert all(part["finite"] for part in latent(run)["samples"]["nested"])
    assert run.progress("native")[-1][1] == run.progress("native")[-1][2]


@pytest.mark.parametrize("sampler,word", [("dpm_adaptive", "noise levels"), ("euler_cfg_pp", "CFG++")])
def test_native_samplers_that_cannot_run_say_so(host, api, find, inspect, sampler, word):
    prompt, _ = natively(api, find, name="text_to_video_distilled_tiny", sampler=sampler)
    inspect(prompt, "native")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert run.status == "error" and word in run.error["exception_message"], run.error


def test_a_noise_mask_is_honoured_under_the_native_sampler(host, api, find, inspect):
    prompt, ours = natively(api, find)
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": {"video": VIDEO, "audio": AUDIO, "mask": "[1, 1000]"}}
    prompt["native"]["inputs"]["latent_image"] = ["latent", 0]
    given, made = inspect(prompt, "latent"), inspect(prompt, "native")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert given(run)["samples"]["nested"][1]["digest"] == made(run)["samples"]["nested"][1]["digest"]


def test_cancel_works_under_the_native_sampler(host, api, find, inspect):
    prompt, _ = natively(api, find)
    prompt[find(prompt, "EmptyLTX25Latent")]["inputs"].update(width=256, height=256, frames=49)
    prompt["sigmas"]["inputs"]["sigmas"] = ", ".join(str(1 - i / 40) for i in range(41))
    inspect(prompt, "native")
    at = []

    def on_event(event, run):
        if not at and getattr(event, "type", "") == "text" and "step 2/40" in event.data["text"]:
            at.append(event.t)
            host.interrupt(run.prompt_id)

    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")], on_event=on_event)
    assert run.status == "interrupted" and run.seconds - at[0] < 2.0
