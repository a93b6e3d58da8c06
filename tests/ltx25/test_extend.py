"""Longer clips: one clock for both streams, what was there kept."""

import pytest
import torch
from comfyui_ltx25.ltx25.conditions import AttentionStrength, Frozen, Image, KeyframeIndex, TemporalRegions
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.extend import extend, settled
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


def grown(conditions, video_mask=None, audio_mask=None):
    """Video masks by latent frame and audio masks by latent frame of a clip that keeps `conditions` and grows by 8 frames."""
    kept = settled(conditions, VIDEO, AUDIO, video_mask, audio_mask, 17, 24.0, PUBLISHED_COMPRESSION)
    longer = extend(VIDEO, AUDIO, kept.video_mask, kept.audio_mask, 8, 24.0, PUBLISHED_COMPRESSION)
    return kept.conditions, longer.video_mask[0, 0, :, 1, 1].tolist(), longer.audio_mask[0, 0, :, 1].tolist()


@pytest.mark.parametrize("stream, old, new", [("video", 3, 1), ("audio", 18, 8)])
def test_a_kept_stream_is_kept_as_far_as_it_goes_and_made_from_there(stream, old, new):
    """Also where a mask would make it: what is kept as a whole is not made in parts."""
    rest = KeyframeIndex(VIDEO[:, :, :1], 9, 1.0, 1)
    masks = {f"{stream}_mask": torch.ones(1, 1, *(VIDEO if stream == "video" else AUDIO).shape[2:])}
    items, *both = grown((Frozen(stream), rest), **masks)
    assert items == (rest,)
    assert both[stream == "audio"] == [0.0] * old + [1.0] * new


def test_what_stands_at_a_frame_from_the_end_stays_there_where_the_clip_becomes_longer():
    """A loop's last frame is that of the clip, not of the padding behind it, which is cut away; so in what wraps it."""
    loop, picture = KeyframeIndex(VIDEO[:, :, :1], -1, 1.0, 1), Image(VIDEO[:, :, :1], -17, 1.0)
    (looped, shown, wrapped), *_ = grown((loop, picture, AttentionStrength(AttentionStrength(loop, 0.5), 0.25)))
    assert (looped.frame, shown.frame, wrapped.item.item.frame) == (16, 0, 16)
    assert looped.latent is loop.latent and (wrapped.attention, wrapped.item.attention) == (0.25, 0.5)


def test_stretches_of_a_clip_that_grows_are_made_beside_what_is_added():
    """Several of one stream add up, and a mask that was there still holds in them."""
    items = (TemporalRegions("video", ((0.0, 0.02),)), TemporalRegions("video", ((0.5, 0.6),)), TemporalRegions("audio", ((0.0, 0.005),)))
    mask = torch.zeros(1, 1, 3, 1, 1)
    mask[:, :, 1:] = 1
    assert grown(items) == ((), [1.0, 0.0, 1.0, 1.0], [1.0] + [0.0] * 17 + [1.0] * 8)
    assert grown(items, video_mask=mask)[1] == [0.0, 0.0, 1.0, 1.0]


def test_a_mask_of_pixels_grows_like_one_of_the_latent():
    mask = torch.zeros(1, 64, 96)
    mask[:, 32:, 32:64] = 1
    assert extend(VIDEO, None, mask, None, 8, 24.0, PUBLISHED_COMPRESSION).video_mask[0, 0, 2].tolist() == [[0, 0, 0], [0, 1, 0]]


def test_video_alone_stays_alone():
    longer = extend(VIDEO, None, None, None, 8, 24.0, PUBLISHED_COMPRESSION)
    assert longer.audio is None and longer.audio_mask is None


@pytest.mark.parametrize("frames", [0, 7, 12, -8])
def test_only_whole_latent_frames_are_added(frames):
    with pytest.raises(InputError, match="multiple of 8"):
        extend(VIDEO, AUDIO, None, None, frames, 24.0, PUBLISHED_COMPRESSION)
