"""Stretches of time, frames and lengths as users write them."""

import pytest
import torch
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.moments import fit_latent, fit_wave, parse_frames, parse_stretches


def test_stretches():
    assert parse_stretches("1-2.5, 4 - 5s") == ((1.0, 2.5), (4.0, 5.0))


@pytest.mark.parametrize("text", ["", "1", "2-1", "1-1", "a-b", "1-2;3-4", "-1-2"])
def test_what_is_no_stretch_is_refused(text):
    with pytest.raises(InputError):
        parse_stretches(text)


def test_frames():
    assert parse_frames("8, 40") == parse_frames("40, 8, 40") == (8, 40)
    with pytest.raises(InputError, match="24, 48"):
        parse_frames("8, x")


@pytest.mark.parametrize("frames, rate, hertz", [(17, 24.0, 48000), (121, 23.976, 44100), (25, 60.0, 8000), (1, 24.0, 16000)])
def test_a_wave_is_cut_or_padded_to_the_clip(frames, rate, hertz):
    wanted = round(frames / rate * hertz)
    for length in (1, wanted - 1, wanted, wanted + 999):
        wave = torch.ones(1, 2, max(1, length))
        fitted = fit_wave(wave, hertz, frames, rate)
        assert fitted.shape == (1, 2, wanted) and fitted.sum() == 2 * min(wave.shape[-1], wanted)


@pytest.mark.parametrize("frames", range(1, 258, 8))
@pytest.mark.parametrize("rate", [23.976, 24.0, 25.0, 30.0, 60.0])
def test_the_encoder_never_makes_fewer_latent_frames_than_the_clip_has(frames, rate):
    """n = ceil((1 + N // 160) / 4) of N samples at 16 kHz, against round(25 s)."""
    made = -(-(1 + round(frames / rate * 16000) // 160) // 4)
    assert fit_latent(torch.zeros(1, 8, made, 16), frames, rate).shape[2] == max(1, round(frames / rate * 25))


@pytest.mark.parametrize("hertz", [1, 7, 11, 23, 100, 7875, 8000, 11025])
@pytest.mark.parametrize("rate", [24.0, 25.0, 30.0, 50.0])
def test_nor_of_sound_at_the_lowest_rates_a_sample_of_which_lasts_for_many_frames(hertz, rate):
    """N samples at `hertz` become ceil(16000 N / hertz) at 16 kHz; the nearest whole sample may end before the clip does."""
    for frames in range(1, 258, 8):
        samples = fit_wave(torch.ones(1, 1, 1), hertz, frames, rate).shape[-1]
        assert abs(samples - frames / rate * hertz) < 1 + 1e-9 or samples == 1
        made = -(-(1 + -(-samples * 16000 // hertz) // 160) // 4)
        assert fit_latent(torch.zeros(1, 8, made, 16), frames, rate).shape[2] == max(1, round(frames / rate * 25))
