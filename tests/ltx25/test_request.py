import math

import pytest
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.guidance import AUDIO, VIDEO
from comfyui_ltx25.ltx25.request import DEFAULT_NEGATIVE, Request, parse_sigmas
from comfyui_ltx25.ltx25.sampler import SAMPLERS
from comfyui_ltx25.ltx25.schedule import ltx2, sigmas_of
from comfyui_ltx25.ltx25.shapes import AudioLatentShape, Compression, VideoShape


def refusal(**values):
    with pytest.raises(InputError) as caught:
        Request(**{"prompt": "a cat", **values})
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", ")."))
    return message


def test_defaults_are_a_legal_clip():
    request = Request("a cat")
    assert request.video == VideoShape(121, 512, 768)
    assert request.audio == AudioLatentShape(8, 126, 16)
    assert request.negative == DEFAULT_NEGATIVE


def test_r1_sizes_off_the_grid_name_the_nearest_legal_values():
    message = refusal(width=100, height=100, frames=10)
    assert "width 100" in message and "height 100" in message and "frames 10" in message
    assert "96 or 128" in message and "9 or 17" in message


@pytest.mark.parametrize("name", ["width", "height", "frames"])
@pytest.mark.parametrize("value", [0, -1, -32, 10**9, 2**70])
def test_sizes_that_no_clip_has(name, value):
    assert f"{name} {value}" in refusal(**{name: value})


@pytest.mark.parametrize("name", ["width", "height", "frames", "seed", "steps", "skip_step"])
@pytest.mark.parametrize("value", [1.5, "64", None, True, math.nan])
def test_counts_are_whole_numbers(name, value):
    assert name in refusal(**{name: value}) and "whole number" in refusal(**{name: value})


@pytest.mark.parametrize("size", [(32, 32, 1), (8192, 32, 1), (768, 512, 1), (64, 96, 8193)])
def test_extreme_sizes_that_are_legal(size):
    width, height, frames = size
    assert Request("", width=width, height=height, frames=frames).video == VideoShape(frames, height, width)


def test_r4_the_grid_is_that_of_the_video_vae():
    assert Request("", width=48, height=48, frames=5, compression=Compression(frames=4, side=16)).video.frames == 5
    assert "multiple of 16" in refusal(width=50, compression=Compression(frames=4, side=16))


@pytest.mark.parametrize("frame_rate", [0, -24, 0.5, 241, math.inf, math.nan, "24", None])
def test_frame_rates_that_no_clip_has(frame_rate):
    assert "frame_rate" in refusal(frame_rate=frame_rate)


@pytest.mark.parametrize("frame_rate", [23.976, 24, 1, 240, 12.5])
def test_legal_frame_rates(frame_rate):
    assert Request("", frame_rate=frame_rate).frame_rate == frame_rate


@pytest.mark.parametrize("prompt", ["", "   \n", "word " * 5000, "🐈‍⬛ 👩🏽‍🚀", "קול הים", "a\0b", "\u202eabc"])
def test_any_text_is_a_prompt(prompt):
    assert Request(prompt, negative=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [None, b"a cat", 3, ["a"]])
def test_what_is_not_text_is_no_prompt(prompt):
    assert "prompt is" in refusal(prompt=prompt)
    if prompt is not None:
        assert "negative is" in refusal(negative=prompt)


def test_half_a_surrogate_pair_is_refused_before_the_tokenizer_sees_it():
    assert "position 2" in refusal(prompt="a \ud83d cat")


def test_negative_may_be_missing_only_where_it_is_not_used():
    assert "video_cfg is 3 but there is no negative prompt" in refusal(negative=None)
    assert "audio_cfg is 7 but there is no negative prompt" in refusal(negative=None, video_cfg=1.0)
    assert Request("a cat", negative=None, video_cfg=1.0, audio_cfg=1).negative is None
    assert Request("a cat", negative="").negative == ""


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_steps_out_of_range(steps):
    assert f"steps {steps}" in refusal(steps=steps)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range(seed):
    assert f"seed {seed}" in refusal(seed=seed)


def test_largest_seed():
    assert Request("", seed=2**64 - 1).seed == 2**64 - 1


@pytest.mark.parametrize(("name", "known"), [("schedule", "ltx2, distilled, distilled_stage2"), ("sampler", "auto, euler, euler_ancestral")])
def test_choices_are_listed(name, known):
    assert known in refusal(**{name: "karras"})


def test_every_sampler_on_offer_is_accepted():
    assert [Request("", sampler=name).sampler for name in SAMPLERS] == list(SAMPLERS)


def test_defaults_are_the_published_recipe():
    request = Request("a cat")
    assert request.guidance(48) == (VIDEO, AUDIO)
    assert request.noise_levels() == (ltx2(30), "ltx2")


def test_sigmas_win_over_schedule_and_steps():
    assert Request("", schedule="distilled").noise_levels() == (sigmas_of("distilled", 1), "distilled")
    assert Request("", schedule="distilled", sigmas=(1.0, 0.5, 0.0)).noise_levels() == ((1.0, 0.5, 0.0), None)


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_guidance_numbers(stream):
    for scale in ("cfg", "stg", "modality"):
        for value in (-0.1, 100.1, math.nan, math.inf, "3", None):
            assert f"{stream}_{scale}" in refusal(**{f"{stream}_{scale}": value})
        assert getattr(Request("", **{f"{stream}_{scale}": 0}), f"{stream}_{scale}") == 0
    for value in (-0.1, 1.1, math.nan):
        assert f"{stream}_rescale" in refusal(**{f"{stream}_rescale": value})


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_eta(eta):
    assert "eta" in refusal(eta=eta)


@pytest.mark.parametrize(("text", "blocks"), [("28", {28}), ("0,28", {0, 28}), ("", set()), (" 28 , 0 ", {0, 28})])
def test_stg_blocks_of_a_model(text, blocks):
    assert all(guidance.stg_blocks == blocks for guidance in Request("", stg_blocks=text).guidance(48))


@pytest.mark.parametrize(("text", "blocks"), [("28", 4), ("99", 48), ("abc", 48), ("-1", 48)])
def test_stg_blocks_that_the_model_lacks(text, blocks):
    with pytest.raises(InputError, match=f"stg_blocks '{text}'.* 0 to {blocks - 1} "):
        Request("", stg_blocks=text).guidance(blocks)


def test_sigmas():
    assert parse_sigmas("1, .725,0") == (1.0, 0.725, 0.0)
    assert Request("", sigmas=(1.0, 0.5, 0.0)).sigmas == (1.0, 0.5, 0.0)
    with pytest.raises(InputError, match="sigmas"):
        parse_sigmas("1,a")
    for sigmas in ((), (1.0,), (0.5, 1.0), (1.0, 1.0), (2.0, 0.0), (1.0, math.nan), (1.0, -0.1)):
        assert "sigma" in refusal(sigmas=sigmas)
