"""How many frames the convolutional decoder makes at a time, and what that costs in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..config.video_layout import ConvDecoderConfig, Resample
from ..shapes import VideoLatentShape

_CHUNK = 32  # frames at a time on a GPU, where larger pieces run faster
_CHUNK_ELSEWHERE = 8  # where a chunk takes seconds, smaller ones show progress and take a cancel sooner
_LIVE = 3.3  # tensors of one residual block alive at once: skip, input and output of a convolution, and its workspace


@dataclass(frozen=True)
class ConvPlan:
    """Decode `frames` frames in chunks of `chunk`; bytes: estimated working memory, weights excluded."""

    frames: int
    chunk: int
    bytes: int

    @property
    def units(self) -> int:
        return -(-self.frames // self.chunk)

    @property
    def tiles(self) -> int:
        return 1

    @property
    def text(self) -> str:
        return f"{self.chunk} frames at a time"


def usual_chunk(device: str) -> int:
    """Frames at a time where memory allows, on a device of this type."""
    return _CHUNK if device == "cuda" else _CHUNK_ELSEWHERE


def conv_plan(config: ConvDecoderConfig, shape: VideoLatentShape, free: int | None, itemsize: int, chunk: int) -> ConvPlan:
    """Chunks of at most `chunk` frames that fit into `free` bytes, or of one frame where none do."""
    frames = shape.pixels(config.compression).frames
    while True:
        plan = ConvPlan(frames, chunk, peak_bytes(config, shape, chunk, itemsize))
        if chunk == 1 or free is None or plan.bytes <= free:
            return plan
        chunk //= 2


def peak_bytes(config: ConvDecoderConfig, shape: VideoLatentShape, chunk: int, itemsize: int) -> int:
    """Working memory of a streamed decode, weights excluded: the largest of what each block needs for its first pull.

    The first pull is the largest: every convolution then reads one frame more than it makes.
    """
    peaks = []
    frames = min(chunk, shape.pixels(config.compression).frames)
    height, width = shape.height * prod(_strides(config, 1)), shape.width * prod(_strides(config, 2))
    channels = config.width
    peaks.append(frames * height * width * (3 * config.patch**2 * 3 * (itemsize + 4) / itemsize))  # frames, mapped
    frames += 1
    for block in reversed(config.blocks):
        if isinstance(block, Resample):
            t, h, w = block.stride
            made = frames * height * width * channels
            frames, height, width, channels = (frames + t - 1) // t + 1, height // h, width // w, channels * block.multiplier
            peaks.append(2 * made + frames * height * width * channels)
        else:
            frames += 2 * block.layers
            peaks.append(_LIVE * frames * height * width * channels)
    return int(max(peaks) * itemsize)


def _strides(config: ConvDecoderConfig, axis: int) -> list[int]:
    return [block.stride[axis] for block in config.blocks if isinstance(block, Resample)]
