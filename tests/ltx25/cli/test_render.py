import json
import re
import shutil
import wave
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25.cli import main, parser, render
from comfyui_ltx25.ltx25.engine import Files
from comfyui_ltx25.ltx25.hdr import CURVES, to_linear
from comfyui_ltx25.ltx25.request import DEFAULT_NEGATIVE, Request
from comfyui_ltx25.ltx25.schedule import sigmas_of
from comfyui_ltx25.ltx25.shapes import clip_samples
from comfyui_ltx25.tests.support.exr import read_exr
from comfyui_ltx25.tests.support.hdr import from_linear
from comfyui_ltx25.tests.support.tiny import tiny_files

SMALL = ["--width", "64", "--height", "64", "--frames", "9", "--steps", "1"]
SLOTS = ("transformer", "text_encoder", "video_vae", "audio_vae")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A cache that already holds the tiny set, and a place for records."""
    cache = tmp_path / "cache" / "tiny"
    shutil.copytree(tiny_files().transformer.parents[1], cache)
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LTX25_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("LTX25_RECORD_PROMPTS", raising=False)
    return tmp_path


def files(**other):
    return [part for slot in SLOTS for part in (f"--{slot.replace('_', '-')}", str(other.get(slot, getattr(tiny_files(), slot))))]


def rendered(here, *arguments, name="x.mp4"):
    assert main(["render", "--prompt", "A cat on a table.", "-o", str(here / name), "--device", "cpu", *arguments]) == 0
    return here / name


def refused(here, capsys, *arguments):
    """The one sentence of a refusal; nothing was read, written or recorded."""
    code = main(["render", "--prompt", "a cat", "-o", str(here / "x.mp4"), "--device", "cpu", *arguments])
    shown = capsys.readouterr().err
    assert code == 2 and shown.count("\n") == 1 and shown.startswith("ltx25 render: ")
    assert not (here / "x.mp4").exists() and not (here / "runs").exists()
    return shown


def frames_of(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def same_picture(a, b):
    """Whether frames (F, H, W, 3) of 0..255 are of one clip. A CPU may split a sum otherwise in another call, and the video's
    coder makes a level here and there of the last bit; latents are held equal to the bit by the engine's own tests."""
    return a.shape == b.shape and np.abs(a.astype(np.int16) - b).mean() < 0.1


def sound_of(path):
    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """One default render of the tiny checkpoint, as the README's first command makes it."""
    here = tmp_path_factory.mktemp("render")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTX25_CACHE", str(here / "cache"))
        patch.setenv("LTX25_RUNS", str(here / "runs"))
        patch.setenv("LTX25_RECORD_PROMPTS", "0")
        rendered(here)
    return here


def test_a_prompt_alone_gives_a_clip_of_the_tiny_defaults(clip):
    with av.open(str(clip / "x.mp4")) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        defaults = render.TINY_DEFAULTS
        assert (video.width, video.height, video.frames) == (defaults["width"], defaults["height"], defaults["frames"])
        assert video.average_rate == 24
        assert abs(audio.duration * audio.time_base * 48000 - clip_samples(defaults["frames"], 24)) <= 1024


def test_the_clip_is_neither_flat_nor_still_nor_silent(clip):
    frames, sound = frames_of(clip / "x.mp4").astype(float), sound_of(clip / "x.mp4")
    assert frames.std(axis=(1, 2)).mean() > 10  # levels of 255, inside a frame
    assert np.abs(np.diff(frames, axis=0)).mean() > 1
    assert sound.std() > 0.02 and np.abs(sound).max() <= 1.1


def test_v_phases_are_recorded_in_order_and_forwards_are_all_there(clip):
    (path,) = (clip / "runs").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    closed = [line["name"] for line in lines if line["event"] == "phase" and line["state"] == "closed"]
    order = ["text.tokenize", "text.tower", "text.project", "text.connect", "sample", "decode.video", "decode.audio", "mux"]
    assert [name for name in dict.fromkeys(closed) if name != "load.read"] == order
    forwards = [line for line in lines if line["event"] == "forward" and line["state"] == "done"]
    assert forwards[-1]["last"] == forwards[-1]["of"] == 4 * render.TINY_DEFAULTS["steps"]
    assert lines[-1]["status"] == "done"
    assert lines[0]["geometry"]["frames"] == render.TINY_DEFAULTS["frames"]
    for slot, file in lines[0]["files"].items():
        assert slot in SLOTS and file["bytes"] > 1000 and file["name"].endswith(".safetensors") and len(file["header"]) == 64
    assert lines[0]["tokens"].keys() == {"video", "audio"} and lines[0]["text"] == 1024 and len(lines[0]["legs"]) == 4
    assert lines[0]["settings"]["steps"] == lines[0]["steps"] == render.TINY_DEFAULTS["steps"]
    assert 0 < lines[0]["process"]["first"] <= lines[0]["process"]["now"] or lines[0]["process"]["now"] is None
    assert "A cat on a table" not in path.read_text()  # prompts are kept only where asked for


def test_the_file_names_its_record_and_seed(clip):
    with av.open(str(clip / "x.mp4")) as container:
        assert container.metadata["seed"] == "0"
        assert container.metadata["record"] == str(next((clip / "runs").glob("*.jsonl")))


def test_the_same_seed_gives_the_same_clip_with_files_named_or_not_and_another_one_another(here, settings_clip):
    frames, sound = settings_clip
    same, other = rendered(here, *SMALL, name="same.mp4"), rendered(here, *SMALL, "--seed", "1", name="other.mp4")
    assert same_picture(frames_of(same), frames) and np.abs(sound_of(same) - sound).max() < 1e-3
    assert not same_picture(frames_of(other), frames) and not np.array_equal(sound_of(other), sound)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("negative", "fog", "fog"),
        ("width", "64", 64),
        ("height", "96", 96),
        ("frames", "17", 17),
        ("frame_rate", "23.976", 23.976),
        *((f"{stream}_{scale}", "0.25", 0.25) for stream in ("video", "audio") for scale in ("cfg", "stg", "modality", "rescale")),
        ("stg_blocks", "0,1", "0,1"),
        ("skip_step", "1", 1),
        ("rule", "apg", "apg"),
        ("apg_eta", "0.5", 0.5),
        ("apg_norm", "5", 5.0),
        ("guidance_start", "0.9", 0.9),
        ("guidance_end", "0.2", 0.2),
        ("bins", "0.5: video_cfg=2", "0.5: video_cfg=2"),
        ("seed", "5", 5),
        ("schedule", "distilled", "distilled"),
        ("steps", "3", 3),
        ("sampler", "euler_ancestral", "euler_ancestral"),
        ("sigmas", "1,0.5,0", (1.0, 0.5, 0.0)),
        ("eta", "0.5", 0.5),
    ],
)
def test_every_flag_reaches_the_request_and_nothing_else(flag, text, value):
    plain, changed = request_of(), request_of(f"--{flag.replace('_', '-')}={text}")
    assert getattr(plain, flag) != value and getattr(changed, flag) == value
    assert replace(changed, **{flag: getattr(plain, flag)}) == plain


def test_token_shift_is_a_switch_of_the_schedule():
    plain, shifted = request_of(), request_of("--token-shift")
    assert replace(shifted, token_shift=False) == plain and shifted.noise_levels() != plain.noise_levels()
    assert shifted.noise_levels() == (sigmas_of("ltx2", plain.steps, 7 * 5 * 8), "ltx2")  # 49 frames of 256 x 160 px


def request_of(*arguments):
    return render._request(parser().parse_args(["render", "--prompt", "a", "-o", "x.mp4", *arguments]), tiny=True)


def test_a_negative_prompt_that_nothing_would_use_is_not_encoded():
    assert request_of("--video-cfg=1", "--audio-cfg=1").negative is None
    assert request_of("--video-cfg=1", "--audio-cfg=1", "--negative=fog").negative == "fog"
    assert request_of("--video-cfg=1").negative == DEFAULT_NEGATIVE
    assert request_of("--video-cfg=1", "--audio-cfg=1", "--sampler=euler_cfg_pp").negative == DEFAULT_NEGATIVE, "CFG++ reads it at cfg 1, too"
    assert request_of("--video-cfg=1", "--audio-cfg=1", "--bins=0.5: video_cfg=3").negative == DEFAULT_NEGATIVE, "from 0.5 on"
    assert request_of("--video-cfg=1", "--audio-cfg=1", "--bins=0.5: video_stg=0").negative is None


@pytest.mark.parametrize("setting", ["--negative=fog", "--video-cfg=5", "--audio-rescale=0", "--stg-blocks=0,1", "--sigmas=1,0.5,0", "--rule=cfg_star", "--bins=1: audio_cfg=2"])
def test_n6_settings_change_the_clip(here, settings_clip, setting):
    """A knob that is accepted and changes nothing would be a lie. Frames and sound are compared together."""
    other = rendered(here, *SMALL, setting)
    assert not (np.array_equal(frames_of(other), settings_clip[0]) and np.array_equal(sound_of(other), settings_clip[1]))


@pytest.fixture(scope="module")
def settings_clip(tmp_path_factory):
    here = tmp_path_factory.mktemp("settings")
    path = rendered(here, *SMALL, *files(), "--stg-blocks", "2", "--runs", str(here / "runs"))
    return frames_of(path), sound_of(path)


def test_every_input_of_a_request_has_a_flag_and_the_nodes_default():
    assert set(render.FLAGS) == set(render.DEFAULTS) - {"prompt", "compression"}
    assert {name: render.DEFAULTS[name] for name in ("width", "height", "frames", "steps")} == {"width": 768, "height": 512, "frames": 121, "steps": 30}


def test_help_names_the_defaults_that_there_are():
    told = {name: render._help(name, text) for name, (_, text) in render.FLAGS.items()}
    assert told["steps"] == "of schedule ltx2; default 30 [8]" and not any(text.endswith("default ") for text in told.values())


def test_clips_of_a_batch_are_those_of_their_seeds(here):
    rendered(here, *SMALL, "--batch-size", "2")
    assert sorted(path.name for path in here.glob("*.mp4")) == ["x-1.mp4", "x-2.mp4"]
    single = rendered(here, *SMALL, "--seed", "1", name="y.mp4")
    second = frames_of(here / "x-2.mp4").astype(float)
    assert np.abs(frames_of(single) - second).mean() < 1  # levels; batched products may round otherwise


def test_one_frame_and_ntsc_rates_are_legal(here):
    path = rendered(here, *SMALL, "--frames", "1", "--frame-rate", "23.976")
    assert len(frames_of(path)) == 1
    with av.open(str(rendered(here, *SMALL, "--frame-rate", "23.976"))) as container:
        assert str(container.streams.video[0].average_rate) == "24000/1001"


@pytest.mark.parametrize("curve", CURVES)
def test_linear_light_is_a_folder_of_exr_frames_with_the_sound(here, settings_clip, curve):
    out = rendered(here, *SMALL, "--transfer", curve, name=curve)
    frames = [read_exr(path) for path in sorted(out.glob("frame_*.exr"))]
    picture = torch.from_numpy(settings_clip[0]).float() / 255
    # Compared as signals, both of colours that light can have: the MP4 is lossy and has 8 bits, a few levels on average.
    got, want = from_linear(torch.stack(frames), curve), from_linear(to_linear(picture, curve), curve)
    assert len(frames) == 9 and frames[0].shape == (64, 64, 3)
    assert (got - want).abs().mean() < 0.03 < (torch.stack(frames) - picture).abs().mean()
    facts = json.loads((out / "clip.json").read_text())
    assert (facts["frame_rate"], facts["frames"], facts["seed"]) == (24.0, 9, "0")
    assert facts["record"] == str(sorted((here / "runs").glob("*.jsonl"))[-1])
    with wave.open(str(out / "sound.wav")) as sound:
        assert sound.getnframes() == clip_samples(9, 24)


def test_linear_light_does_not_go_into_an_mp4(here, capsys):
    assert "a folder of EXR frames; use" in refused(here, capsys, "--transfer", "LogC3")


def test_a_profiled_render_says_where_a_step_goes_and_what_the_device_can_do(here, capsys):
    rendered(here, *SMALL, "--profile")
    shown = capsys.readouterr().err
    for word in ("matrix products", "attention", "element-wise", "copies", "host gaps", "TFLOP/s", "GB/s", "kernels"):
        assert word in shown
    (path,) = (here / "runs").glob("*.jsonl")
    (split,) = [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "profile"]
    assert sum(split["shares"].values()) == pytest.approx(1, abs=0.02) and split["device_busy"] <= split["wall"]


def test_distilled_recipe_runs_one_forward_per_step(here, capsys):
    off = [flag for stream in ("video", "audio") for flag in (f"--{stream}-cfg=1", f"--{stream}-stg=0", f"--{stream}-modality=1")]
    rendered(here, *SMALL, *files(transformer=tiny_files().distilled), "--schedule", "distilled", "--stg-blocks", "2", *off)
    shown = capsys.readouterr().err
    assert "forward 8/8" in shown or "8/8" in shown
    assert "note:" not in shown


def test_guidance_on_a_distilled_file_is_a_note_not_an_error(here, capsys):
    rendered(here, *SMALL, *files(transformer=tiny_files().distilled), "--stg-blocks", "2")
    assert "note: ltx-2.5-tiny-distilled" in capsys.readouterr().err


def test_a_long_prompt_is_cut_and_told_with_counts(here, capsys):
    assert main(["render", "--prompt", "word " * 5000, "-o", str(here / "x.mp4"), "--device", "cpu", *SMALL]) == 0
    assert len(re.findall(r"note: prompt has \d+ tokens, the first 1023 \+ BOS are used", capsys.readouterr().err)) == 1


@pytest.mark.parametrize("prompt", ["", "  ", "🐈‍⬛", "קול הים", "a\0b"], ids=["empty", "blank", "emoji", "right to left", "NUL"])
def test_any_prompt_renders(here, prompt):
    assert main(["render", "--prompt", prompt, "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet", *SMALL]) == 0


def test_the_first_render_of_a_device_is_predicted_without_a_record_and_the_next_one_with_it(here, capsys):
    for n, basis in enumerate(("TFLOP/s, no record of this device)", "(this geometry, measured)")):
        rendered(here, *SMALL, name=f"{n}.mp4")
        (first,) = [line for line in capsys.readouterr().err.splitlines() if "predicted" in line]
        assert "step 1/1" in first and basis in first


def test_quiet_shows_the_result_alone(here, capsys):
    rendered(here, *SMALL, "--quiet")
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.startswith(f"{here / 'x.mp4'}: 9 frames of 64 x 64 px")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--width", "100", "--height", "100", "--frames", "10"), "use 96 or 128"),
        (("--width", "0"), "width 0"),
        (("--frames", "-1"), "frames -1"),
        (("--height", "99999999"), "height 99999999"),
        (("--frame-rate", "0"), "frame_rate 0"),
        (("--steps", "0"), "steps 0"),
        (("--stg-blocks", "28"), "0 to 3"),
        (("--stg-blocks", "99"), "0 to 3"),
        (("--stg-blocks", "abc"), "stg_blocks 'abc'"),
        (("--seed", "-1"), "seed -1"),
        (("--schedule", "karras"), "ltx2, distilled"),
        (("--sampler", "heun"), "auto, euler"),
        (("--batch-size", "0"), "batch_size 0"),
        (("--width", "8192", "--height", "8192", "--frames", "8193"), "frames of 8192 x 8192 px needs"),
        (("--width", "8192", "--height", "8192", "--frames", "8193"), "are free; use at most"),
        (("--frames", "8193", "--frame-rate", "1", "--batch-size", "1000"), "of host memory, and"),
        (("--sigmas", "0,1"), "sigma"),
        (("--device", "warp"), "device 'warp'"),
        (("--device", "meta"), "device 'meta' cannot be used"),
        (("--precision", "fp8"), "precision fp8 needs a card"),
        (("--transformer", "x.safetensors"), "--text-encoder and --video-vae and --audio-vae are missing"),
        (("--tiny", *files()), "--tiny brings its own files"),
        (files(audio_vae="/nowhere/a.safetensors"), "/nowhere/a.safetensors does not exist"),
    ],
)
def test_wrong_input_is_one_sentence_before_any_work(here, capsys, arguments, words):
    assert words in refused(here, capsys, *arguments)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("part", vars(tiny_files()))
def test_l2_every_file_in_every_wrong_slot_is_named(here, capsys, slot, part):
    right = {"transformer": ("transformer", "distilled")}.get(slot, (slot,))
    if part in right or (slot, part) == ("video_vae", "video_vae_diffusion"):
        pytest.skip("belongs there, or belongs there once its decoder is built")
    path = getattr(tiny_files(), part)
    message = refused(here, capsys, *files(**{slot: path}))
    assert slot in message and path.name in message and "wanted" in message


def test_memory_that_runs_out_ends_in_one_sentence_and_no_traceback(here, capsys, monkeypatch):
    def short(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore")

    monkeypatch.setattr("comfyui_ltx25.ltx25.engine.decode_audio", short)
    assert main(["render", "--prompt", "a cat", "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet", *SMALL]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("ltx25 render: audio VAE ran out of memory") and shown.count("\n") == 1
    assert f"`ltx25 decode {here / 'x.latent.safetensors'} -o {here / 'x.mp4'}` goes on from there" in shown


def test_output_that_cannot_be_written_is_told_before_the_work(here, capsys):
    code = main(["render", "--prompt", "a", "-o", str(here / "x.webm"), "--device", "cpu"])
    assert code == 2 and ".mp4" in capsys.readouterr().err and not (here / "runs").exists()


@pytest.mark.parametrize(("name", "taken"), [("x.mp4", "x-2.mp4"), ("x", "x-2"), ("x" * 244 + ".mp4", None)], ids=["file", "folder", "long"])
def test_the_output_of_every_clip_of_a_batch_is_checked_before_the_work(here, capsys, name, taken):
    """Found out behind the last step, the frames of all clips are lost."""
    if taken is not None:
        (here / taken / "other").mkdir(parents=True)
    transfer = [] if name.endswith(".mp4") else ["--transfer", "LogC3"]
    code = main(["render", "--prompt", "a", "-o", str(here / name), "--device", "cpu", "--batch-size", "2", *transfer, *SMALL])
    shown = capsys.readouterr().err
    assert code == 2 and shown.count("\n") == 1 and (taken or "File name too long") in shown and not (here / "runs").exists()


def test_the_files_of_the_engine_are_the_slots():
    assert tuple(Files.__dataclass_fields__) == SLOTS == render.SLOTS


def test_request_defaults_ask_for_the_published_recipe():
    request = Request("a")
    assert (request.negative, request.schedule, request.sampler) == (DEFAULT_NEGATIVE, "ltx2", "auto")
