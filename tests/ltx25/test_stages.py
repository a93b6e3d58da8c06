from dataclasses import replace
from fractions import Fraction

import pytest
from comfyui_ltx25.ltx25.config.upscaler import UpscalerConfig
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.request import Request
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, VideoShape
from comfyui_ltx25.ltx25.stages import first_request, first_size

BY = {space: UpscalerConfig(128, 64, 1, Fraction(space), 1, True) for space in ("2", "3/2", "4", "3/4", "1")}


@pytest.mark.parametrize("space, height, width", [("2", 704, 1280), ("3/2", 672, 960), ("4", 512, 768)])
def test_the_first_size_is_the_one_that_the_upscaler_makes_the_clip_of(space, height, width):
    clip = VideoShape(17, height, width)
    small = first_size(clip, BY[space], PUBLISHED_COMPRESSION).latent(PUBLISHED_COMPRESSION)
    large = clip.latent(PUBLISHED_COMPRESSION)
    assert BY[space].size(small.frames, small.height, small.width) == (large.frames, large.height, large.width)


def test_a_size_that_no_first_one_gives_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"1/1.5 of its size first.*width 1280 px is not a multiple of 96 \(use 1248 or 1344\)"):
        first_size(VideoShape(9, 672, 1280), BY["3/2"], PUBLISHED_COMPRESSION)
    with pytest.raises(InputError, match=r"height 32 px is not a multiple of 64 \(use 64\)"):
        first_size(VideoShape(9, 32, 64), BY["2"], PUBLISHED_COMPRESSION)


@pytest.mark.parametrize("space, time", [("3/4", 1), ("1", 2), ("2", 2)])
def test_an_upscaler_that_does_not_enlarge_the_picture_alone_is_refused(space, time):
    with pytest.raises(InputError, match="use the published spatial upscaler"):
        first_size(VideoShape(9, 64, 64), UpscalerConfig(128, 64, 1, Fraction(space), time, False), PUBLISHED_COMPRESSION)


def test_a_first_stage_that_leaves_noise_is_refused():
    asked = Request("A cat.", width=128, height=64, frames=9)
    assert first_request(replace(asked, sigmas=(1.0, 0.5, 0.0)), BY["2"]).width == 64
    with pytest.raises(InputError, match=r"sampled to the end, and its noise levels end at 0\.5; end sigmas with 0"):
        first_request(replace(asked, sigmas=(1.0, 0.5)), BY["2"])
