"""Modules of the diffusion decoder: windowed-attention blocks, upsampling, the embedding of the noise level.

They hold the file's tensors under the file's names; attended.py runs them over frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..config.video_layout import DiffusionDecoderConfig, Resample
from .frames import wide

EPS = 1e-6
_SINUSOIDS = 256
_CHUNKS = 7  # scale, shift, gate of attention; the same of the MLP; gate of the context: gates are not used
_SCALE_ATTENTION, _SHIFT_ATTENTION, _SCALE_MLP, _SHIFT_MLP = 0, 1, 3, 4


@dataclass(frozen=True)
class Affine:
    """What follows a norm: (C,) gain and, where the noise level is known, shift."""

    gain: torch.Tensor
    shift: torch.Tensor | None


class Gain(nn.Module):
    """The weight of an RMS norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))


class WindowAttention(nn.Module):
    """Fused q, k, v rows; per-head norms; output projection."""

    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(channels, 3 * channels)
        self.q_norm = Gain(head_dim)
        self.k_norm = Gain(head_dim)
        self.proj = nn.Linear(channels, channels)
        self.bound: float | None = None  # no score is larger; see `bound_scores`

    def gains(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(d,) each, float32 or wider; the scale head_dim^-0.5 of the scores is part of the first."""
        q, k = (wide(norm.weight) for norm in (self.q_norm, self.k_norm))
        return q * self.head_dim**-0.5, k


class GatedMLP(nn.Module):
    """SwiGLU without biases; four times the width, rounded up to 16."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = -(-4 * channels // 16) * 16
        self.w_gate = nn.Linear(channels, hidden, bias=False)
        self.w_up = nn.Linear(channels, hidden, bias=False)
        self.w_down = nn.Linear(hidden, channels, bias=False)


class ContextBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = Gain(channels)
        self.norm2 = Gain(channels)
        self.attn = WindowAttention(channels, head_dim)
        self.mlp = GatedMLP(channels)

    def affines(self) -> tuple[Affine, Affine]:
        """What follows norm1 and norm2."""
        return Affine(wide(self.norm1.weight), None), Affine(wide(self.norm2.weight), None)


class PixelBlock(ContextBlock):
    """x += projected context; then a ContextBlock whose norms are modulated by the noise level."""

    def __init__(self, channels: int, head_dim: int, gates: bool) -> None:
        super().__init__(channels, head_dim)
        self.context_proj = nn.Linear(channels, channels)
        self.scale_shift_table = nn.Parameter(torch.empty(_CHUNKS, channels))
        if gates:
            self.gate_msa, self.gate_mlp, self.gate_ctx = (nn.Parameter(torch.empty(channels)) for _ in range(3))

    def modulated(self, modulation: torch.Tensor) -> tuple[Affine, Affine]:
        """`affines` at one noise level: RMS(x) * weight * (1 + scale) + shift. modulation (7, C), wide."""
        rows = modulation + wide(self.scale_shift_table)
        first = Affine(wide(self.norm1.weight) * (1 + rows[_SCALE_ATTENTION]), rows[_SHIFT_ATTENTION])
        second = Affine(wide(self.norm2.weight) * (1 + rows[_SCALE_MLP]), rows[_SHIFT_MLP])
        return first, second

    def fold_gates(self) -> None:
        """Multiply the static gates of older files into the linears they follow, in float32 or wider.

        A gate goes with its linear, so that where memory runs out between two of them the next call folds those that are left.
        """
        for name, linear in (("gate_msa", self.attn.proj), ("gate_mlp", self.mlp.w_down), ("gate_ctx", self.context_proj)):
            gate = getattr(self, name, None)
            if gate is None:
                continue
            weight = (wide(gate)[:, None] * wide(linear.weight)).to(linear.weight.dtype)
            if linear.bias is not None:
                linear.bias.data = (wide(gate) * wide(linear.bias)).to(linear.bias.dtype)
            linear.weight.data = weight
            delattr(self, name)


class Upsample(nn.Module):
    """A linear to more channels, to be unfolded into a finer grid."""

    def __init__(self, channels: int, step: Resample) -> None:
        super().__init__()
        self.stride = step.stride
        self.proj = nn.Linear(channels, channels * math.prod(step.stride) // step.multiplier)


class NoiseLevel(nn.Module):
    """Noise level t in (0, 1] -> embedding: cosines and sines of `scale` * t, a two-layer MLP."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.mlp = nn.Sequential(nn.Linear(_SINUSOIDS, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """(N,) float32 on the CPU -> (N, width), computed wide."""
        half = _SINUSOIDS // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
        angles = (self.scale * t)[:, None] * frequencies
        x = torch.cat((angles.cos(), angles.sin()), dim=-1)
        first, _, second = self.mlp
        return wide_linear(F.silu(wide_linear(x, first)), second)


class Modulation(nn.Module):
    """Embedding of the noise level -> (7, C) added to every block's own table."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, _CHUNKS * channels)

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        """(N, width) -> (N, 7, C)."""
        return wide_linear(F.silu(embedding), self.proj).unflatten(-1, (_CHUNKS, -1))


class Network(nn.Module):
    """All of `decoder.*`: stages that make the context, and the stage that denoises pixels."""

    def __init__(self, config: DiffusionDecoderConfig) -> None:
        super().__init__()
        *context, pixels = config.channels
        cells = 3 * config.patch**2
        self.conv_in = nn.Linear(config.latent_channels, context[0])
        self.det_stages = nn.ModuleList(
            nn.ModuleList(ContextBlock(channels, config.head_dim) for _ in range(depth))
            for channels, depth in zip(context, config.depths[:-1], strict=True)
        )
        self.upsamples = nn.ModuleList(Upsample(channels, step) for channels, step in zip(context, config.upsamples, strict=True))
        self.t_embedder = NoiseLevel(config.time_width, config.time_scale)
        self.conv_in_x_t = nn.Linear(cells, pixels)
        self.shared_adaln = Modulation(pixels, config.time_width)
        self.diff_blocks = nn.ModuleList(PixelBlock(pixels, config.head_dim, config.gates) for _ in range(config.depths[-1]))
        self.norm_out = Gain(pixels)
        self.conv_out = nn.Linear(pixels, cells)


def bound_scores(attentions: list[WindowAttention]) -> None:
    """Note how large scores can get: normed q and k are no longer than sqrt(head_dim) times their largest gain."""
    if attentions[0].q_norm.weight.device.type == "meta":
        return
    largest = torch.stack([attn.head_dim * torch.stack([gain.abs().max() for gain in attn.gains()]).prod() for attn in attentions])
    for attn, bound in zip(attentions, largest.tolist(), strict=True):
        attn.bound = bound


def wide_linear(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """A small product with widened weights."""
    weight = wide(linear.weight)
    return F.linear(x.to(weight), weight, wide(linear.bias))
