"""Windowed attention as a stage of frames (frames.py): what a block needs of the past and future is carried along.

A window of k frames reaches k // 2 frames ahead, or further back where it moves inward at the end of the clip. A stage
therefore reads its input up to the last frame that its queries see and keeps the keys and values that later queries
still need: memory depends on the slab and the window, not on the clip, and every sum is that of an undivided decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from ...kernels.neighborhood_attention import Place, Triple, na3d
from ...kernels.swiglu import swiglu_residual
from ...kernels.window_qkv import rms_norm, window_qkv
from .frames import Stage, between_margins, with_margins
from .na_blocks import EPS, Affine, ContextBlock, PixelBlock
from .rope import rope


class Context(Protocol):
    """Frames that several readers want, each in order and at its own pace."""

    def pieces(self, reader: int, first: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Frames first to stop, in order: (index of the piece's first frame, frames)."""


class Repeated:
    """Context made anew for every reader, from a stage of its own: costs work, holds nothing."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def pieces(self, reader: int, first: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        yield first, self._stages[reader].advance(stop, 0, 0)


class Shared:
    """Context made once, kept until the last reader has read it."""

    def __init__(self, before: Stage, readers: int) -> None:
        self._before = before
        self._kept: deque[tuple[int, torch.Tensor]] = deque()  # (first frame, frames)
        self._at = [0] * readers

    def pieces(self, reader: int, first: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        made = self._before.at
        if made < stop:
            self._kept.append((made, self._before.advance(stop, 0, 0)))
        for begin, frames in self._kept:
            low, high = max(first, begin), min(stop, begin + frames.shape[0])
            if low < high:
                yield low, frames[low - begin : high - begin]
        self._at[reader] = stop
        while self._kept and self._kept[0][0] + self._kept[0][1].shape[0] <= min(self._at):
            self._kept.popleft()


class Attended(Stage):
    """One block. Works on `slab` frames at a time; `breathe` is called after each slab and may raise to cancel."""

    def __init__(
        self,
        block: ContextBlock,
        affines: tuple[Affine, Affine],
        window: Triple,
        before: Stage,
        slab: int,
        breathe: Callable[[], None],
    ) -> None:
        super().__init__(before.length, before.nothing)
        self._block = block
        self.before = before
        self._affines = affines
        self._window = window
        self._size = min(window[0], self.length)
        self._slab = slab
        self._breathe = breathe
        _, height, width, channels = self.nothing.shape
        self._heads = (channels // block.attn.head_dim, block.attn.head_dim)
        self._rope = rope((self.length, height, width), block.attn.head_dim, self.nothing.device)
        self._q_gain, self._k_gain = block.attn.gains()
        self._read = 0  # frames of the input seen
        self._x = self.nothing  # input frames seen whose output is still to be made
        self._q = self._k = self._v = self._head_frames(0)  # of frames whose output is to be made; of frames still seen

    def _head_frames(self, frames: int) -> torch.Tensor:
        return self.nothing.new_empty(frames, *self.nothing.shape[1:3], *self._heads)

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        out = with_margins(self.nothing, lead + (to - self.at) + trail, 0)
        for first in range(self.at, to, self._slab):
            stop = min(first + self._slab, to)
            begin = lead + first - self.at
            self._step(first, stop, out[begin : begin + stop - first])
            self._breathe()
        return out

    def _step(self, first: int, stop: int, out: torch.Tensor) -> None:
        """Make frames first to stop into `out`; `first` is the first frame not made yet."""
        need, low = max(self._read, self._start(stop - 1) + self._size), self._start(first)
        old, kept, n = self._read - first, self._read - low, stop - first
        x = self.before.advance(need, old, 0)
        x[:old], self._x = self._x, self.nothing
        q, k, v = self._head_frames(need - first), self._head_frames(need - low), self._head_frames(need - low)
        q[:old], k[:kept], v[:kept] = self._q, self._k, self._v
        block, (attention, mlp) = self._block, self._affines
        if need > self._read:
            self._enter(x[old:], self._read, need)
            angles = self._rope.frames(self._read, need - self._read)
            qkv, places = block.attn.qkv, (q[old:], k[kept:], v[kept:])
            window_qkv(x[old:], attention.gain, attention.shift, qkv.weight, qkv.bias, self._q_gain, self._k_gain, angles, EPS, *places)
        made = na3d(q[None, :n], k[None], v[None], self._window, 1.0, Place(first, low, self.length))
        later = self._start(stop) - low if stop < self.length else need - low
        self._q, self._k, self._v = q[n:].clone(), k[later:].clone(), v[later:].clone()
        del q, k, v
        now = x[:n]
        now += F.linear(made.view(now.shape), block.attn.proj.weight, block.attn.proj.bias)
        del made
        weights, flat = (block.mlp.w_gate.weight, block.mlp.w_up.weight, block.mlp.w_down.weight), (-1, now.shape[-1])
        swiglu_residual(now.view(flat), mlp.gain, mlp.shift, *weights, EPS, out.view(flat))
        self._x, self._read = x[n:].clone(), need

    def _enter(self, x: torch.Tensor, first: int, stop: int) -> None:
        """What happens to new input frames first to stop before the block proper."""

    def _start(self, frame: int) -> int:
        """First frame that queries of `frame` see."""
        return min(max(frame - self._size // 2, 0), self.length - self._size)


class Denoised(Attended):
    """A block of the pixel stage: the projected context is added to every frame that enters."""

    def __init__(
        self,
        block: PixelBlock,
        modulation: torch.Tensor,
        window: Triple,
        before: Stage,
        slab: int,
        breathe: Callable[[], None],
        context: Context,
        reader: int,
    ) -> None:
        super().__init__(block, block.modulated(modulation), window, before, slab, breathe)
        self._context = context
        self._reader = reader

    def _enter(self, x: torch.Tensor, first: int, stop: int) -> None:
        for begin, frames in self._context.pieces(self._reader, first, stop):
            here = x[begin - first : begin - first + frames.shape[0]]
            here += F.linear(frames, self._block.context_proj.weight, self._block.context_proj.bias)


class Projected(Stage):
    """A linear over channels, after an RMS norm where `gain` is given."""

    def __init__(self, linear: torch.nn.Linear, before: Stage, gain: torch.Tensor | None = None) -> None:
        super().__init__(before.length, before.nothing.new_empty(*before.nothing.shape[:-1], linear.out_features))
        self._linear = linear
        self._before = before
        self._gain = gain

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        x = self._before.advance(to, 0, 0)
        if self._gain is not None:
            x = rms_norm(x, self._gain, None, EPS)
        return between_margins(F.linear(x, self._linear.weight, self._linear.bias), lead, trail)
