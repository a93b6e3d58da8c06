"""The video encoder: frames to latents, streamed in time like the decoder.

Source of the architecture: the published file's block list. All convolutions are causal: they see two frames of the past,
the first frame repeated before the clip begins. A step that halves time first repeats frame 0 once more, for its
convolution and for the skip around it, so that 8 n + 1 frames become n + 1 latents: latent 0 is frame 0 alone.
"""

from __future__ import annotations

import logging
from collections import deque
from math import prod

import torch
from torch import nn

from ...kernels.memory import is_out_of_memory
from ..config.video_layout import EncoderConfig, Resample
from ..errors import InputError
from ..finite import all_finite
from ..instrument.watch import Phase, Watch
from ..shapes import Compression, VideoLatentShape, VideoShape
from .conv_plan import largest_tensor
from .diffusion_plan import LARGEST_TENSOR
from .frames import Activated, Convolved, FrameConv, Settled, Stage, Tapped, between_margins, take, with_margins
from .pace import Pace
from .residual import ResBlocks
from .shuffle import Stride, patchify, space_to_depth
from .statistics import ChannelStatistics

logger = logging.getLogger(__name__)

_AHEAD = 0  # no convolution sees the future
CHUNK = 4  # latent frames at a time


class Encoder(nn.Module):
    """Statistics and encoder of one file; names are the file's after its prefix."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.per_channel_statistics = ChannelStatistics(config.latent_channels)
        self.encoder = _Network(config)
        self._prepared = False

    @property
    def compression(self) -> Compression:
        return self.config.compression

    @torch.no_grad()
    def encode(self, images: torch.Tensor, watch: Watch, chunk: int = CHUNK) -> torch.Tensor:
        """One clip (F, H, W, 3) in 0..1, on any device, to its normalised latent (1, C, t, h, w) float32 on the CPU.

        Frames beyond the last 8 n + 1 are dropped from the end, as the official code does. The result is the mean of the
        encoder's distribution: nothing is drawn. `chunk`: latent frames at a time; fewer where memory runs out.
        Raises InputError for sides that are not a multiple of a cell, and where the device makes nothing of the pictures.
        """
        frames = clip_frames(images, self.compression)
        latents = (frames - 1) // self.compression.frames + 1
        grid = (side // self.compression.side for side in images.shape[1:3])
        chunk = countable_chunk(self.config, VideoLatentShape(self.config.latent_channels, latents, *grid), chunk)
        size = {"width": images.shape[2], "height": images.shape[1], "frames": frames, "batch": 1}
        with watch.phase("encode.video", total=-(-latents // chunk), unit="chunk", **size) as phase:
            while (means := self._means(images[:frames], chunk, phase)) is None:
                if chunk == 1:
                    raise torch.OutOfMemoryError(
                        "encode.video does not fit into the device's memory even with 1 latent frame at a time; "
                        "unload other models, or use smaller images."
                    )
                logger.warning("encode.video ran out of memory with %d latent frames at a time; going on with %d.", chunk, chunk // 2)
                chunk //= 2
                phase.total = phase.done + -(-latents // chunk)
        if not all_finite(means):
            raise InputError("encode.video made values that are not finite (NaN or infinity); check the images and the VAE file.")
        cells = means.flatten(0, 2)
        if len(cells) > 1 and bool((cells == cells[0]).all()):  # even of one colour they differ, by what lies around the frame
            raise InputError("encode.video made the same of every part of the pictures, so its device computes wrongly; update its driver, or use another device.")
        return self.per_channel_statistics.normalize(means).permute(3, 0, 1, 2)[None].cpu()

    def _means(self, images: torch.Tensor, chunk: int, phase: Phase) -> torch.Tensor | None:
        """(t, h, w, C) float32 on the device, not normalised; None where its memory ran out."""
        self._prepare()
        weight = self.encoder.conv_in.conv.weight
        pace, made = Pace(phase, weight.device, "chunk"), []
        try:
            stage = self._chain(_Pictures(images, self.config.patch, weight))
            for first in range(0, stage.length, chunk):
                made.append(stage.advance(min(first + chunk, stage.length), 0, 0)[..., : self.config.latent_channels])
                pace.unit()
            pace.finish()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        return torch.cat(made).float()

    def _chain(self, stage: Stage) -> Stage:
        network = self.encoder
        stage = Convolved(network.conv_in, stage, _AHEAD)
        for block in network.down_blocks:
            stage = block.around(stage, _AHEAD)
        return Settled(Convolved(network.conv_out, Activated(stage), _AHEAD))

    def _prepare(self) -> None:
        """Once, on the filled weights: channels-last memory."""
        if not self._prepared:
            self.encoder.to(memory_format=torch.channels_last_3d)
            self._prepared = True


def countable_chunk(config: EncoderConfig, latent: VideoLatentShape, chunk: int) -> int:
    """`chunk` latent frames, or as many fewer as keep every tensor within what libraries index, at least one."""
    while chunk > 1 and largest_tensor(config.mirrored, latent, chunk * config.compression.frames) > LARGEST_TENSOR:
        chunk //= 2
    return chunk


def clip_frames(images: torch.Tensor, compression: Compression) -> int:
    """How many of the frames (F, H, W, 3) are encoded; raises InputError for what cannot be."""
    if images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise InputError(f"the images have shape {tuple(images.shape)}, wanted (frames, height, width, 3).")
    frames = (images.shape[0] - 1) // compression.frames * compression.frames + 1
    VideoShape(frames, images.shape[1], images.shape[2]).check(compression)
    return frames


class _Network(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width
        self.conv_in = FrameConv(3 * config.patch**2, width)
        self.down_blocks = nn.ModuleList()
        for block in config.blocks:
            if isinstance(block, Resample):
                self.down_blocks.append(SpaceToDepth(width, block))
                width *= block.multiplier
            else:
                self.down_blocks.append(ResBlocks(width, block.layers))
        self.conv_out = FrameConv(width, config.latent_channels + 1)  # means, and one logarithm of a variance


class SpaceToDepth(nn.Module):
    """A convolution whose output is folded into a coarser grid, plus the folded input averaged over groups of channels."""

    def __init__(self, channels: int, step: Resample) -> None:
        super().__init__()
        self.stride = step.stride
        self.made = channels * step.multiplier
        self.conv = FrameConv(channels, self.made // prod(step.stride))

    def around(self, before: Stage, ahead: int) -> Stage:
        """The step as stages that read `before`."""
        before = Settled(before)
        if self.stride[0] == 2:
            before = _FirstTwice(before)
        tap: deque[torch.Tensor] = deque()
        convolved = Settled(Convolved(self.conv, Tapped(before, before.nothing.dtype, tap), ahead))
        return _Folded(convolved, tap, self.stride, self.made)


class _Folded(Stage):
    """Convolved frames folded into a coarser grid, plus the folded input with groups of channels averaged."""

    def __init__(self, convolved: Stage, tap: deque[torch.Tensor], stride: Stride, made: int) -> None:
        t, h, w = stride
        _, height, width, _ = convolved.nothing.shape
        super().__init__(convolved.length // t, convolved.nothing.new_empty(0, height // h, width // w, made))
        self._convolved = convolved
        self._tap = tap
        self._stride = stride

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        made = space_to_depth(self._convolved.advance(to * self._stride[0], 0, 0), self._stride)
        given = torch.cat(take(self._tap, made.shape[0] * self._stride[0]))
        skip = space_to_depth(given, self._stride).unflatten(-1, (made.shape[-1], -1)).mean(-1)
        return between_margins(made + skip, lead, trail)


class _FirstTwice(Stage):
    """The frames of a stage, the first one twice; read two by two, as a step that halves time does."""

    def __init__(self, before: Stage) -> None:
        super().__init__(before.length + 1, before.nothing)
        self._before = before

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        if self.at:
            return self._before.advance(to - 1, lead, trail)
        frames = self._before.advance(to - 1, lead + 1, trail)
        frames[lead] = frames[lead + 1]
        return frames


class _Pictures(Stage):
    """Images (F, H, W, 3) in 0..1 as patches in -1..1, on the device and in the dtype of `like`, brought there as they are read."""

    def __init__(self, images: torch.Tensor, patch: int, like: torch.Tensor) -> None:
        frames, height, width, channels = images.shape
        super().__init__(frames, like.new_empty(0, height // patch, width // patch, channels * patch * patch))
        self._images = images
        self._patch = patch

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        pixels = self._images[self.at : to].to(self.nothing.device)
        out = with_margins(self.nothing, lead + pixels.shape[0] + trail, 0)
        out[lead : lead + pixels.shape[0]] = patchify(pixels * 2 - 1, self._patch)
        return out
