"""What the audio nets are made of: convolutions over (time, frequency), causal in time, and over time alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...kernels.wide_conv import pack, pack_transpose, wide_conv, wide_conv_transpose

NORM_EPS = 1e-6
KEPT_GRAPHS = 3  # of one net: a long clip has a first, a middle and a last chunk


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
        self._packed = Derived(pack)

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
        self._packed = Derived(lambda weight: pack(weight[..., None]))

    def reset_parameters(self) -> None:
        """Nothing: weights come from a file."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda:
            weight = self.weight[..., None]
            there = None if residual is None else residual[..., None]
            return wide_conv(
                x[..., None], weight, self._packed.of(self.weight), self.bias, *self.padding, *self.dilation, there
            )[..., 0]
        y = super().forward(x)
        return y if residual is None else y + residual


class Upsample1d(nn.ConvTranspose1d):
    """(B, C, L) -> (B, O, rate * L)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel, rate, padding=(kernel - rate) // 2)
        self._packed = Derived(lambda weight, bias: pack_transpose(weight, bias, *self.stride, *self.padding))

    def reset_parameters(self) -> None:
        """Nothing: weights come from a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return wide_conv_transpose(
                x, self.weight, self._packed.of(self.weight, self.bias), self.bias, *self.stride, *self.padding
            )
        return super().forward(x)


class Derived:
    """What a module computes from its weights once, and again when they are replaced."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._sources: tuple[tuple[torch.Tensor, int], ...] = ()
        self._value: Any = None

    def of(self, *weights: torch.Tensor) -> Any:
        sources = tuple((weight, weight.data_ptr()) for weight in weights)
        if len(sources) != len(self._sources) or any(
            a[0] is not b[0] or a[1] != b[1] for a, b in zip(sources, self._sources, strict=True)
        ):
            self._sources, self._value = sources, self._make(*weights)
        return self._value


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
