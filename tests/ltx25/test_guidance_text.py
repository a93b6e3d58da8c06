"""Guidance by noise level as users write it."""

from dataclasses import replace

import pytest
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.guidance import AUDIO, OFF, VIDEO
from comfyui_ltx25.ltx25.guidance_text import EXAMPLE, by_sigma, parse_bins
from comfyui_ltx25.ltx25.schedule import check_sigmas, sigmas_of

SIGMAS = check_sigmas((1.0, 0.95, 0.9, 0.7, 0.5, 0.3, 0.1))


def at(bins, field="cfg"):
    return [getattr(bins.at(sigma), field) for sigma in SIGMAS]


def test_nothing_said_is_the_same_at_every_step():
    assert at(by_sigma(VIDEO, "video", "", 1.0, 0.0)) == [3.0] * 7


def test_a_bin_holds_from_its_level_down_until_the_next():
    bins = by_sigma(VIDEO, "video", EXAMPLE, 1.0, 0.0)
    assert at(bins) == [3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    assert at(bins, "stg") == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("level, sigma", [(0.1, sigmas_of("ltx2", 30)[-2]), *((round(sigma, 6), sigma) for sigma in sigmas_of("distilled", 8)[:-1])])
def test_a_step_at_a_written_level_belongs_to_it_although_float32_rounds_it_up(level, sigma):
    """0.1, the last level of ltx2, is 0.10000000149 to a sampler."""
    assert by_sigma(VIDEO, "video", f"{level}: video_cfg=2", 1.0, 0.0).at(sigma).cfg == 2.0
    if level < 1.0:
        assert by_sigma(VIDEO, "video", "", 1.0, level).at(sigma) == OFF
        assert by_sigma(VIDEO, "video", "", level, 0.0).at(sigma) == VIDEO


def test_each_stream_reads_its_own_values():
    text = "0.5: video_cfg=2, audio_cfg=5"
    assert at(by_sigma(AUDIO, "audio", text, 1.0, 0.0)) == [7.0] * 4 + [5.0] * 3
    assert at(by_sigma(AUDIO, "audio", "0.5: video_cfg=2", 1.0, 0.0)) == [7.0] * 7


def test_outside_the_window_there_is_no_guidance():
    bins = by_sigma(VIDEO, "video", "0.6: video_cfg=2", 0.9, 0.3)
    assert [bins.at(sigma) for sigma in SIGMAS] == [OFF, OFF, VIDEO, VIDEO, *[replace(VIDEO, cfg=2.0)], OFF, OFF]


def test_a_bin_above_the_window_counts_where_it_opens():
    assert at(by_sigma(VIDEO, "video", "0.95: video_cfg=2", 0.9, 0.0))[2:] == [2.0] * 5


def test_levels_may_be_written_in_any_order():
    assert parse_bins("0.5: video_cfg=1; 0.9: audio_stg=2") == {0.5: {"video_cfg": 1.0}, 0.9: {"audio_stg": 2.0}}
    assert at(by_sigma(VIDEO, "video", "0.5: video_stg=0; 0.9: video_cfg=2", 1.0, 0.0)) == [3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("text", ["x: video_cfg=1", "0.5 video_cfg=1", "0.5: cfg=1", "0.5: video_cfg=a", "1.5: video_cfg=1", "0.5: video_cfg=1; 0.5: video_cfg=2", "0.5: video_cfg=inf", "0.5: video_cfg=2, video_cfg=3", "0.5: video_cfg=101", "0.5: audio_stg=-1", "0.5: video_rescale=1.5"])
def test_what_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="write them like 0.9: video_cfg=2"):
        by_sigma(VIDEO, "video", text, 1.0, 0.0)


def test_a_value_that_the_widgets_would_not_take_is_named():
    with pytest.raises(InputError, match="audio_rescale is 7, wanted 0 to 1; write"):
        by_sigma(VIDEO, "video", "0.5: audio_rescale=7", 1.0, 0.0)


@pytest.mark.parametrize("start, end", [(0.5, 0.5), (0.2, 0.8), (1.0, -0.1)])
def test_an_empty_window_is_refused(start, end):
    with pytest.raises(InputError, match="empty window"):
        by_sigma(VIDEO, "video", "", start, end)
