"""How the diffusion decoder cuts its work, from the memory it may use: frames at a time, and tiles where that is not enough.

Slabs of frames repeat no work, so they come first; tiles do, around what they keep. Estimates count the tensors
that are alive together; a frame of the last stage, (H / patch) x (W / patch) x channels, is the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..config.video_layout import DiffusionDecoderConfig
from ..shapes import VideoLatentShape
from .canvas import size_floor
from .tiling import Span, spans

_ORDER = tuple((slab, resident) for resident in (False, True) for slab in (48, 32, 24, 16, 8, 4))  # fastest first
_SMALLEST = ((2, False), (1, False), (2, True), (1, True))
_MOST_TILES = 8  # per axis
TOKENS_TOGETHER = 1 << 18  # a block's linears work on this many tokens, so that what lies between them stays small
SLACK = 1.1  # free memory over the estimate that a plan wants: what the estimate misses and the allocator cannot use
LARGEST_TENSOR = 2**31 - 1  # elements: above, library kernels get slow or wrong


@dataclass(frozen=True)
class DiffusionPlan:
    """`rows` x `columns` tiles of a canvas, each decoded `slab` frames at a time. Positions in latent cells.

    resident: False: all blocks follow each other through the clip, so that memory does not grow with it; True: the whole
    clip goes through one block after the other, which holds less for short clips and makes the context once per block.
    """

    frames: int
    slab: int
    first: int  # frames of the first slab: fewer where blocks run ahead of each other, so that the first block makes `slab`
    resident: bool
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    bytes: int  # estimated working memory, weights excluded

    @property
    def tiles(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def units(self) -> int:
        return self.tiles * len(self.chunks)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """[first, stop) of the frames that leave together."""
        cuts = [0, *range(self.first, self.frames, self.slab), self.frames]
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    @property
    def text(self) -> str:
        tiles = f" in {len(self.rows)} x {len(self.columns)} tiles" if self.tiles > 1 else ""
        return f"{self.slab} frames at a time{', block by block' if self.resident else ''}{tiles}"


@lru_cache(maxsize=16)  # the estimate, the decode and each retreat ask: 8 ms a time, a tenth of a small clip's decode
def diffusion_plans(
    config: DiffusionDecoderConfig, shape: VideoLatentShape, frames: int, itemsize: int, tiled: bool
) -> tuple[DiffusionPlan, ...]:
    """All plans for a canvas of `shape`, from the fastest to the smallest; `tiled` False: none with tiles."""
    reach, least = reach_cells(config), size_floor(config)
    grids = [(1, 1)]
    if tiled:
        counts = range(1, _MOST_TILES + 1)
        grids = sorted(((h, w) for h in counts for w in counts), key=lambda grid: (prod(grid), abs(grid[0] - grid[1])))
    plans = []
    for h, w in grids:
        try:
            rows, columns = spans(shape.height, h, reach), spans(shape.width, w, reach)
        except ValueError:
            continue
        if rows[0].stop - rows[0].start < least[1] or columns[0].stop - columns[0].start < least[2]:
            continue
        for slab, resident in _ORDER if tiled or h * w > 1 else _ORDER + _SMALLEST:
            plan = _plan(config, shape, frames, itemsize, slab, resident, tuple(rows), tuple(columns))
            if plan is not None and not (plans and plan.bytes >= plans[-1].bytes):
                plans.append(plan)
    return tuple(plans)


def choose(plans: Sequence[DiffusionPlan], free: int | None) -> DiffusionPlan:
    """The first plan that fits into `free` bytes (None: not known, the fastest); the smallest where none does."""
    return next((plan for plan in plans if free is None or plan.bytes * SLACK <= free), plans[-1])


def reach_cells(config: DiffusionDecoderConfig) -> int:
    """Latent cells that a cut disturbs: the reach of all windows after the stages that are always made whole."""
    side = config.compression.side
    pixels = config.depths[-1] * (config.kernels[-1][1] // 2) * config.patch
    pixels += config.depths[-2] * (config.kernels[-2][1] // 2) * config.patch * config.upsamples[-1].stride[1]
    return -(-pixels // side)


def _plan(
    config: DiffusionDecoderConfig, shape: VideoLatentShape, frames: int, itemsize: int, slab: int, resident: bool, rows: tuple[Span, ...], columns: tuple[Span, ...]
) -> DiffusionPlan | None:
    cells = config.compression.side // config.patch
    tile = (rows[0].stop - rows[0].start) * (columns[0].stop - columns[0].start) * cells**2 * config.channels[-1]
    size = config.kernels[-1][0]
    if (slab + size) * tile > LARGEST_TENSOR and slab > 1:
        return None
    slab, half = min(slab, frames), size // 2
    ahead = 0 if resident or slab == frames else (config.depths[-1] * config.steps - 1) * half  # of the first block, over the last
    first = slab - ahead if slab > ahead else min(size - half, slab)
    features = _features(config, shape)
    between = max(_between(config, tile // config.channels[-1], slab), _kept(config, frames, slab) * tile)
    leaving = slab * tile / config.channels[-1] * 3 * config.patch**2 * 4 / itemsize  # float32 pixels of the slab before
    held = _held_frames(config, frames, slab, ahead, resident) * tile + between + (leaving if slab < frames else 0)
    if len(rows) * len(columns) > 1:  # a tile has its own copy
        features *= 1 + (rows[0].stop - rows[0].start) * (columns[0].stop - columns[0].start) / (shape.height * shape.width)
    elif resident:  # freed before the last stage
        features = 0
    peak = max(held + features, 2.3 * _features(config, shape))
    return DiffusionPlan(frames, slab, first, resident, rows, columns, int(peak * itemsize))


def _kept(config: DiffusionDecoderConfig, frames: int, slab: int) -> int:
    """Frames one block keeps between slabs: keys and values still seen, inputs and queries still to be worked on."""
    size = config.kernels[-1][0]
    return min(2 * (size - 1) + 2 * (size // 2), 4 * (frames - slab))


def _held_frames(config: DiffusionDecoderConfig, frames: int, slab: int, ahead: int, resident: bool) -> float:
    """Frames of the last stage's width alive while a block works on a slab."""
    half, kept = config.kernels[-1][0] // 2, _kept(config, frames, slab)
    working = 4 * slab + kept + ahead  # x, q, k, v; x has room in front for what the blocks after it keep
    if resident:  # the whole clip, its context before it is made finer, and a slab of it made finer
        step = config.upsamples[-1]
        coarse = config.channels[-2] / config.channels[-1] / prod(step.stride)  # a frame of the last context stage
        return frames * (1 + coarse) + slab + half + working
    context = min(frames, slab + ahead + half) + slab / 2
    return context + (config.depths[-1] * config.steps - 1) * kept + working


def _between(config: DiffusionDecoderConfig, tokens: int, slab: int) -> int:
    """Elements of what lies between the linears of a block; `tokens`: of a frame."""
    together = tokens * min(slab, max(1, TOKENS_TOGETHER // tokens))
    return 5 * config.channels[-1] * together  # a norm and four times the width of the hidden layer


def _features(config: DiffusionDecoderConfig, shape: VideoLatentShape) -> int:
    """Elements of what the whole stages make: the input of the last context stage."""
    frames = shape.frames + config.kernels[0][0] // 2 * 2
    for step in config.upsamples[:-1]:
        frames = frames * step.stride[0] - (step.stride[0] - 1)
    sides = prod(step.stride[1] * step.stride[2] for step in config.upsamples[:-1])
    return frames * shape.height * shape.width * sides * config.channels[-2]
