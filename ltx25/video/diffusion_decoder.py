"""The diffusion video decoder: a latent is grown into a context, and pixels are denoised beside it, window by window.

Source: the published file's tensors and configuration, and the official decoder's plain ("combined") path. Nothing is
convolved: every stage is linear layers and windowed attention, channels last. Time is streamed exactly (attended.py).

Two copies of the last latent frame are appended, so that the windows of the real last frame do not have to move inward;
the context they make is never read. A latent smaller than the smallest grid on which every window fits is edge-padded
first, noise is drawn for the padded canvas, and the frames are cropped back (the official size floor).

Where this differs from the official code on purpose: between steps the pixels stay float32 (official: the weights' dtype).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ...kernels.head_norm_rope import Rope
from ..config.video_layout import DiffusionDecoderConfig
from ..instrument.watch import Phase
from ..shapes import Compression, VideoLatentShape
from .attended import Attended, Context, Denoised, Projected, Repeated, Shared
from .canvas import Crop
from .denoise import Euler, NoiseCells
from .diffusion_plan import DiffusionPlan, choose, diffusion_plans
from .frames import Given, Stage, Tapped, Unfolded, wide
from .na_blocks import Network, WindowAttention, bound_scores
from .noise import DrawnNoise, Noise
from .output import Part
from .pace import Pace
from .rope import rope
from .shuffle import Reordered, patch_run_order, run_order
from .statistics import ChannelStatistics
from .tiling import Span, Tile


class DiffusionDecoder(nn.Module):
    """Statistics and diffusion decoder of one file; names are the file's after its prefix."""

    def __init__(self, config: DiffusionDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.per_channel_statistics = ChannelStatistics(config.latent_channels)
        self.decoder = Network(config)
        self._reordered, self._prepared = Reordered(), False

    @property
    def compression(self) -> Compression:
        return self.config.compression

    @property
    def latent_channels(self) -> int:
        return self.config.latent_channels

    def plan(self, shape: VideoLatentShape, tiling: str, free: int | None) -> DiffusionPlan:
        """The fastest plan that fits; "off": never tiles unless memory runs out (`smaller`)."""
        return choose(self._plans(shape, tiled=tiling == "auto"), free)

    def smaller(self, shape: VideoLatentShape, plan: DiffusionPlan) -> DiffusionPlan | None:
        return next((other for other in self._plans(shape, tiled=True) if other.bytes < plan.bytes), None)

    def _plans(self, shape: VideoLatentShape, tiled: bool) -> tuple[DiffusionPlan, ...]:
        canvas = Crop.of(self.config, shape).canvas
        frames, weight = shape.pixels(self.compression).frames, self.decoder.conv_in.weight
        return diffusion_plans(self.config, canvas, frames, weight.dtype.itemsize, tiled)

    def parts(self, latent: torch.Tensor, plan: DiffusionPlan, seed: int, phase: Phase) -> Iterator[Part]:
        """`stream` with noise drawn from `seed`, reported slab by slab."""
        pace, device = Pace(phase, latent.device, "chunk"), latent.device
        canvas = Crop.of(self.config, VideoLatentShape(*latent.shape[1:])).canvas.pixels(self.compression)
        for part in self.stream(latent, DrawnNoise(canvas, seed, device), plan, pace.breathe):
            yield part
            pace.unit()
        pace.finish()

    @property
    def _noise_dtype(self) -> torch.dtype:
        """One step to x0 only reads the noise through a linear; otherwise it is state, and kept float32."""
        weight = self.decoder.conv_in.weight
        return weight.dtype if self.config.steps == 1 and self.config.output == "x0" else wide(weight).dtype

    @torch.no_grad()
    def stream(self, latent: torch.Tensor, noise: Noise, plan: DiffusionPlan, breathe: Callable[[], None]) -> Iterator[Part]:
        """Decode one normalised latent (1, C, t, h, w).

        noise: for the canvas (`Crop`). Slabs and tiles do the sums of an undivided decode. `breathe` is called after every slab of every block and may raise to cancel.
        """
        self._prepare()
        crop = Crop.of(self.config, VideoLatentShape(*latent.shape[1:]))
        whole = [self._features(self._padded(latent, crop), breathe)]
        fine = whole[0].shape[1] // crop.canvas.height  # feature cells per latent cell
        for tile in (Tile(rows, columns) for rows in plan.rows for columns in plan.columns):
            # A copy for every tile, because blocks work in place; a single one is handed over, to be freed once it is used up.
            features = Given(whole.pop() if plan.tiles == 1 else _cut(whole[0], tile, fine))
            yield from self._tile(features, noise, plan, crop, tile, breathe)

    def _tile(
        self, features: Given, noise: Noise, plan: DiffusionPlan, crop: Crop, tile: Tile, breathe: Callable[[], None]
    ) -> Iterator[Part]:
        """What is kept of one tile of the canvas, cropped to the clip."""
        side, rows, columns = self.compression.side, tile.rows, tile.columns
        area = slice(rows.start * side, rows.stop * side), slice(columns.start * side, columns.stop * side)
        cells = NoiseCells(noise, *area, self.config.patch, features.nothing.new_empty(0, dtype=self._noise_dtype))
        stage = self._denoised(features, cells, plan, tile, breathe)
        kept = _inside(rows, side), _inside(columns, side)
        for first, stop in plan.chunks:
            pixels = stage.advance(stop, 0, 0)[:, kept[0], kept[1]]
            yield crop.cut(Part(first, rows.first * side, columns.first * side, pixels), side)

    def _features(self, latent: torch.Tensor, breathe: Callable[[], None]) -> torch.Tensor:
        """The canvas (t, h, w, C) through all context stages but the last, whole: little beside what follows."""
        ghosts, tile = self.config.kernels[0][0] // 2 * 2, Tile.whole(*latent.shape[1:3])
        frames = torch.cat((latent, latent[-1:].expand(ghosts, -1, -1, -1)))
        stage: Stage = Projected(self.decoder.conv_in, Given(frames))
        for number in range(len(self.decoder.det_stages) - 1):
            stage = self._grown(number, stage, stage.length, tile, breathe)
            stage = Given(stage.advance(stage.length, 0, 0))
        return stage.advance(stage.length, 0, 0)

    def _grown(self, number: int, stage: Stage, slab: int, tile: Tile, breathe: Callable[[], None]) -> Stage:
        """Context stage `number`: its blocks, then the finer grid."""
        return self._finer(number, self._attended(number, stage, slab, tile, breathe))

    def _attended(self, number: int, stage: Stage, slab: int, tile: Tile, breathe: Callable[[], None]) -> Stage:
        angles = self._angles(stage, tile)
        for block, affines in zip(self.decoder.det_stages[number], self._context_affines[number], strict=True):
            stage = Attended(block, affines, self.config.kernels[number], angles, stage, slab, breathe)
        return stage

    def _angles(self, stage: Stage, tile: Tile) -> Rope:
        """Rope of a stage that holds `tile`: positions of the whole."""
        _, height, width, _ = stage.nothing.shape
        fine = height // (tile.rows.stop - tile.rows.start)  # cells per latent cell
        first = (0, tile.rows.start * fine, tile.columns.start * fine)
        return rope((stage.length, height, width), first, self.config.head_dim, stage.nothing.device)

    def _finer(self, number: int, stage: Stage) -> Stage:
        upsample = self.decoder.upsamples[number]
        return Unfolded(Projected(upsample.proj, stage), upsample.stride)

    def _denoised(
        self, features: Given, cells: Stage, plan: DiffusionPlan, tile: Tile, breathe: Callable[[], None]
    ) -> Stage:
        """Noise cells to frames (F, H, W, 3), one pass of the last stage per step."""
        network, config = self.decoder, self.config
        times, angles = self._times(), self._angles(cells, tile)
        context, state = self._context(features, cells.length, plan, tile, breathe), cells
        for step, (now, later) in enumerate(zip(times, [*times[1:], 0.0], strict=True)):
            last = config.output == "x0" and later == 0  # then the prediction is the answer
            tap: deque[torch.Tensor] = deque()
            stage: Stage = Projected(network.conv_in_x_t, Tapped(state, network.conv_in_x_t.weight.dtype, None if last else tap))
            for number, block in enumerate(network.diff_blocks):
                reader = step * len(network.diff_blocks) + number
                if plan.resident:
                    stage = Given(_in_place(stage, plan.slab))
                affines = self._pixel_affines[step][number]
                stage = Denoised(block, affines, config.kernels[-1], angles, stage, plan.slab, breathe, context, reader)
            predicted = Projected(network.conv_out, stage, wide(network.norm_out.weight))
            state = predicted if last else Euler(predicted, tap, config.output, now, later)
        return Unfolded(state, (1, config.patch, config.patch))

    def _context(
        self, features: Given, frames: int, plan: DiffusionPlan, tile: Tile, breathe: Callable[[], None]
    ) -> Context:
        """The last context stage for all blocks of all steps."""
        number, readers = len(self.decoder.det_stages) - 1, self.config.steps * len(self.decoder.diff_blocks)
        if not plan.resident:
            return Shared(self._grown(number, features, plan.slab, tile, breathe), readers)
        attended = self._attended(number, features, plan.slab, tile, breathe)
        t = self.config.upsamples[number].stride[0]
        made = attended.advance((frames + t - 2) // t + 1, 0, 0)  # as much as Unfolded reads for that many frames
        features.frames = features.nothing  # not needed any more
        return Repeated([self._finer(number, Given(made)) for _ in range(readers)])

    def _padded(self, latent: torch.Tensor, crop: Crop) -> torch.Tensor:
        """(1, C, t, h, w) -> the canvas (t, h, w, C), un-normalised, in the weights' dtype."""
        z = latent[0].permute(1, 2, 3, 0).to(self.decoder.conv_in.weight.dtype)
        z, canvas = self.per_channel_statistics.un_normalize(z), crop.canvas
        for axis, (size, begin) in enumerate(zip((canvas.frames, canvas.height, canvas.width), (0, crop.above, crop.before), strict=True)):
            index = (torch.arange(size, device=z.device) - begin).clamp(0, z.shape[axis] - 1)
            z = z.index_select(axis, index)
        return z

    def _times(self) -> list[float]:
        """Noise levels of the steps, as float32 numbers."""
        return torch.linspace(1.0, 1.0 / self.config.steps, self.config.steps).tolist()

    def _prepare(self) -> None:
        """Once, on the filled weights: what the noise levels make of the norms; fold gates; run order (shuffle.py) where pixels are folded or unfolded.

        Where memory runs out inside, the next call goes on from there.
        """
        if self._prepared:
            return
        network, patch = self.decoder, self.config.patch
        bound_scores([module for module in network.modules() if isinstance(module, WindowAttention)])
        for block in network.diff_blocks:
            block.fold_gates()
        modulations = network.shared_adaln(network.t_embedder(torch.tensor(self._times())))
        self._context_affines = [[block.affines() for block in blocks] for blocks in network.det_stages]
        self._pixel_affines = [[block.modulated(modulation) for block in network.diff_blocks] for modulation in modulations]
        for upsample in network.upsamples:
            self._reordered.each(upsample.proj, partial(run_order, stride=upsample.stride))
        self._reordered.each(network.conv_out, partial(patch_run_order, patch=patch))
        self._reordered.one(network.conv_in_x_t, "weight", lambda weight: patch_run_order(weight.T, patch).T.contiguous())
        self._prepared = True


def _inside(span: Span, side: int) -> slice:
    """Pixels of a tile that are kept."""
    return slice((span.first - span.start) * side, (span.last - span.start) * side)


def _cut(features: torch.Tensor, tile: Tile, fine: int) -> torch.Tensor:
    """A copy of a tile's cells, `fine` of them per latent cell, contiguous."""
    rows, columns = tile.rows, tile.columns
    part = features[:, rows.start * fine : rows.stop * fine, columns.start * fine : columns.stop * fine]
    return part.clone(memory_format=torch.contiguous_format)


def _in_place(stage: Stage, slab: int) -> torch.Tensor:
    """All frames of a stage, made slab by slab; a block over given frames writes over those it has read."""
    if not (isinstance(stage, Denoised) and isinstance(stage.before, Given)):
        return stage.advance(stage.length, 0, 0)
    frames = stage.before.frames
    for first in range(0, stage.length, slab):
        stop = min(first + slab, stage.length)
        frames[first:stop] = stage.advance(stop, 0, 0)
    return frames
