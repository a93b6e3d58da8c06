"""Latents that cannot be what they say they are get a notice, and ordinary ones none."""

from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.engine import Engine, Options
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.parts import TRANSFORMER
from comfyui_ltx25.ltx25.plausible import doubts
from comfyui_ltx25.ltx25.schedule import sigmas_of
from comfyui_ltx25.tests.support.engine import CPU, engine, files, job
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

SIZES = [(1, 2, 3), (3, 4, 6), (16, 22, 40)]


def noise(*size, seed=0):
    return torch.randn(1, 128, *size, generator=torch.Generator().manual_seed(seed))


def smooth(*size):
    """What latents of pictures are like: channel means of their own, and neighbours half alike."""
    grown = functional.interpolate(noise(*(max(1, side // 2) for side in size)), size=size, mode="trilinear")
    return grown / grown.square().mean().sqrt()


@pytest.fixture(scope="module")
def tiny():
    return engine()


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("seed", range(10))
def test_n12_a_latent_that_was_not_denoised_is_told(size, seed):
    (notice,) = doubts(noise(*size, seed=seed))
    assert "looks like noise: wrong VAE or text encoder pair" in notice


@pytest.mark.parametrize("size", SIZES)
def test_n12_ordinary_latents_are_not(size):
    flat = noise(1, 1, 1).expand(1, 128, *size)
    for latent in (smooth(*size), flat, 0.5 * flat + 0.2 * noise(*size)):
        assert doubts(latent) == ()


def test_n12_too_little_to_tell_is_not_told():
    assert doubts(noise(1, 1, 1)) == doubts(noise(1, 1, 2)) == ()


def test_n12_a_transformer_that_does_nothing_is_told_after_sampling():
    own = engine()
    clip = job(own, frames=4)
    assert not any("noise" in notice for notice in own.sample(clip, Watch()).notices)
    dit = own.opened.parts[TRANSFORMER]["dit"]
    with torch.inference_mode():
        for value in (*dit.proj_out.parameters(), *dit.audio_proj_out.parameters()):
            value.zero_()
    assert any("looks like noise" in notice for notice in own.sample(clip, Watch()).notices)
    half = replace(clip, sigmas=(1.0, 0.5))
    kept = replace(clip, video=noise(4, 2, 3), video_mask=torch.zeros(1, 1, 4, 2, 3))
    for other in (half, kept):  # meant to be noisy, or what the user gave
        assert not any("looks like noise" in notice for notice in own.sample(other, Watch()).notices)


@pytest.mark.parametrize(("schedule", "sampler"), [("distilled", "auto"), ("ltx2", "euler"), ("ltx2", "res_2s")])
@pytest.mark.parametrize("frames", [2, 4])
def test_n12_random_weights_are_not_taken_for_noise(tiny, schedule, sampler, frames):
    clip = job(tiny, frames=frames, sigmas=sigmas_of(schedule, 4), schedule=schedule, sampler=sampler)
    assert not any("noise" in notice or "spread" in notice for notice in tiny.sample(clip, Watch()).notices)


@pytest.mark.parametrize("factor", [20.0, 0.02])
def test_n12_a_latent_of_a_vae_with_other_statistics_is_told(tiny, tmp_path, factor):
    """A picture encoded by a file whose per-channel statistics are others."""
    with safe_open(files().video_vae, "pt") as vae:
        tensors, metadata = {name: vae.get_tensor(name) for name in vae.keys()}, vae.metadata()  # noqa: SIM118
    for name in tensors:
        if name.endswith("std-of-means"):
            tensors[name] = tensors[name] * factor
    other = tmp_path / files().video_vae.name
    save_file(tensors, other, metadata)
    swapped = Engine.open(replace(files(), video_vae=other), Options("auto", "auto", "auto", "memory"), CPU)
    picture = torch.rand(9, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    right, wrong = (e.encode_video(picture, Watch()) for e in (tiny, swapped))
    assert doubts(right) == ()
    (notice,) = doubts(wrong)
    assert "another VAE" in notice
