"""What a clip can be told, on a real server: every shipped workflow, and what the reports of users ask of it."""

import io
import json
from fractions import Fraction

import av
import numpy as np
import pytest
from comfyui_ltx25.tests.host.conftest import PACK
from comfyui_ltx25.tests.host.test_instrument import newest_record
from comfyui_ltx25.tests.host.test_text_to_video import decoded
from comfyui_ltx25.tests.support.comfyui_host import Rejected
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.tiny import tiny_files
from PIL import Image

TINY = sorted(path.stem for path in (PACK / "workflows" / "api").glob("*_tiny.json"))
RATE = 22050  # Hz, on purpose neither the model's nor the output's


@pytest.fixture(scope="module")
def given(host):
    """What the workflows load: a picture, a voice (mono, another rate) and a short clip with sound."""
    folder = host.base / "input"
    seconds = np.arange(RATE) / RATE
    wave = (0.3 * np.sin(2 * np.pi * 220 * seconds)).astype(np.float32)
    Image.fromarray((np.random.default_rng(0).random((91, 37, 4)) * 255).astype(np.uint8)).save(folder / "example.png")
    with av.open(str(folder / "voice.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray((wave[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for index in range(19):
            picture = np.full((64, 96, 3), 10 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return folder


def widths(prompt, find):
    return prompt[find(prompt, "EmptyLTX25Latent")]["inputs"]


@pytest.mark.parametrize("name", TINY)
def test_every_workflow_ends_in_a_file_that_plays(host, api, given, name):
    prompt = api(name)
    run = host.run(prompt, timeout=240)
    assert run.ok, run.error and run.error["exception_message"]
    (key,) = [key for key, node in prompt.items() if node["class_type"] in ("SaveVideo", "SaveAudio")]
    (file,) = run.files(key)
    if prompt[key]["class_type"] == "SaveAudio":
        with av.open(io.BytesIO(host.fetch(file))) as container:
            assert sum(frame.samples for frame in container.decode(audio=0)) > 0
        return
    facts = decoded(host.fetch(file))
    (latent,) = [node["inputs"] for node in prompt.values() if node["class_type"] == "EmptyLTX25Latent"]
    factor = 2 if "two_stage" in name or name == "dfr_tiny" else 1
    rate = 2 if name == "dfr_tiny" else 1  # one round in time
    frames = 19 if name.startswith("video_to_audio") else rate * (latent["frames"] - 1) + 1  # the user's own video is saved whole
    assert (facts["frames"], facts["size"], facts["rate"]) == (frames, (latent["width"] * factor, latent["height"] * factor), Fraction(24 * rate))


def test_text_to_audio_computes_nothing_of_the_video(host, api, find, inspect):
    prompt = api("text_to_audio_tiny")
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    latent = inspect(prompt, find(prompt, "LTX25Sampler"))
    run = host.run(prompt)
    text = report(run)
    assert latent(run)["samples"]["shape"] == [1, 8, 18, 16]
    assert "forwards of this node: 8 (8 x cond)" in text and "decode.video" not in text


@pytest.fixture
def pinned(given, api, find):
    """image_to_video with the condition's widgets changed."""

    def of(**widgets):
        prompt = api("image_to_video_tiny")
        prompt[find(prompt, "LTX25ImageCondition")]["inputs"].update(widgets)
        return prompt

    return of


def test_image_condition_keeps_its_frame_and_the_clips_length(host, pinned, find, inspect):
    """The first latent frame is the encoded picture to the bit, at strength 1."""
    prompt = pinned(frame=0, crf=0)
    sampler, load = find(prompt, "LTX25Sampler"), find(prompt, "LoadLTX25Checkpoint")
    prompt["scaled"] = {"class_type": "ProbeImage", "inputs": {"shape": "[1, 64, 96, 3]"}}
    prompt[find(prompt, "LTX25ImageCondition")]["inputs"]["image"] = ["scaled", 0]
    prompt["first"] = {"class_type": "ProbeFrames", "inputs": {"latent": [sampler, 0], "start": 0, "count": 1}}
    prompt["again"] = {"class_type": "EncodeVideoVAE", "inputs": {"engine": [load, 0], "images": ["scaled", 0], "frame_rate": 24.0}}
    kept, encoded, whole = inspect(prompt, "first"), inspect(prompt, "again"), inspect(prompt, sampler)
    run = host.run(prompt)
    assert kept(run)["samples"]["digest"] == encoded(run)["samples"]["digest"]
    assert [part["shape"] for part in whole(run)["samples"]["nested"]] == [[1, 128, 3, 2, 3], [1, 8, 18, 16]]
    assert "conditions" not in whole(run)


@pytest.mark.parametrize("frame", [-1, 9])
def test_f7_appended_pictures_are_gone_from_the_result(host, pinned, find, inspect, frame):
    prompt = pinned(frame=frame)
    whole = inspect(prompt, find(prompt, "LTX25Sampler"))
    run = host.run(prompt)
    assert [part["shape"] for part in whole(run)["samples"]["nested"]] == [[1, 128, 3, 2, 3], [1, 8, 18, 16]]


@pytest.mark.parametrize("frame", [17, -18])
def test_a_frame_outside_the_clip_is_refused_before_anything_is_sampled(host, pinned, frame):
    run = host.run(pinned(frame=frame))
    assert "a clip of 17 frames; use -17 to 16" in run.error["exception_message"]
    assert not [text for _, text in run.texts() if text.startswith("sample")]


@pytest.mark.parametrize("shape", [[1, 1, 1, 3], [1, 37, 91, 4], [1, 16, 4096, 3], [1, 37, 91, 1]])
def test_r6_every_picture_is_taken(host, pinned, find, shape):
    prompt = pinned(crf=18)
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": json.dumps(shape)}}
    prompt[find(prompt, "LTX25ImageCondition")]["inputs"]["image"] = ["any", 0]
    run = host.run(prompt)
    assert run.ok, run.error and run.error["exception_message"]


def test_r6_a_picture_with_nan_is_refused(host, pinned, find):
    prompt = pinned()
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": "[1, 8, 8, 3]", "fill": "nan"}}
    prompt[find(prompt, "LTX25ImageCondition")]["inputs"]["image"] = ["any", 0]
    assert "not finite" in host.run(prompt).error["exception_message"]


@pytest.mark.parametrize("kind, slot", [("LTX25ImageCondition", "image"), ("LTX25VideoCondition", "images"), ("EncodeVideoVAE", "images")])
def test_no_picture_is_refused_in_a_sentence(host, api, given, find, kind, slot):
    prompt = api({"image": "image_to_video_tiny", "images": "reference_video_tiny"}[slot])
    if kind == "EncodeVideoVAE":
        prompt["clip"] = {"class_type": kind, "inputs": {"engine": [find(prompt, "LoadLTX25Checkpoint"), 0], "images": ["any", 0], "frame_rate": 24.0}}
        prompt[find(prompt, "LTX25VideoCondition")]["inputs"]["latent"] = ["clip", 0]
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": "[1]", "fill": "nothing"}}
    prompt[find(prompt, kind)]["inputs"][slot] = ["any", 0]
    run = host.run(prompt)
    assert prompt[run.error["node_id"]]["class_type"] == kind
    assert run.error["exception_message"].startswith("no picture was given"), run.error["exception_message"]


def test_r3_two_stage_image_to_video_has_the_size_asked_for(host, api, given, find, inspect):
    """Stage 1 at 64 x 64, pictures again at full size, 128 x 128 x 17 out."""
    prompt = api("two_stage_distilled_tiny")
    load, empty, up = (find(prompt, kind) for kind in ("LoadLTX25Checkpoint", "EmptyLTX25Latent", "LTX25LatentUpscale"))
    prompt[empty]["inputs"].update(width=64, height=64)
    prompt["picture"] = {"class_type": "LoadImage", "inputs": {"image": "example.png"}}
    for key, source, stage in (("small", empty, 0), ("large", up, 1)):
        sampler = [k for k, node in prompt.items() if node["class_type"] == "LTX25Sampler"][stage]
        prompt[key] = {
            "class_type": "LTX25ImageCondition",
            "inputs": {"engine": [load, 0], "latent": [source, 0], "image": ["picture", 0], "frame": 0, "strength": 1.0, "crf": 18},
        }
        prompt[sampler]["inputs"]["latent"] = [key, 0]
    images = inspect(prompt, find(prompt, "DecodeVideoVAE"))
    assert images(host.run(prompt))["shape"] == [17, 128, 128, 3]


def test_r5_a_wrong_stage_two_file_is_found_out_before_the_first_forward(host, tiny, api, placed):
    """A file of another kind in the upscaler's folder: the prompt is refused whole, nothing runs."""
    head = next((tiny / "model_patches").glob("*.safetensors"))
    prompt = api("two_stage_distilled_tiny")
    (upscale,) = [node for node in prompt.values() if node["class_type"] == "LTX25LatentUpscale"]
    for name, data, words in (("wrong.safetensors", head.read_bytes(), "a duration head"), ("cut.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "cut.safetensors")):
        upscale["inputs"]["upscale_model"] = placed("latent_upscale_models", name, data)
        with pytest.raises(Rejected) as refused:
            host.run(prompt)
        assert words in json.dumps(refused.value.node_errors)


@pytest.mark.parametrize(
    "metadata, widgets, reference",
    [
        ({}, {}, 3 * 2 * 4),
        ({"reference_downscale_factor": "2", "reference_temporal_scale_factor": "2"}, {}, 2 * 1 * 2),
        ({"reference_downscale_factor": "2", "reference_temporal_scale_factor": "2"}, {"downscale": 1}, 2 * 2 * 4),
    ],
    ids=["file says nothing", "file says both", "asked for one"],
)
def test_reference_has_the_size_that_the_ic_loras_file_asks_for(host, api, given, find, inspect, metadata, widgets, reference):
    """Latent frames x rows x columns of the reference, counted in the tokens that were sampled beside those of the clip."""
    file = host.base / "models" / "loras" / "ic-lora.safetensors"
    tiny_lora(file, metadata=metadata)
    prompt = api("reference_video_tiny")
    load, guider, shown, sampler = (find(prompt, kind) for kind in ("LoadLTX25Checkpoint", "LTX25Guider", "LTX25VideoCondition", "LTX25Sampler"))
    prompt["lora"] = {"class_type": "LTX25LoRA", "inputs": {"engine": [load, 0], "lora_name": file.name, "strength": 1.0}}
    widths(prompt, find)["width"] = 128
    for key in (guider, shown):
        prompt[key]["inputs"]["engine"] = ["lora", 0]
    prompt[shown]["inputs"].update(widgets)
    latent = inspect(prompt, sampler)
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert latent(run)["samples"]["nested"][0]["shape"] == [1, 128, 3, 2, 4]
    (phase,) = [line for line in newest_record(host) if line["event"] == "phase" and line["state"] == "closed" and line["name"] == "sample"]
    assert phase["facts"]["tokens"]["video"] == 3 * 2 * 4 + reference
    file.unlink()


def test_temporal_upscaler_doubles_the_frame_rate(host, api, tiny, find, inspect):
    prompt = api("two_stage_distilled_tiny")
    up = find(prompt, "LTX25LatentUpscale")
    prompt[up]["inputs"]["upscale_model"] = next(path.name for path in (tiny / "latent_upscale_models").iterdir() if "temporal" in path.name)
    video = find(prompt, "DecodeVideoVAE")
    images, rate = inspect(prompt, video), inspect(prompt, video, 1)
    run = host.run(prompt)
    assert images(run)["shape"] == [33, 64, 96, 3] and rate(run) == 48.0


def test_a10_a_soundtrack_is_kept_to_the_bit_and_steers_the_video(host, api, given, find, inspect):
    prompt = api("audio_to_video_tiny")
    sampler, told = find(prompt, "LTX25Sampler"), find(prompt, "LTX25AudioCondition")
    made, asked = inspect(prompt, sampler), inspect(prompt, told)
    run = host.run(prompt)
    video, sound = made(run)["samples"]["nested"]
    assert sound["digest"] == asked(run)["samples"]["nested"][1]["digest"] and sound["shape"] == [1, 8, 18, 16]
    prompt["other"] = {"class_type": "ProbeAudio", "inputs": {"shape": "[1, 2, 48000]", "rate": 48000}}
    prompt[told]["inputs"]["audio"] = ["other", 0]
    assert made(host.run(prompt))["samples"]["nested"][0]["digest"] != video["digest"]


@pytest.mark.parametrize("shape, rate", [([1, 1, 8000], 8000), ([1, 2, 96000], 96000), ([1, 6, 44100], 44100), ([1, 2, 300], 48000)])
def test_a_soundtrack_of_any_layout_rate_and_length(host, api, given, find, inspect, shape, rate):
    prompt = api("audio_to_video_tiny")
    told = find(prompt, "LTX25AudioCondition")
    prompt["other"] = {"class_type": "ProbeAudio", "inputs": {"shape": json.dumps(shape), "rate": rate}}
    prompt[told]["inputs"]["audio"] = ["other", 0]
    asked = inspect(prompt, told)
    assert asked(host.run(prompt))["samples"]["nested"][1]["shape"] == [1, 8, 18, 16]


def test_a_voice_is_heard_but_not_part_of_the_clip(host, api, given, find, inspect):
    prompt = api("audio_to_video_tiny")
    sampler, told = find(prompt, "LTX25Sampler"), find(prompt, "LTX25AudioCondition")
    made = inspect(prompt, sampler)
    prompt[told]["inputs"]["mode"] = "voice"
    with_voice = made(host.run(prompt))["samples"]["nested"]
    prompt[sampler]["inputs"]["latent"] = [find(prompt, "EmptyLTX25Latent"), 0]
    without = made(host.run(prompt))["samples"]["nested"]
    assert with_voice[1]["shape"] == without[1]["shape"] == [1, 8, 18, 16]
    assert with_voice[1]["digest"] != without[1]["digest"]


def test_video_to_audio_keeps_the_video_to_the_bit(host, api, given, find, inspect):
    prompt = api("video_to_audio_tiny")
    made, asked = inspect(prompt, find(prompt, "LTX25Sampler")), inspect(prompt, find(prompt, "LTX25VideoCondition"))
    run = host.run(prompt)
    assert made(run)["samples"]["nested"][0]["digest"] == asked(run)["samples"]["nested"][0]["digest"]
    assert "are used" not in " ".join(text for _, text in run.texts())  # 17 were asked for


@pytest.mark.parametrize(
    "mode, at, frames, temporal, words",
    [
        ("guide", 10, 17, 1, "of 17 frames 1 is used: the clip ends after 7 and 7 are not 8 n + 1."),
        ("guide", 8, 17, 1, "of 17 frames 9 are used: the clip ends after 9."),
        ("guide", 0, 12, 1, "of 12 frames 9 are used: 12 are not 8 n + 1."),
        ("guide", -9, 9, 1, ""),
        ("reference", 0, 25, 1, "of 25 frames 17 are used: the clip ends after 17."),
        ("reference", 0, 17, 1, ""),
        ("reference", 0, 17, 3, "of 7 frames, one in 3 of the video, 1 is used: 7 are not 8 n + 1."),
    ],
)
def test_how_many_frames_of_a_video_are_used_is_told(host, api, given, find, mode, at, frames, temporal, words):
    prompt = api("reference_video_tiny")
    told = find(prompt, "LTX25VideoCondition")
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": f"[{frames}, 64, 96, 3]"}}
    prompt[told]["inputs"].update(images=["any", 0], mode=mode, frame=at, downscale=1, temporal=temporal)
    run = host.run(prompt)
    assert run.ok, run.error and run.error["exception_message"]
    said = " ".join(text for _, text in run.texts(told))
    assert said and (words in said if words else "used" not in said), said


def test_a13_extending_carries_the_sound_along_and_keeps_what_was_there(host, api, find, inspect):
    """17 -> 33 frames: the sound is round(33 / 24 * 25) latents long (the official rounding), the start is equal to the bit. A
    loop is told its first frame again."""
    prompt = api("text_to_video_distilled_tiny")
    load, sampler, guider = (find(prompt, kind) for kind in ("LoadLTX25Checkpoint", "LTX25Sampler", "LTX25Guider"))
    prompt["longer"] = {"class_type": "LTX25Extend", "inputs": {"engine": [load, 0], "latent": [sampler, 0], "frames": 16, "loop": True}}
    prompt["go on"] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "guider": [guider, 0], "latent": ["longer", 0], "seed": 7}}
    prompt["straight on"] = {"class_type": "LTX25Extend", "inputs": {**prompt["longer"]["inputs"], "loop": False}}
    prompt["other"] = {"class_type": "LTX25Sampler", "inputs": {**prompt["go on"]["inputs"], "latent": ["straight on", 0]}}
    for key, source in (("before", sampler), ("after", "go on")):
        prompt[key] = {"class_type": "ProbeFrames", "inputs": {"latent": [source, 0], "start": 0, "count": 3, "audio": 18}}
    before, after, whole, straight = (inspect(prompt, key) for key in ("before", "after", "go on", "other"))
    run = host.run(prompt)
    assert [part["shape"][2] for part in whole(run)["samples"]["nested"]] == [5, round(33 / 24 * 25)]
    assert [part["shape"] for part in whole(run)["samples"]["nested"]] == [part["shape"] for part in straight(run)["samples"]["nested"]]
    assert whole(run)["samples"]["nested"][0]["digest"] != straight(run)["samples"]["nested"][0]["digest"]
    assert [part["digest"] for part in before(run)["samples"]["nested"]] == [part["digest"] for part in after(run)["samples"]["nested"]]


def test_a_loop_ends_with_the_picture_that_is_to_be_its_first_frame(host, api, find, inspect):
    """A picture noted on the clip replaces the frame that is there: the clip is closed with the one it will begin with."""
    prompt = api("text_to_video_distilled_tiny")
    load, sampler = [find(prompt, "LoadLTX25Checkpoint"), 0], find(prompt, "LTX25Sampler")
    prompt["clip"] = {"class_type": "ProbeLatent", "inputs": {"video": "[1, 128, 3, 2, 2]", "audio": "[1, 8, 18, 16]"}}
    prompt["picture"] = {"class_type": "ProbeImage", "inputs": {"shape": "[1, 64, 64, 3]"}}
    prompt["levels"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": "1.0, 0.0"}}

    def told(key, source, frame):
        prompt[key] = {"class_type": "LTX25ImageCondition", "inputs": {"engine": load, "latent": [source, 0], "image": ["picture", 0], "frame": frame, "strength": 1.0, "crf": 0}}

    def longer(key, source, loop):
        prompt[key] = {"class_type": "LTX25Extend", "inputs": {"engine": load, "latent": [source, 0], "frames": 8, "loop": loop}}

    told("first", "clip", 0)
    longer("looped", "first", True)
    longer("straight", "first", False)
    told("closed", "straight", -1)
    for key, source in (("one", "looped"), ("other", "closed")):
        prompt[key] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "latent": [source, 0], "sigmas": ["levels", 0], "sampler": "euler"}}
    one, other = (inspect(prompt, key) for key in ("one", "other"))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert [part["digest"] for part in one(run)["samples"]["nested"]] == [part["digest"] for part in other(run)["samples"]["nested"]]


@pytest.mark.parametrize("by", ["LTX25Sampler", "SamplerCustomAdvanced"])
def test_a13_a_clip_extended_twice_keeps_the_first_extension(host, api, find, inspect, by):
    """What an extension made is part of the clip once it is sampled to the end, for the next extension and for a retake. The
    host's sampler leaves the mask on it."""
    prompt = api("text_to_video_distilled_tiny")
    load, sampler = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25Sampler")
    source = sampler
    for turn in ("once", "twice"):
        prompt[f"longer {turn}"] = {"class_type": "LTX25Extend", "inputs": {"engine": [load, 0], "latent": [source, 0], "frames": 8, "loop": False}}
        prompt[turn] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "latent": [f"longer {turn}", 0], "seed": 7}}
        source = turn
    if by == "SamplerCustomAdvanced":
        prompt["noise"] = {"class_type": "RandomNoise", "inputs": {"noise_seed": 7}}
        prompt["select"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
        prompt["levels"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": "1.0, 0.5, 0.0"}}
        inputs = {"noise": ["noise", 0], "guider": prompt[sampler]["inputs"]["guider"], "sampler": ["select", 0], "sigmas": ["levels", 0]}
        prompt["once"] = {"class_type": by, "inputs": {**inputs, "latent_image": ["longer once", 0]}}
    prompt["again"] = {"class_type": "LTX25Retake", "inputs": {"latent": ["once", 0], "stretches": "0-0.1", "streams": "video"}}
    prompt["retaken"] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "latent": ["again", 0], "seed": 8}}
    for key, source in (("before", "once"), ("after", "twice"), ("anew", "retaken")):
        prompt[key] = {"class_type": "ProbeFrames", "inputs": {"latent": [source, 0], "start": 0, "count": 4, "audio": 26}}
    before, after, anew = (inspect(prompt, key) for key in ("before", "after", "anew"))
    run = host.run(prompt)
    assert run.ok, run.error
    first, second, third = ([part["digest"] for part in seen(run)["samples"]["nested"]] for seen in (before, after, anew))
    assert first == second, "25 frames and their sound are as they were"
    assert third[0] != first[0] and third[1] == first[1]


@pytest.mark.parametrize("kind", ["LTX25Extend", "LTX25KeyframeSlots"])
def test_a10_a_kept_sound_is_kept_as_far_as_it_goes_where_the_clip_becomes_longer(host, api, given, find, inspect, kind):
    """17 -> 25 frames, the padding of diffusion fidelity rendering or an extension: what is added is made, with every seed anew."""
    prompt = api("audio_to_video_tiny")
    load, sampler, told = (find(prompt, kind) for kind in ("LoadLTX25Checkpoint", "LTX25Sampler", "LTX25AudioCondition"))
    if kind == "LTX25Extend":
        prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": "[17, 64, 96, 3]"}}
        prompt["clip"] = {"class_type": "EncodeVideoVAE", "inputs": {"engine": [load, 0], "images": ["any", 0], "frame_rate": 24.0}}
        prompt[told]["inputs"]["latent"] = ["clip", 0]
    widgets = {"frames": 8, "loop": False} if kind == "LTX25Extend" else {"count": 3, "frames": "", "grid": "segments"}
    prompt["longer"] = {"class_type": kind, "inputs": {"engine": [load, 0], "latent": [told, 0], **widgets}}
    prompt[sampler]["inputs"]["latent"] = ["longer", 0]
    prompt["other seed"] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "seed": 99}}
    for key, source in (("old", told), ("new", sampler)):
        prompt[key] = {"class_type": "ProbeFrames", "inputs": {"latent": [source, 0], "start": 0, "count": 3, "audio": 18}}
    old, new, whole, other = (inspect(prompt, key) for key in ("old", "new", sampler, "other seed"))
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert old(run)["samples"]["nested"][1]["digest"] == new(run)["samples"]["nested"][1]["digest"]
    (picture, sound), (other_picture, other_sound) = (seen(run)["samples"]["nested"] for seen in (whole, other))
    assert sound["shape"] == [1, 8, 26, 16] and sound["digest"] != other_sound["digest"] and picture["digest"] != other_picture["digest"]
    assert "noise_mask" not in whole(run)


def test_a_soft_mask_holds_the_clip_to_the_same_in_both_parts_of_a_sampling(host, api, given, find, inspect):
    """The second sampler has a noisy latent: what the mask holds to comes with it from the first, and is gone with the noise."""
    prompt = api("text_to_video_distilled_tiny")
    whole, load = find(prompt, "LTX25Sampler"), find(prompt, "LoadLTX25Checkpoint")
    for key, kind, inputs in (
        ("any", "ProbeImage", {"shape": "[17, 64, 96, 3]"}),
        ("clip", "EncodeVideoVAE", {"engine": [load, 0], "images": ["any", 0], "frame_rate": 24.0}),
        ("soft", "ImageToMask", {"image": ["any", 0], "channel": "red"}),
        ("masked", "SetLatentNoiseMask", {"samples": ["clip", 0], "mask": ["soft", 0]}),
        *((f"levels {part}", "ManualSigmas", {"sigmas": sigmas}) for part, sigmas in (("both", "1.0, 0.6, 0.0"), ("first", "1.0, 0.6"), ("second", "0.6, 0.0"))),
    ):
        prompt[key] = {"class_type": kind, "inputs": inputs}
    prompt[whole]["inputs"].update(latent=["masked", 0], sigmas=["levels both", 0], sampler="euler")
    prompt["first"] = {"class_type": "LTX25Sampler", "inputs": {**prompt[whole]["inputs"], "sigmas": ["levels first", 0]}}
    prompt["second"] = {"class_type": "LTX25Sampler", "inputs": {**prompt[whole]["inputs"], "latent": ["first", 0], "sigmas": ["levels second", 0], "add_noise": False}}
    one, two = inspect(prompt, whole), inspect(prompt, "second")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    for fact in ("min", "max", "std"):
        assert two(run)["samples"][fact] == pytest.approx(one(run)["samples"][fact], rel=1e-4)
    assert "conditions" not in two(run)


def test_what_a_mask_holds_to_is_no_matter_of_a_sampling_that_begins_anew(host, api, given, find, inspect):
    """The host's sampler ends what ours began and leaves all keys on the LATENT: then it is a clip like any other, and becomes longer."""
    prompt = api("text_to_video_distilled_tiny")
    sampler, load = find(prompt, "LTX25Sampler"), find(prompt, "LoadLTX25Checkpoint")
    for key, kind, inputs in (
        ("clip", "ProbeLatent", {"video": "[1, 128, 3, 2, 3]", "audio": "[1, 8, 18, 16]", "mask": "[0, 2]", "keys": '{"frame_rate": 24.0}'}),
        ("above", "ManualSigmas", {"sigmas": "1.0, 0.6"}),
        ("below", "ManualSigmas", {"sigmas": "0.6, 0.0"}),
        ("none", "DisableNoise", {}),
        ("euler", "KSamplerSelect", {"sampler_name": "euler"}),
        ("first", "LTX25Sampler", {**prompt[sampler]["inputs"], "latent": ["clip", 0], "sigmas": ["above", 0], "sampler": "euler"}),
        ("second", "SamplerCustomAdvanced", {"noise": ["none", 0], "guider": prompt[sampler]["inputs"]["guider"], "sampler": ["euler", 0], "sigmas": ["below", 0], "latent_image": ["first", 0]}),
        ("longer", "LTX25Extend", {"engine": [load, 0], "latent": ["second", 0], "frames": 8, "loop": False}),
    ):
        prompt[key] = {"class_type": kind, "inputs": inputs}
    prompt[sampler]["inputs"]["latent"] = ["longer", 0]
    made = inspect(prompt, sampler)
    assert made(host.run(prompt))["samples"]["nested"][0]["shape"] == [1, 128, 4, 2, 3]


def test_a_clip_of_a_batch_goes_on_alone(host, api, find, inspect):
    """A mask of 0 and 1 alone holds to nothing that would have to be of the same batch."""
    prompt = api("text_to_video_distilled_tiny")
    sampler = find(prompt, "LTX25Sampler")
    for key, kind, inputs in (
        ("clips", "ProbeLatent", {"video": "[2, 128, 3, 2, 3]", "mask": "[0, 1]", "keys": '{"frame_rate": 24.0}'}),
        ("above", "ManualSigmas", {"sigmas": "1.0, 0.6"}),
        ("below", "ManualSigmas", {"sigmas": "0.6, 0.0"}),
        ("first", "LTX25Sampler", {**prompt[sampler]["inputs"], "latent": ["clips", 0], "sigmas": ["above", 0], "sampler": "euler"}),
        ("one", "LatentFromBatch", {"samples": ["first", 0], "batch_index": 1, "length": 1}),
        ("second", "LTX25Sampler", {**prompt[sampler]["inputs"], "latent": ["one", 0], "sigmas": ["below", 0], "sampler": "euler", "add_noise": False}),
    ):
        prompt[key] = {"class_type": kind, "inputs": inputs}
    made = inspect(prompt, "second")
    assert made(host.run(prompt, targets=["inspect-second-0"]))["samples"]["shape"] == [1, 128, 3, 2, 3]


@pytest.mark.parametrize("noted", ["pictures", "a mask"])
def test_a_clip_of_a_batch_goes_on_with_what_is_its_own(host, api, find, inspect, noted):
    """Its picture, and what a mask between 0 and 1 holds it to: the clip is the one that it is where the batch goes on together."""
    prompt = api("text_to_video_distilled_tiny")
    sampler, load = find(prompt, "LTX25Sampler"), find(prompt, "LoadLTX25Checkpoint")
    given = {**prompt[sampler]["inputs"], "sampler": "euler"}
    for key, kind, inputs in (
        ("two", "ProbeImage", {"shape": "[2, 64, 96, 3]"}),
        ("grey", "SolidMask", {"value": 0.5, "width": 96, "height": 64}),
        ("clips", "ProbeLatent", {"video": "[2, 128, 3, 2, 3]", "keys": '{"frame_rate": 24.0}'}),
        ("pictures", "LTX25ImageCondition", {"engine": [load, 0], "latent": ["clips", 0], "image": ["two", 0], "frame": 0, "strength": 1.0, "crf": 0}),
        ("a mask", "SetLatentNoiseMask", {"samples": ["clips", 0], "mask": ["grey", 0]}),
        ("above", "ManualSigmas", {"sigmas": "1.0, 0.6"}),
        ("below", "ManualSigmas", {"sigmas": "0.6, 0.0"}),
        ("first", "LTX25Sampler", {**given, "latent": [noted, 0], "sigmas": ["above", 0]}),
        ("one", "LatentFromBatch", {"samples": ["first", 0], "batch_index": 1, "length": 1}),
        ("alone", "LTX25Sampler", {**given, "latent": ["one", 0], "sigmas": ["below", 0], "add_noise": False}),
        ("both", "LTX25Sampler", {**given, "latent": ["first", 0], "sigmas": ["below", 0], "add_noise": False}),
        ("its", "LatentFromBatch", {"samples": ["both", 0], "batch_index": 1, "length": 1}),
    ):
        prompt[key] = {"class_type": kind, "inputs": inputs}
    made, wanted = inspect(prompt, "alone"), inspect(prompt, "its")
    run = host.run(prompt, targets=["inspect-alone-0", "inspect-its-0"])
    alone, its = made(run)["samples"], wanted(run)["samples"]
    assert alone["shape"] == [1, 128, 3, 2, 3]
    assert [alone[of] for of in ("min", "max", "std")] == pytest.approx([its[of] for of in ("min", "max", "std")], abs=1e-4)  # other matrix shapes


def test_clips_that_are_repeated_have_their_pictures_again(host, api, find, inspect):
    """Two clips, each with its picture, twice over: the first frames are the pictures, as of the two alone."""
    prompt = api("text_to_video_distilled_tiny")
    sampler, load = find(prompt, "LTX25Sampler"), find(prompt, "LoadLTX25Checkpoint")
    for key, kind, inputs in (
        ("two", "ProbeImage", {"shape": "[2, 64, 96, 3]"}),
        ("clips", "ProbeLatent", {"video": "[2, 128, 2, 2, 3]", "keys": '{"frame_rate": 24.0}'}),
        ("pictures", "LTX25ImageCondition", {"engine": [load, 0], "latent": ["clips", 0], "image": ["two", 0], "frame": 0, "strength": 1.0, "crf": 0}),
        ("twice", "RepeatLatentBatch", {"samples": ["pictures", 0], "amount": 2}),
        ("four", "LTX25Sampler", {**prompt[sampler]["inputs"], "latent": ["twice", 0]}),
        ("alone", "LTX25Sampler", {**prompt[sampler]["inputs"], "latent": ["pictures", 0]}),
        ("again", "LatentFromBatch", {"samples": ["four", 0], "batch_index": 2, "length": 2}),
        ("first of four", "ProbeFrames", {"latent": ["again", 0], "start": 0, "count": 1}),
        ("first of two", "ProbeFrames", {"latent": ["alone", 0], "start": 0, "count": 1}),
    ):
        prompt[key] = {"class_type": kind, "inputs": inputs}
    made, wanted = inspect(prompt, "first of four"), inspect(prompt, "first of two")
    run = host.run(prompt, targets=["inspect-first of four-0", "inspect-first of two-0"])
    assert made(run)["samples"]["digest"] == wanted(run)["samples"]["digest"]


CHAINS = {
    "keep, picture": (("keep", "picture"), "the video is to stay exactly as it is, and a picture"),
    "picture, keep": (("picture", "keep"), "the video is to stay exactly as it is, and a picture"),
    "picture, picture": (("picture", "picture"), "frame 0 was given 2 pictures and can have one"),
    "keep, slots": (("keep", "slots"), "the video is to stay exactly as it is, and keyframes"),
    "slots, slots": (("slots", "slots"), "given twice"),
    "keep, soundtrack": (("keep", "soundtrack"), "nothing is left to make"),
    "sound anew, picture anew": (("clip", "soundtrack", "retake audio"), "nothing is left to make"),
    "retakes of both streams": (("clip", "soundtrack", "retake video", "retake"), "the audio is to stay exactly as it is, and stretches"),
    "retake of nothing": (("retake",), "the video of the latent, or its end, is still empty"),
    "retake of an extension": (("clip", "extend", "retake"), "still empty"),
    "extension of nothing": (("extend",), "There is no clip to make longer yet"),
    "enlarged nothing": (("enlarge",), "There is no clip to enlarge yet"),
    "enlarged extension": (("clip", "extend", "enlarge"), "There is no clip to enlarge yet"),
    "reference to nothing": (("reference",), "is still empty, so it shows nothing"),
    "voices": (("voices",), "2 sounds were given for 1 clip"),
    "slots behind the end": (("late slots",), "keyframe slots at frames [9, 40], wanted rising numbers from 0 to 16."),
    "clip with voices": (("clip of voices",), "2 sounds were given for one clip, wanted one"),
    "voice without sound": (("silent clip", "voice"), "the latent has no audio"),
}


@pytest.mark.parametrize("kinds, words", CHAINS.values(), ids=CHAINS)
def test_what_a_clip_cannot_be_told_together_is_refused_by_the_node_that_sees_it(host, api, given, find, kinds, words):
    prompt = api("text_to_video_distilled_tiny")
    load, sampler, empty = ({"engine": [find(prompt, "LoadLTX25Checkpoint"), 0]}, find(prompt, "LTX25Sampler"), find(prompt, "EmptyLTX25Latent"))
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": "[17, 64, 96, 3]"}}
    prompt["one"] = {"class_type": "ProbeImage", "inputs": {"shape": "[1, 64, 96, 3]"}}
    prompt["sound"] = {"class_type": "ProbeAudio", "inputs": {"shape": "[2, 2, 9000]" if "voices" in " ".join(kinds) else "[1, 2, 36000]", "rate": 48000}}
    nodes = {
        **{kind: ("EncodeVideoVAE", {**load, "images": ["any", 0], "frame_rate": 24.0, "audio": ["sound", 0]}) for kind in ("clip", "clip of voices")},
        "keep": ("LTX25VideoCondition", {**load, "images": ["any", 0], "mode": "keep", "frame": 0, "strength": 1.0, "attention": 1.0, "downscale": 0, "temporal": 0}),
        "picture": ("LTX25ImageCondition", {**load, "image": ["one", 0], "frame": 0, "strength": 1.0, "crf": 0}),
        "slots": ("LTX25KeyframeSlots", {**load, "count": 1, "frames": ""}),
        "late slots": ("LTX25KeyframeSlots", {**load, "count": 1, "frames": "40, 9"}),
        "soundtrack": ("LTX25AudioCondition", {**load, "audio": ["sound", 0], "mode": "soundtrack", "strength": 1.0}),
        **{kind: ("LTX25AudioCondition", {**load, "audio": ["sound", 0], "mode": "voice", "strength": 1.0}) for kind in ("voice", "voices")},
        "silent clip": ("EncodeVideoVAE", {**load, "images": ["any", 0], "frame_rate": 24.0}),
        "extend": ("LTX25Extend", {**load, "frames": 8, "loop": False}),
        "enlarge": ("LTX25LatentUpscale", {**load, "upscale_model": tiny_files().spatial_upscaler.name}),
        "reference": ("LTX25LatentReference", {"reference": [empty, 0], "strength": 1.0}),
        **{f"retake {stream}".removesuffix(" both"): ("LTX25Retake", {"stretches": "0.1-0.2", "streams": stream}) for stream in ("both", "video", "audio")},
    }
    source = empty
    for number, kind in enumerate(kinds):
        node, inputs = nodes[kind]
        prompt[f"told {number}"] = {"class_type": node, "inputs": inputs if "clip" in kind else {**inputs, "latent": [source, 0]}}
        source = f"told {number}"
    prompt[sampler]["inputs"]["latent"] = [source, 0]
    run = host.run(prompt)
    assert not run.ok and run.error["node_id"] == source and words in run.error["exception_message"], run.error
    assert run.error["exception_message"].strip().count(". ") == 0


def test_a_retake_behind_the_end_is_refused_before_anything_is_sampled(host, api, find):
    prompt = api("text_to_video_distilled_tiny")
    empty, sampler = find(prompt, "EmptyLTX25Latent"), find(prompt, "LTX25Sampler")
    prompt["again"] = {"class_type": "LTX25Retake", "inputs": {"latent": [empty, 0], "stretches": "0-0.2, 8-9", "streams": "both"}}
    prompt[sampler]["inputs"]["latent"] = ["again", 0]
    run = host.run(prompt)
    assert not run.ok and run.error["node_type"] == "LTX25Retake"
    assert "from 8 s to 9 s touches nothing of the video, which ends at 0.71 s" in run.error["exception_message"]


def test_a_clip_that_is_not_sampled_to_the_end_keeps_the_mask_of_its_extension(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    load, sampler = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25Sampler")
    prompt["longer"] = {"class_type": "LTX25Extend", "inputs": {"engine": [load, 0], "latent": [sampler, 0], "frames": 8, "loop": False}}
    source = "longer"
    for half, sigmas in (("first half", "1.0, 0.5"), ("second half", "0.5, 0.0")):
        prompt[f"levels of {half}"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": sigmas}}
        prompt[half] = {"class_type": "LTX25Sampler", "inputs": {**prompt[sampler]["inputs"], "latent": [source, 0], "sigmas": [f"levels of {half}", 0], "sampler": "euler"}}
        source = half
    for key, source in (("before", sampler), ("after", "second half")):
        prompt[key] = {"class_type": "ProbeFrames", "inputs": {"latent": [source, 0], "start": 0, "count": 3, "audio": 18}}
    before, after, half = inspect(prompt, "before"), inspect(prompt, "after"), inspect(prompt, "first half")
    run = host.run(prompt)
    assert run.ok, run.error
    assert "noise_mask" in half(run) and [part["digest"] for part in before(run)["samples"]["nested"]] == [part["digest"] for part in after(run)["samples"]["nested"]]


def test_a7_a_retake_of_the_picture_passes_the_sound_through(host, api, given, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    load, sampler = find(prompt, "LoadLTX25Checkpoint"), find(prompt, "LTX25Sampler")
    prompt["clip"] = {"class_type": "LoadVideo", "inputs": {"file": "clip.mp4"}}
    prompt["parts"] = {"class_type": "GetVideoComponents", "inputs": {"video": ["clip", 0]}}
    prompt["sound"] = {"class_type": "LoadAudio", "inputs": {"audio": "voice.wav"}}
    prompt["whole"] = {"class_type": "EncodeVideoVAE", "inputs": {"engine": [load, 0], "images": ["parts", 0], "frame_rate": 24.0, "audio": ["sound", 0]}}
    prompt["retake"] = {"class_type": "LTX25Retake", "inputs": {"latent": ["whole", 0], "stretches": "0.4-0.5", "streams": "video"}}
    prompt[sampler]["inputs"]["latent"] = ["retake", 0]
    asked, made, sound = inspect(prompt, "whole"), inspect(prompt, sampler), inspect(prompt, find(prompt, "DecodeAudioVAE"))
    run = host.run(prompt)
    before, after = asked(run)["samples"]["nested"], made(run)["samples"]["nested"]
    assert after[1]["digest"] == before[1]["digest"] and after[0]["digest"] != before[0]["digest"]
    assert sound(run)["waveform"]["shape"] == [1, 2, round(17 / 24 * 48000)]
    assert "19 frames are not 8 n + 1: the last 2 are left out" in " ".join(text for _, text in run.texts())


def test_predicted_duration_goes_into_the_latent(host, api, tiny, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    (head,) = (tiny / "model_patches").iterdir()
    prompt["length"] = {
        "class_type": "LTX25PredictDuration",
        "inputs": {
            "engine": [find(prompt, "LoadLTX25Checkpoint"), 0],
            "positive": [find(prompt, "EncodeGemmaText"), 0],
            "duration_head": head.name,
            "frame_rate": 24.0,
            "min_seconds": 0.3,
            "max_seconds": 0.6,
        },
    }
    widths(prompt, find)["frames"] = ["length", 0]
    frames, seconds, images = inspect(prompt, "length"), inspect(prompt, "length", 1), inspect(prompt, find(prompt, "DecodeVideoVAE"))
    run = host.run(prompt)
    held = "above max_seconds 0.6" if seconds(run) > 0.6 else "below min_seconds 0.3"
    assert frames(run) in (9,) and not 0.3 <= seconds(run) <= 0.6 and held in " ".join(text for _, text in run.texts())
    assert images(run)["shape"][0] == frames(run)
    prompt["length"]["inputs"].update(min_seconds=3600.0, max_seconds=3600.0)
    run = host.run(prompt, targets=["inspect-length-0"])
    assert frames(run) == 8193 and "and 8193 frames are the most of a clip" in " ".join(text for _, text in run.texts())


def test_generated_keyframes_come_out_as_clips_of_one_frame_and_seed_a_second_stage(host, api, find, inspect):
    prompt = api("two_stage_distilled_tiny")
    load, empty, up = (find(prompt, kind) for kind in ("LoadLTX25Checkpoint", "EmptyLTX25Latent", "LTX25LatentUpscale"))
    first, second = [key for key, node in prompt.items() if node["class_type"] == "LTX25Sampler"]
    prompt["slots"] = {"class_type": "LTX25KeyframeSlots", "inputs": {"engine": [load, 0], "latent": [empty, 0], "count": 2, "frames": ""}}
    prompt[first]["inputs"]["latent"] = ["slots", 0]
    prompt["larger"] = {"class_type": "LTX25LatentUpscale", "inputs": {**prompt[up]["inputs"], "latent": [first, 2]}}
    prompt["slots2"] = {
        "class_type": "LTX25KeyframeSlots",
        "inputs": {"engine": [load, 0], "latent": [up, 0], "count": 2, "frames": "", "keyframes": ["larger", 0]},
    }
    prompt[second]["inputs"]["latent"] = ["slots2", 0]
    prompt["pictures"] = {"class_type": "DecodeVideoVAE", "inputs": {"engine": [load, 0], "latent": [second, 2], "tiling": "auto"}}
    made, pictures, clip = inspect(prompt, first, 2), inspect(prompt, "pictures"), inspect(prompt, second)
    run = host.run(prompt)
    assert made(run)["samples"]["shape"] == [2, 128, 1, 2, 3]
    assert pictures(run)["shape"] == [2, 128, 192, 3]
    assert clip(run)["samples"]["nested"][0]["shape"] == [1, 128, 3, 4, 6]
    prompt["slots2"]["inputs"]["frames"] = "5, 13"
    run = host.run(prompt)
    assert run.error["node_id"] == "slots2" and "of frames [5, 11] and the slots stand at [5, 13]; use the same" in run.error["exception_message"]
    prompt[first]["inputs"]["seed"] += 1  # the first stage has to be sampled again, and is not
    run = host.run(prompt)
    assert run.error["node_id"] == first and run.error["exception_message"].startswith("node slots2 (LTX25KeyframeSlots) would refuse")


@pytest.mark.parametrize("sampler", ["res_2s", "gradient_estimation", "euler_cfg_pp"])
def test_further_samplers_run_and_are_in_the_record(host, api, find, inspect, sampler):
    prompt = api()
    prompt[find(prompt, "LTX25Sampler")]["inputs"].update(sampler=sampler, steps=2)
    latent = inspect(prompt, find(prompt, "LTX25Sampler"))
    assert all(part["finite"] for part in latent(host.run(prompt))["samples"]["nested"])


def test_guidance_outside_its_window_costs_one_forward_per_step(host, api, find, inspect):
    prompt = api()
    prompt[find(prompt, "LTX25Guider")]["inputs"].update(guidance_end=0.9, bins="0.97: audio_modality=1, video_modality=1")
    report = inspect(prompt, find(prompt, "LTX25Sampler"), 1)
    assert "cond+uncond+stg" in (text := report(host.run(prompt))) and " x cond," in text.replace(")", ",")


def test_e3_a_negative_prompt_at_cfg_1_is_a_notice(host, api, find):
    prompt = api()
    prompt[find(prompt, "LTX25Guider")]["inputs"].update(video_cfg=1.0, audio_cfg=1.0)
    run = host.run(prompt)
    assert run.ok and "negative prompt has no effect" in " ".join(text for _, text in run.texts())


def test_e2_x4_the_enhancer_passes_the_prompt_on_unless_it_is_switched_on(host, api, find, inspect):
    prompt = api("text_to_video_distilled_tiny")
    text, load = find(prompt, "EncodeGemmaText"), find(prompt, "LoadLTX25Checkpoint")
    prompt["longer"] = {"class_type": "LTX25EnhancePrompt", "inputs": {"engine": [load, 0], "text": "A cat.", "enabled": False, "model": ""}}
    prompt[text]["inputs"]["text"] = ["longer", 0]
    seen = inspect(prompt, "longer")
    assert seen(host.run(prompt)) == "A cat."
    prompt["longer"]["inputs"].update(enabled=True, model="/nowhere/at/all")
    run = host.run(prompt)
    assert run.status == "error" and ("config.json" in run.error["exception_message"] or "transformers" in run.error["exception_message"])
    prompt["longer"]["inputs"].update(enabled=True, model=" ")
    with pytest.raises(Rejected, match="no file was given: `model` is empty"):  # before anything of the prompt runs
        host.run(prompt)


def test_batch_items_may_have_a_picture_each(host, pinned, find, inspect):
    prompt = pinned(crf=0)
    prompt["any"] = {"class_type": "ProbeImage", "inputs": {"shape": "[2, 64, 96, 3]"}}
    prompt[find(prompt, "LTX25ImageCondition")]["inputs"]["image"] = ["any", 0]
    run = host.run(prompt)
    assert "2 pictures were given for 1 clip" in run.error["exception_message"]
    widths(prompt, find)["batch_size"] = 2
    images = inspect(prompt, find(prompt, "DecodeVideoVAE"))
    assert images(host.run(prompt))["shape"] == [34, 64, 96, 3]
