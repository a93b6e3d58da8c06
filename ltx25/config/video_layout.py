"""The layout of a video VAE as plain values: blocks of the convolutional parts, stages of the diffusion decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..shapes import Compression


@dataclass(frozen=True)
class ResStack:
    """`layers` residual blocks of equal width."""

    layers: int


@dataclass(frozen=True)
class Resample:
    """A change of grid by `stride` (t, h, w); the width is multiplied (encoder) or divided (decoder) by `multiplier`."""

    stride: tuple[int, int, int]
    multiplier: int


Block = ResStack | Resample


@dataclass(frozen=True)
class EncoderConfig:
    """`width`: channels after the first convolution; `blocks` in the order they are applied."""

    latent_channels: int
    width: int
    patch: int
    blocks: tuple[Block, ...]

    @property
    def compression(self) -> Compression:
        """Pixels per latent cell."""
        return _compression(self.patch, self.blocks)

    @property
    def mirrored(self) -> ConvDecoderConfig:
        """The decoder whose blocks, read from the pixels' end, are these: it holds as much."""
        return ConvDecoderConfig(self.latent_channels, self.width, self.patch, self.blocks[::-1])


@dataclass(frozen=True)
class ConvDecoderConfig:
    """`width`: channels before the last convolution; `blocks` in the order they are applied (files list them reversed)."""

    latent_channels: int
    width: int
    patch: int
    blocks: tuple[Block, ...]

    @property
    def bottleneck(self) -> int:
        """Channels after the first convolution."""
        return self.width * prod(block.multiplier for block in self.blocks if isinstance(block, Resample))

    @property
    def compression(self) -> Compression:
        """Pixels per latent cell."""
        return _compression(self.patch, self.blocks)


@dataclass(frozen=True)
class DiffusionDecoderConfig:
    """Neighbourhood-attention decoder: all stages but the last make a context, the last denoises pixels.

    channels, depths, kernels: one entry per stage; kernels are windows (t, h, w).
    upsamples: between the stages, `multiplier` divides the channels.
    output: what the network predicts, "x0" or "v"; steps: denoising steps the file asks for.
    gates: the file holds the static gates of older training runs, to be folded into the linears.
    """

    latent_channels: int
    patch: int
    head_dim: int
    channels: tuple[int, ...]
    depths: tuple[int, ...]
    kernels: tuple[tuple[int, int, int], ...]
    upsamples: tuple[Resample, ...]
    time_width: int
    time_scale: float
    steps: int
    output: str
    gates: bool

    @property
    def compression(self) -> Compression:
        """Pixels per latent cell."""
        return _compression(self.patch, self.upsamples)


@dataclass(frozen=True)
class VideoVAEConfig:
    """`prefix` is put before every tensor name ("" or "vae.")."""

    prefix: str
    encoder: EncoderConfig
    decoder: ConvDecoderConfig | DiffusionDecoderConfig

    @property
    def compression(self) -> Compression:
        """Pixels per latent cell, equal for both directions."""
        return self.decoder.compression


def _compression(patch: int, blocks: Sequence[Block]) -> Compression:
    """From the strides of the blocks, which treat both sides alike (see video.py)."""
    strides = [block.stride for block in blocks if isinstance(block, Resample)]
    return Compression(frames=prod(stride[0] for stride in strides), side=patch * prod(stride[1] for stride in strides))
