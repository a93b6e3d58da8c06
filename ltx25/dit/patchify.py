"""Latent grids to token rows and back: a reshape, patches are one latent cell (video) or one latent frame (audio)."""

from __future__ import annotations

import torch


def patchify_video(latent: torch.Tensor) -> torch.Tensor:
    """(B, C, t, h, w) -> (B, t*h*w, C), w fastest."""
    return latent.flatten(2).transpose(1, 2)


def unpatchify_video(tokens: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """(B, t*h*w, C) -> (B, C, t, h, w), `grid` = (t, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid)


def patchify_audio(latent: torch.Tensor) -> torch.Tensor:
    """(B, c, n, bins) -> (B, n, c*bins), bins fastest."""
    return latent.transpose(1, 2).flatten(2)


def unpatchify_audio(tokens: torch.Tensor, bins: int) -> torch.Tensor:
    """(B, n, c*bins) -> (B, c, n, bins)."""
    return tokens.unflatten(2, (-1, bins)).transpose(1, 2)
