"""The convolutional video decoder: latent (1, C, t, h, w) to frames, streamed in time.

Source of the architecture: the published file's block list (residual stacks and depth-to-space steps, applied in
reverse of how the file lists them), non-causal convolutions that repeat the first and last frame, zeros around the
picture. Frames are pulled from the end of the chain (frames.py), so what is in memory depends on the chunk length and
not on the clip, and a streamed decode computes exactly the sums of an unstreamed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
from torch import nn

from ..config.video_layout import ConvDecoderConfig, Resample
from ..instrument.watch import Phase
from ..shapes import Compression, VideoLatentShape
from .conv_plan import ConvPlan, conv_plan, usual_chunk
from .frames import Activated, Convolved, FrameConv, Given, Settled, Stage, Unfolded
from .output import Part
from .pace import Pace
from .residual import ResBlocks
from .shuffle import Reordered, patch_run_order, run_order
from .statistics import ChannelStatistics

_AHEAD = 1  # every convolution sees one frame on either side


class ConvDecoder(nn.Module):
    """Statistics and convolutional decoder of one file; names are the file's after its prefix."""

    def __init__(self, config: ConvDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.per_channel_statistics = ChannelStatistics(config.latent_channels)
        self.decoder = _Network(config)
        self._reordered, self._prepared = Reordered(), False

    @torch.no_grad()
    def stream(self, latent: torch.Tensor, chunk_frames: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode one normalised latent (1, C, t, h, w) in chunks of `chunk_frames` frames (the last may be shorter).

        Yields (index of the first frame, frames (f, H, W, 3) on the latent's device, about -1..1, not clamped).
        Any chunk length gives the same numbers within 2e-6 in float32.
        """
        self._prepare()
        stage = self._chain(latent)
        for first in range(0, stage.length, chunk_frames):
            yield first, stage.advance(min(first + chunk_frames, stage.length), 0, 0)

    @property
    def compression(self) -> Compression:
        return self.config.compression

    @property
    def latent_channels(self) -> int:
        return self.config.latent_channels

    def plan(self, shape: VideoLatentShape, tiling: str, free: int | None) -> ConvPlan:
        """Streaming is exact, so `tiling` changes nothing: only the chunk length follows the memory."""
        return self._plan(shape, free, usual_chunk(self.decoder.conv_in.conv.weight.device.type))

    def smaller(self, shape: VideoLatentShape, plan: ConvPlan) -> ConvPlan | None:
        return self._plan(shape, None, plan.chunk // 2) if plan.chunk > 1 else None

    def _plan(self, shape: VideoLatentShape, free: int | None, chunk: int) -> ConvPlan:
        return conv_plan(self.config, shape, free, self.decoder.conv_in.conv.weight.dtype.itemsize, chunk)

    def parts(self, latent: torch.Tensor, plan: ConvPlan, seed: int, phase: Phase) -> Iterator[Part]:
        """`stream`, reported chunk by chunk; there is no noise, so `seed` changes nothing."""
        pace = Pace(phase, latent.device, "chunk")
        for first, frames in self.stream(latent, plan.chunk):
            yield Part(first, 0, 0, frames)
            pace.unit()
        pace.finish()

    def _chain(self, latent: torch.Tensor) -> Stage:
        network, patch = self.decoder, self.config.patch
        frames = latent[0].permute(1, 2, 3, 0).to(network.conv_in.conv.weight.dtype)
        stage: Stage = Convolved(network.conv_in, Given(self.per_channel_statistics.un_normalize(frames)), _AHEAD)
        for block in network.up_blocks:
            if isinstance(block, DepthToSpace):
                stage = Unfolded(Convolved(block.conv, Settled(stage), _AHEAD), block.stride)
            else:
                stage = block.around(stage, _AHEAD)
        return Unfolded(Convolved(network.conv_out, Activated(stage), _AHEAD), (1, patch, patch))

    def _prepare(self) -> None:
        """Once, on the filled weights: channels-last memory, and run order where the output is unfolded.

        Where memory runs out inside, the next call goes on from there.
        """
        if self._prepared:
            return
        for block in self.decoder.up_blocks:
            if isinstance(block, DepthToSpace):
                self._reordered.each(block.conv.conv, partial(run_order, stride=block.stride))
        self._reordered.each(self.decoder.conv_out.conv, partial(patch_run_order, patch=self.config.patch))
        self.decoder.to(memory_format=torch.channels_last_3d)
        self._prepared = True


class _Network(nn.Module):
    def __init__(self, config: ConvDecoderConfig) -> None:
        super().__init__()
        width = config.bottleneck
        self.conv_in = FrameConv(config.latent_channels, width)
        self.up_blocks = nn.ModuleList()
        for block in config.blocks:
            if isinstance(block, Resample):
                self.up_blocks.append(DepthToSpace(width, block))
                width //= block.multiplier
            else:
                self.up_blocks.append(ResBlocks(width, block.layers))
        self.conv_out = FrameConv(width, 3 * config.patch**2)


class DepthToSpace(nn.Module):
    """A convolution to more channels, unfolded into a finer grid; a doubled time axis loses its first frame."""

    def __init__(self, channels: int, step: Resample) -> None:
        super().__init__()
        self.stride = step.stride
        self.conv = FrameConv(channels, channels // step.multiplier * prod(step.stride))
