"""What the mel encoder and decoder are made of: 2-D convolutions over (time, frequency), causal in time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

NORM_EPS = 1e-6

Tick = Callable[[], None]  # one more unit of work is done; may raise to cancel


class ResnetBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))); a 1x1 convolution on x where the width changes."""

    reach = 4  # rows of the past

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = CausalConv2d(inputs, outputs)
        self.conv2 = CausalConv2d(outputs, outputs)
        self.nin_shortcut = CausalConv2d(inputs, outputs, kernel=1) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(pixel_norm(x)))
        h = self.conv2(F.silu(pixel_norm(h)))
        return h + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class CausalConv2d(nn.Module):
    """(B, C, time, frequency); zeros on both sides in frequency, on the past side only in time."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.past = kernel - 1
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=(0, kernel // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (0, 0, self.past, 0)) if self.past else x)


class ChannelStatistics(nn.Module):
    """Mean and deviation of every (channel, bin) of a latent, index channel * bins + bin."""

    def __init__(self, channels: int, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.register_buffer("mean-of-means", torch.empty(channels * bins))
        self.register_buffer("std-of-means", torch.empty(channels * bins))

    def normalize(self, latent: torch.Tensor) -> torch.Tensor:
        """(B, C, n, bins) as the encoder makes it -> of mean 0 and deviation 1."""
        return (latent - self._map("mean-of-means")) / self._map("std-of-means")

    def denormalize(self, latent: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize`."""
        return latent * self._map("std-of-means") + self._map("mean-of-means")

    def _map(self, name: str) -> torch.Tensor:
        return self.get_buffer(name).view(-1, 1, self.bins)


def pixel_norm(x: torch.Tensor) -> torch.Tensor:
    """x over the root mean square of its channels, (B, C, time, frequency)."""
    return x / (x.square().mean(dim=1, keepdim=True) + NORM_EPS).sqrt()
