"""The latent's per-channel statistics: the diffusion model sees normalised latents, the VAE's networks raw ones."""

from __future__ import annotations

import torch
from torch import nn


class ChannelStatistics(nn.Module):
    """Mean and standard deviation of every latent channel; applied in at least float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean-of-means", torch.empty(channels))
        self.register_buffer("std-of-means", torch.empty(channels))

    def un_normalize(self, latent: torch.Tensor) -> torch.Tensor:
        """z * std + mean, channels last: (..., C)."""
        mean, std = self._wide()
        return (latent.to(mean.dtype) * std + mean).to(latent.dtype)

    def normalize(self, latent: torch.Tensor) -> torch.Tensor:
        """(z - mean) / std, channels last: (..., C)."""
        mean, std = self._wide()
        return ((latent.to(mean.dtype) - mean) / std).to(latent.dtype)

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = self._buffers["mean-of-means"], self._buffers["std-of-means"]
        wide = torch.promote_types(mean.dtype, torch.float32)
        return mean.to(wide), std.to(wide)
