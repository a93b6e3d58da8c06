"""Resampling between any two rates: equal to the whole table of filters, in memory that follows the clip and not the rates."""

import math

import pytest
import torch
from comfyui_ltx25.ltx25.audio import resample as resample_module
from comfyui_ltx25.ltx25.audio.resample import resample, sinc_kernel
from comfyui_ltx25.tests.support.memory import peak_bytes_held

MIB = 1 << 20


def by_the_whole_table(wave, source, target):
    """Every tap of every phase, zeros as well, as one strided convolution over (C, N)."""
    kernel, reach = sinc_kernel(source, target)
    step = source // math.gcd(source, target)
    padded = torch.nn.functional.pad(wave[:, None], (reach, reach + step))
    made = torch.nn.functional.conv1d(padded, kernel.to(wave.dtype)[:, None], stride=step)
    return made.transpose(1, 2).flatten(1)[:, : -(-wave.shape[1] * target // source)]


def noise(channels, samples, dtype):
    return torch.randn(channels, samples, generator=torch.Generator().manual_seed(samples), dtype=dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("source, target", [(3, 1), (1, 3), (2, 1), (1, 2), (441, 160), (441, 480), (147, 160), (97, 96), (96, 97), (1009, 331), (331, 1009), (64, 31), (31, 64), (500, 3)])
def test_any_pair_of_rates_equals_the_whole_table(source, target, dtype, tolerance):
    for samples in (1, 2, source - 1 or 1, source, source + 1, 3 * source + 7, 2500):
        wave = noise(2, samples, dtype)
        made, wanted = resample(wave, source, target), by_the_whole_table(wave, source, target)
        assert made.shape == wanted.shape
        assert (made - wanted).abs().max() <= tolerance


def test_clips_longer_than_one_batch_of_rows_equal_the_whole_table(monkeypatch):
    monkeypatch.setattr(resample_module, "ROWS", 3)
    wave = noise(2, 4000, torch.float64)
    for source, target in ((3, 1), (441, 160), (97, 96)):
        assert (resample(wave, source, target) - by_the_whole_table(wave, source, target)).abs().max() <= 1e-13


@pytest.mark.parametrize("target", [16000, 48000])
@pytest.mark.parametrize("source", [47999, 22254])
def test_rates_with_few_common_divisors_stay_small_and_keep_a_tone(source, target):
    """One second of stereo: the whole table alone would have 1.4 GiB and more."""
    second = torch.arange(source, dtype=torch.float64) / source
    tone = torch.sin(2 * math.pi * 440 * second).float().expand(1, 2, -1)
    made = []
    peak = peak_bytes_held(lambda: [made.append(resample(tone, source, target))])
    assert peak < 4 * MIB
    wanted = torch.sin(2 * math.pi * 440 * torch.arange(target, dtype=torch.float64) / target)
    inside = slice(target // 100, -target // 100)  # away from the silence around the clip
    assert made[0].shape == (1, 2, target) and (made[0] - wanted)[..., inside].abs().max() < 1e-3


def test_what_is_held_beside_the_waves_does_not_grow_with_the_clip():
    def beside(seconds):
        wave = torch.zeros(2, 48000 * seconds)
        return peak_bytes_held(lambda: [resample(wave, 48000, 16000)]) - 4 * 2 * seconds * (48000 + 16000)

    assert beside(120) < beside(30) + MIB
