"""The latent upscalers: a video latent of one size to one of another, before it is refined by a second sampling.

Source of the architecture: the published files and ltx_core.model.upsampler. Plain (not causal) convolutions and group
norms whose statistics span the whole clip: there is no exact way to cut it into pieces.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from .config.upscaler import UpscalerConfig
from .errors import InputError
from .finite import all_finite
from .instrument import Watch
from .shapes import Compression, VideoLatentShape

GROUPS = 32
EPS = 1e-5
HELD = 6  # copies of the widest activation that live at once


class Statistics(Protocol):
    """The video VAE's per-channel statistics, channels last (video.statistics.ChannelStatistics)."""

    def un_normalize(self, latent: torch.Tensor) -> torch.Tensor: ...

    def normalize(self, latent: torch.Tensor) -> torch.Tensor: ...


class LatentUpscaler(nn.Module):
    """Raw (not normalised) latent (B, C, t, h, w) -> (B, C, t', h', w'). Parameter names are the file's."""

    def __init__(self, config: UpscalerConfig) -> None:
        super().__init__()
        self.config = config
        channels, width = config.channels, config.width
        self.initial_conv = nn.Conv3d(channels, width, 3, padding=1)
        self.initial_norm = nn.GroupNorm(GROUPS, width, EPS)
        self.res_blocks = nn.ModuleList(_ResBlock(width) for _ in range(config.blocks))
        self.upsampler = _resampler(config)
        self.post_upsample_res_blocks = nn.ModuleList(_ResBlock(width) for _ in range(config.blocks))
        self.final_conv = nn.Conv3d(width, channels, 3, padding=1)

    @property
    def ticks(self) -> int:
        """Ticks of a `forward` of one clip."""
        return 2 * self.config.blocks + 1

    def forward(self, latent: torch.Tensor, tick=lambda: None) -> torch.Tensor:
        x = self.start(latent)
        for block in self.res_blocks:
            x = block(x)
            tick()
        x = self.enlarge(x)
        tick()
        for block in self.post_upsample_res_blocks:
            x = block(x)
            tick()
        return self.final_conv(x)

    def start(self, latent: torch.Tensor) -> torch.Tensor:
        """The latent at the model's width, normed and activated."""
        return F.silu(self.initial_norm(self.initial_conv(latent)))

    def enlarge(self, x: torch.Tensor) -> torch.Tensor:
        """Time is doubled with its first frame dropped: 2 t - 1, because latent frame 0 stands for one pixel frame."""
        if self.config.time == 1:  # frame by frame
            frames = x.shape[2]
            y = self.upsampler(x.transpose(1, 2).flatten(0, 1))
            return y.unflatten(0, (-1, frames)).transpose(1, 2)
        return shuffle(self.upsampler(x), self.config.time, int(self.config.space))[:, :, 1:]


def upscale(model: LatentUpscaler, statistics: Statistics, latent: torch.Tensor, compression: Compression, watch: Watch) -> torch.Tensor:
    """A normalised latent (B, C, t, h, w), on any device, enlarged; float32 on the CPU. The input is not changed.
    compression: of its model, for the record: what comes out, in px.

    Raises InputError for another number of channels and for values that are not finite.
    """
    config = model.config
    if latent.ndim != 5 or latent.shape[1] != config.channels or 0 in latent.shape:
        raise InputError(f"the latent to upscale is {tuple(latent.shape)}, wanted (batch, {config.channels}, t, h, w); use an LTX-2.5 video latent.")
    if not all_finite(latent):
        raise InputError("the latent to upscale has values that are not finite numbers; sample it again.")
    weight = model.final_conv.weight
    made, size = [], VideoLatentShape(config.channels, *config.size(*latent.shape[2:])).pixels(compression)
    with watch.phase("upscale", total=len(latent) * model.ticks, unit="layer", **vars(size), batch=len(latent)) as phase, torch.no_grad():
        for item in latent.split(1):
            raw = statistics.un_normalize(item.to(weight.device, torch.float32).movedim(1, -1)).movedim(-1, 1)
            up = model(raw.to(weight.dtype), phase.tick).float()
            made.append(statistics.normalize(up.movedim(1, -1)).movedim(-1, 1).contiguous().cpu())
        whole = torch.cat(made)
        if not all_finite(whole):
            raise InputError("upscale made values that are not finite (NaN or infinity); download the upscaler file again.")
    return whole


def working_bytes(config: UpscalerConfig, frames: int, height: int, width: int, itemsize: int) -> int:
    """What `upscale` holds beside the weights, about, for a latent of so many cells."""
    t, h, w = config.size(frames, height, width)
    rows = max(config.space.numerator**2 * frames * height * width, t * h * w)
    return HELD * config.width * rows * itemsize


def shuffle(x: torch.Tensor, time: int, space: int) -> torch.Tensor:
    """(B, C * time * space^2, t, h, w) -> (B, C, t * time, h * space, w * space); the channel is the slowest of a run."""
    b, _, t, h, w = x.shape
    x = x.reshape(b, -1, time, space, space, t, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(b, -1, t * time, h * space, w * space)


class _ResBlock(nn.Module):
    """The activation follows the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(width, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(GROUPS, width, EPS)
        self.conv2 = nn.Conv3d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, width, EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(y + x)


def _resampler(config: UpscalerConfig) -> nn.Module:
    if config.rational:
        return _Rational(config.width, config.space)
    space = int(config.space)
    made = config.width * config.time * space**2
    if config.time == 2:
        return nn.Sequential(nn.Conv3d(config.width, made, 3, padding=1))
    return nn.Sequential(nn.Conv2d(config.width, made, 3, padding=1), nn.PixelShuffle(space))


class _Rational(nn.Module):
    """Enlarge frames (N, C, h, w) by the numerator, then blur and keep every denominator-th row and column."""

    def __init__(self, width: int, scale: Fraction) -> None:
        super().__init__()
        self.scale = scale
        self.conv = nn.Conv2d(width, width * scale.numerator**2, 3, padding=1)
        self.blur_down = BlurDown(scale.denominator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blur_down(F.pixel_shuffle(self.conv(x), self.scale.numerator))


class BlurDown(nn.Module):
    """Every channel through the file's 5 x 5 kernel with zeros around, every `stride`-th row and column kept; 1: nothing."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("kernel", torch.empty(1, 1, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride == 1:
            return x
        return F.conv2d(x, self.kernel.expand(x.shape[1], -1, -1, -1), stride=self.stride, padding=2, groups=x.shape[1])
