"""Latent -> log mel: the decoding half of the audio VAE."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..config.audio import CHANNELS, MelVAEConfig
from ..instrument import Tick
from ..replay import Replay
from ..shapes import MEL_PER_LATENT
from .layers import KEPT_GRAPHS, CausalConv2d, ResnetBlock, pixel_norm
from .spans import spans

CHUNK = 128  # latent frames (5 s) decoded at once


class MelDecoder(nn.Module):
    """(B, C, n, bins) as the encoder made it (not normalised) -> log mel (B, 2, 4 n - 3, 4 bins).

    Every upsampling repeats rows and bins, then drops the first row: n -> 2 n - 1, which undoes the encoder's padding.
    """

    def __init__(self, config: MelVAEConfig) -> None:
        super().__init__()
        widths = [config.width * multiplier for multiplier in config.multipliers]
        self.conv_in = CausalConv2d(config.latent_channels, widths[-1])
        self.mid = nn.ModuleDict({name: ResnetBlock(widths[-1], widths[-1]) for name in ("block_1", "block_2")})
        levels = []
        for i, width in enumerate(widths):
            above = widths[min(i + 1, len(widths) - 1)]
            levels.append(_Level(above, width, config.blocks + 1, upsample=i > 0))
        self.up = nn.ModuleList(levels)
        self.conv_out = CausalConv2d(widths[0], CHANNELS)
        self._replay = Replay("the mel decoder", KEPT_GRAPHS)

    @property
    def reach(self) -> int:
        """Latent frames of the past that an output row depends on (never on the future)."""
        rows = self.conv_in.past + sum(block.reach for block in self.mid.values())
        scale, total = 1, float(rows)
        for level in reversed(self.up):
            total += sum(block.reach for block in level.block) / scale
            if level.upsample is not None:
                scale *= 2
                total += (level.upsample.conv.past + 1) / scale  # and the dropped row
        return int(total + self.conv_out.past / scale) + 1

    def chunks(self, frames: int) -> int:
        return -(-frames // CHUNK)

    @property
    def ticks(self) -> int:
        """Ticks per chunk."""
        return len(self.mid) + sum(len(level.block) for level in self.up)

    def decode(self, latent: torch.Tensor, tick: Tick) -> torch.Tensor:
        """`forward` in bounded memory: equal to it, because the past each chunk depends on is computed again."""
        pieces = []
        for span in spans(latent.shape[2], CHUNK, self.reach, 0):
            mel = self._replay(self, (latent[:, :, span.first : span.last],), tick, self.ticks)
            row = max(0, MEL_PER_LATENT * (span.start - span.first) - (MEL_PER_LATENT - 1))
            pieces.append(mel[:, :, row:])
        return torch.cat(pieces, dim=2)

    def forward(self, latent: torch.Tensor, tick: Tick) -> torch.Tensor:
        h = self.conv_in(latent)
        for block in self.mid.values():
            h = block(h)
            tick()
        for level in reversed(self.up):
            h = level(h, tick)
        return self.conv_out(F.silu(pixel_norm(h)))


class _Level(nn.Module):
    """Residual blocks, then (except at mel resolution) the upsampling."""

    def __init__(self, inputs: int, width: int, blocks: int, upsample: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(inputs if i == 0 else width, width) for i in range(blocks))
        self.upsample = _Upsample(width) if upsample else None

    def forward(self, h: torch.Tensor, tick: Tick) -> torch.Tensor:
        for block in self.block:
            h = block(h)
            tick()
        return h if self.upsample is None else self.upsample(h)


class _Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = CausalConv2d(width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(h, scale_factor=2.0, mode="nearest"))[:, :, 1:]
