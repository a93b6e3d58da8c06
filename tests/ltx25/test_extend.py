"""Longer clips: one clock for both streams, what was there kept."""

import pytest
import torch
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.extend import extend
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION

VIDEO, AUDIO = torch.randn(2, 128, 3, 2, 3), torch.randn(2, 8, 18, 16)


@pytest.mark.parametrize("rate", [24.0, 25.0, 23.976, 48.0])
def test_a13_sound_grows_with_the_picture(rate):
    longer = extend(VIDEO, AUDIO, None, None, 16, rate, PUBLISHED_COMPRESSION)
    assert longer.video.shape == (2, 128, 5, 2, 3) and longer.audio.shape == (2, 8, max(18, round(33 / rate * 25)), 16)
    assert torch.equal(longer.video[:, :, :3], VIDEO) and torch.equal(longer.audio[:, :, :18], AUDIO)
    assert not longer.video[:, :, 3:].any() and not longer.audio[:, :, 18:].any()
    assert longer.video_mask[0, 0, :, 0, 0].tolist() == [0, 0, 0, 1, 1]
    assert longer.audio_mask.shape[2] == longer.audio.shape[2] and longer.audio_mask[0, 0, :, 0].tolist()[:19].count(0) == 18


def test_masks_that_were_there_still_hold():
    mask = torch.zeros(1, 1, 3, 1, 1)
    mask[:, :, 1] = 1
    assert extend(VIDEO, None, mask, None, 8, 24.0, PUBLISHED_COMPRESSION).video_mask[0, 0, :, 1, 1].tolist() == [0, 1, 0, 1]


def test_video_alone_stays_alone():
    longer = extend(VIDEO, None, None, None, 8, 24.0, PUBLISHED_COMPRESSION)
    assert longer.audio is None and longer.audio_mask is None


@pytest.mark.parametrize("frames", [0, 7, 12, -8])
def test_only_whole_latent_frames_are_added(frames):
    with pytest.raises(InputError, match="multiple of 8"):
        extend(VIDEO, AUDIO, None, None, frames, 24.0, PUBLISHED_COMPRESSION)
