"""Log mel -> latent: the encoding half of the audio VAE."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..config.audio import CHANNELS, MelVAEConfig
from ..instrument import Tick
from ..shapes import MEL_PER_LATENT
from .layers import CausalConv2d, ResnetBlock, pixel_norm
from .spans import spans

CHUNK = 512  # mel frames (5 s) encoded at once; a multiple of 4


class MelEncoder(nn.Module):
    """Log mel (B, 2, T, bins) -> (B, C, ceil(T / 4), bins / 4): the mean of the posterior, not normalised."""

    def __init__(self, config: MelVAEConfig) -> None:
        super().__init__()
        widths = [config.width * multiplier for multiplier in config.multipliers]
        self.conv_in = CausalConv2d(CHANNELS, config.width)
        self.down = nn.ModuleList(
            _Level(widths[max(i - 1, 0)] if i else config.width, width, config.blocks, downsample=i < len(widths) - 1)
            for i, width in enumerate(widths)
        )
        self.mid = nn.ModuleDict({name: ResnetBlock(widths[-1], widths[-1]) for name in ("block_1", "block_2")})
        self.conv_out = CausalConv2d(widths[-1], 2 * config.latent_channels)  # mean, then logarithm of the variance

    @property
    def reach(self) -> int:
        """Mel frames of the past that a latent frame depends on, rounded up to whole latent frames."""
        rows, scale = self.conv_in.past, 1
        for level in self.down:
            rows += scale * sum(block.reach for block in level.block)
            if level.downsample is not None:
                rows += scale * 2
                scale *= 2
        rows += scale * (sum(block.reach for block in self.mid.values()) + self.conv_out.past)
        return -(-(rows + MEL_PER_LATENT) // MEL_PER_LATENT) * MEL_PER_LATENT

    @property
    def ticks(self) -> int:
        """Ticks per chunk."""
        return len(self.mid) + sum(len(level.block) for level in self.down)

    def chunks(self, mel_frames: int) -> int:
        return -(-mel_frames // CHUNK)

    def encode(self, mel: torch.Tensor, tick: Tick) -> torch.Tensor:
        """`forward` in bounded memory: equal to it, because the past each chunk depends on is computed again."""
        pieces = []
        for span in spans(mel.shape[2], CHUNK, self.reach, 0):
            latent = self(mel[:, :, span.first : span.last], tick)
            pieces.append(latent[:, :, (span.start - span.first) // MEL_PER_LATENT :])
        return torch.cat(pieces, dim=2)

    def forward(self, mel: torch.Tensor, tick: Tick) -> torch.Tensor:
        h = self.conv_in(mel)
        for level in self.down:
            h = level(h, tick)
        for block in self.mid.values():
            h = block(h)
            tick()
        return self.conv_out(F.silu(pixel_norm(h))).chunk(2, dim=1)[0]


class _Level(nn.Module):
    """Residual blocks, then (except at latent resolution) the downsampling."""

    def __init__(self, inputs: int, width: int, blocks: int, downsample: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(inputs if i == 0 else width, width) for i in range(blocks))
        self.downsample = _Downsample(width) if downsample else None

    def forward(self, h: torch.Tensor, tick: Tick) -> torch.Tensor:
        for block in self.block:
            h = block(h)
            tick()
        return h if self.downsample is None else self.downsample(h)


class _Downsample(nn.Module):
    """Every second row and bin; two rows of zeros before the clip, one bin of zeros above the band."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(h, (0, 1, 2, 0)))
