"""How many frames the convolutional decoder makes at a time, and what that costs in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..config.video_layout import ConvDecoderConfig, Resample
from ..shapes import VideoLatentShape
from .diffusion_plan import LARGEST_TENSOR, SLACK

_CHUNK = 32  # frames at a time on a GPU, where larger pieces run faster
_CHUNK_ELSEWHERE = 8  # where a chunk takes seconds, smaller ones show progress and take a cancel sooner
_LIVE = 3.05  # tensors of one residual block alive at once: skip, input and output of a convolution


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
    def text(self) -> str:
        return f"{self.chunk} frames at a time"


def usual_chunk(device: str) -> int:
    """Frames at a time where memory allows, on a device of this type."""
    return _CHUNK if device == "cuda" else _CHUNK_ELSEWHERE


def conv_plan(config: ConvDecoderConfig, shape: VideoLatentShape, free: int | None, itemsize: int, chunk: int) -> ConvPlan:
    """Chunks of at most `chunk` frames that fit into `free` bytes and into what libraries index, or of one frame where none do."""
    frames = shape.pixels(config.compression).frames
    chunk = _countable(config, shape, chunk)
    while True:
        plan = ConvPlan(frames, chunk, peak_bytes(config, shape, chunk, itemsize))
        if chunk == 1 or free is None or plan.bytes * SLACK <= free:
            return plan
        chunk //= 2


def _countable(config: ConvDecoderConfig, shape: VideoLatentShape, chunk: int) -> int:
    """`chunk`, halved until no tensor has more than LARGEST_TENSOR elements, at least one frame."""
    while chunk > 1 and largest_tensor(config, shape, chunk) > LARGEST_TENSOR:
        chunk //= 2
    return chunk


def largest_tensor(config: ConvDecoderConfig, shape: VideoLatentShape, chunk: int) -> int:
    """Elements of the largest input or output of a convolution in the first pull, which makes the most frames of every block."""
    length = shape.pixels(config.compression).frames
    frames = min(chunk, length)
    height, width = shape.height * prod(_strides(config, 1)), shape.width * prod(_strides(config, 2))
    channels = config.width
    largest = (frames + 2) * height * width * channels  # what the last convolution reads, with a frame on either side
    frames = min(frames + 1, length)
    for block in reversed(config.blocks):
        if isinstance(block, Resample):
            t, h, w = block.stride
            coarse = (frames + t - 1) // t
            largest = max(largest, coarse * t * height * width * channels)
            height, width, channels = height // h, width // w, channels * block.multiplier
            length = (length + t - 1) // t
            frames = min(coarse + 1, length)
        else:
            frames = min(frames + 2 * block.layers, length)
        largest = max(largest, (frames + 2) * height * width * channels)
    return largest


def peak_bytes(config: ConvDecoderConfig, shape: VideoLatentShape, chunk: int, itemsize: int) -> int:
    """Working memory of a streamed decode, weights excluded: the most that one block needs, what the convolutions keep from
    one pull to the next, and the frames made before.

    In the first pull every convolution reads one frame more than it makes, and blocks nearer to the pixels keep nothing
    yet; in later ones all blocks keep their last frames, and read as many as they make.
    """
    clip = length = shape.pixels(config.compression).frames
    frames = later = min(chunk, clip)
    height, width = shape.height * prod(_strides(config, 1)), shape.width * prod(_strides(config, 2))
    channels = config.width
    pixels = frames * height * width * 3 * config.patch**2
    needs: list[tuple[float, float, float]] = [(0, 0, 2 * height * width * channels)]  # (first pull, later ones, kept)
    frames = min(frames + 1, length)
    for block in reversed(config.blocks):
        if isinstance(block, Resample):
            t, h, w = block.stride
            made = 2 * height * width * channels  # per frame: before and after unfolding
            height, width, channels = height // h, width // w, channels * block.multiplier
            read = height * width * channels
            length = (length + t - 1) // t
            before, later_before = min((frames + t - 1) // t + 1, length), -(-later // t)
            needs.append((frames * made + before * read, later * made + (later_before + 2) * read, 2 * read))
            frames, later = before, later_before
        else:
            frames = min(frames + 2 * block.layers, length)
            size = height * width * channels
            needs.append((_LIVE * frames * size, _LIVE * (later + 2) * size, 6 * block.layers * size))
    if chunk >= clip:  # one pull: nothing is kept
        return int(max(need for need, _, _ in needs) * itemsize)
    first = max(need + sum(kept for _, _, kept in needs[index + 1 :]) + own / 2 for index, (need, _, own) in enumerate(needs))
    again = max(need for _, need, _ in needs) + sum(kept for _, _, kept in needs)
    return int((pixels + max(first, again)) * itemsize)


def _strides(config: ConvDecoderConfig, axis: int) -> list[int]:
    return [block.stride[axis] for block in config.blocks if isinstance(block, Resample)]
