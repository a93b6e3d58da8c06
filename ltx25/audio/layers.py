"""What the audio nets are made of: convolutions over (time, frequency), causal in time, and over time alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from ...kernels.wide_conv import pack, wide_conv

NORM_EPS = 1e-6


class Tick(Protocol):
    def __call__(self, n: int = 1) -> None:
        """`n` more units of work are done; may raise to cancel."""


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
        return self.conv2(F.silu(pixel_norm(h)), x if self.nin_shortcut is None else self.nin_shortcut(x))


class CausalConv2d(nn.Module):
    """(B, C, time, frequency), plus `residual`; zeros on both sides in frequency, on the past side only in time."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.past = kernel - 1
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=(0, kernel // 2))
        self._packed = Packed()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        conv = self.conv
        if x.is_cuda:
            return wide_conv(x, conv.weight, self._packed.of(conv.weight), conv.bias, self.past, 1, residual)
        y = conv(F.pad(x, (0, 0, self.past, 0)) if self.past else x)
        return y if residual is None else y + residual


class Conv1d(nn.Conv1d):
    """(B, C, L) -> (B, O, L), zeros on both sides, plus `residual`."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2 * dilation, dilation=dilation)
        self._packed = Packed()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda:
            weight = self.weight[..., None]
            there = None if residual is None else residual[..., None]
            return wide_conv(
                x[..., None], weight, self._packed.of(weight), self.bias, *self.padding, *self.dilation, there
            )[..., 0]
        y = super().forward(x)
        return y if residual is None else y + residual


class Packed:
    """A convolution's weights in the order its kernel reads them, made on first use on a GPU; None where they do not fit."""

    def __init__(self) -> None:
        self._from: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        if self._from is None or self._from.data_ptr() != weight.data_ptr():
            self._from, self._weight = weight, pack(weight)
        return self._weight


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
