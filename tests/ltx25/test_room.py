"""What does not fit into the host's memory: refused with need, free and the clip that would fit."""

import re

import pytest
import torch
from comfyui_ltx25.ltx25 import room
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.latents import attend, empty_latents
from comfyui_ltx25.ltx25.room import smaller_clip
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, VideoShape

HUGE = VideoShape(8193, 8192, 8192)


def test_an_empty_latent_no_machine_can_sample_is_refused_before_it_is_made():
    with pytest.raises(InputError, match=r"^the latent of 8192 x 8192 px and 8193 frames, 64 times, with its noise needs .* GiB of host memory, and .* are free; use batch_size 1 and at most \d+ frames at this size, or a smaller width and height\.$"):
        empty_latents(HUGE, 24.0, 64, PUBLISHED_COMPRESSION)


@pytest.mark.parametrize("free", [1 << 30, 100 << 20, 11 << 20])
def test_the_clip_named_instead_of_an_empty_latent_is_the_longest_that_fits(monkeypatch, free):
    monkeypatch.setattr(room, "host_free", lambda: free)

    def latent(frames):
        return empty_latents(VideoShape(frames, 2048, 2048), 24.0, 1, PUBLISHED_COMPRESSION)[0]

    with pytest.raises(InputError) as refused:
        latent(8193)
    frames = int(re.search(r"use at most (\d+) frames? at this size", str(refused.value))[1])
    assert latent(frames).shape[2] == (frames - 1) // 8 + 1
    with pytest.raises(InputError):
        latent(frames + 16)


@pytest.mark.parametrize(
    ("batch", "share", "words"),
    [
        (4, 0.5, "use batch_size 2"),
        (4, 0.1, "use batch_size 1 and at most 41 frames at this size, or a smaller width and height"),
        (1, 0.1, "use at most 9 frames at this size, or a smaller width and height"),
        (1, 0.5 / 121, "use a width and height of at most 512 x 352 px, and then 1 frame"),
        (1, 0.0, "use a width and height of at most 32 x 32 px, and then 1 frame"),
    ],
)
def test_what_would_fit_is_named_in_the_units_of_the_nodes(batch, share, words):
    assert smaller_clip(VideoShape(121, 512, 736), PUBLISHED_COMPRESSION, batch, share, latents=False) == words


def test_where_the_platform_does_not_say_what_is_free_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(room, "host_free", lambda: None)
    room.check_host_room("anything", 1 << 80, lambda share: "")


def test_attention_weights_of_a_long_clip_are_refused_before_their_table_is_made(monkeypatch):
    monkeypatch.setattr(room, "host_free", lambda: 4 * 4 * 12**2)
    assert attend(torch.ones(10, 10), 10, torch.ones(2)).shape == (12, 12)
    with pytest.raises(InputError, match=r"weighing the attention of 13 tokens needs 2.6 KiB of host memory, and 2.2 KiB are free; use an attention strength of 1"):
        attend(torch.ones(10, 10), 10, torch.ones(3))
