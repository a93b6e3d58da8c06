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

from ...kernels.add_rms_norm import add_rms_norm
from ...kernels.head_norm_rope import Rope, head_norm_rope
from ...kernels.neighborhood_attention import Place, Triple, na3d
from ...kernels.swiglu import gated
from .diffusion_plan import TOKENS_TOGETHER
from .frames import Stage, between_margins, with_margins
from .na_blocks import EPS, Affine, ContextBlock, PixelBlock


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
        angles: Rope,
        before: Stage,
        slab: int,
        breathe: Callable[[], None],
    ) -> None:
        """angles: rope of the whole grid (before.length, H, W)."""
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
        self._rope = angles
        self._q_gain, self._k_gain = block.attn.gains()
        self._together = max(1, TOKENS_TOGETHER // (height * width))  # frames: what lies between two linears stays small
        self._read = 0  # frames of the input seen
        self._x = self.nothing  # input frames seen whose output is still to be made
        self._q = self._k = self._v = self._head_frames(0)  # of frames whose output is to be made; of frames still seen

    def _head_frames(self, frames: int) -> torch.Tensor:
        return self.nothing.new_empty(frames, *self.nothing.shape[1:3], *self._heads)

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        if to - self.at <= self._slab:  # in the memory of what was read
            x = self._step(self.at, to, lead)
            return between_margins(x[lead : lead + to - self.at], lead, trail) if trail else x[: lead + to - self.at]
        out = self.nothing
        for first in range(self.at, to, self._slab):
            stop = min(first + self._slab, to)
            x = self._step(first, stop, 0)
            if first == self.at:  # not before: while a stage waits for the ones before it, it holds as little as it can
                out = with_margins(self.nothing, lead + (to - self.at) + trail, 0)
            begin = lead + first - self.at
            out[begin : begin + stop - first] = x[: stop - first]
        return out

    def _step(self, first: int, stop: int, lead: int) -> torch.Tensor:
        """Make frames first to stop, `first` being the first frame not made yet; behind `lead` frames of margin."""
        need, low = max(self._read, self._start(stop - 1) + self._size), self._start(first)
        old, kept, n = self._read - first, self._read - low, stop - first
        buffer = self.before.advance(need, lead + old, 0)
        x = buffer[lead:]
        x[:old], self._x = self._x, self.nothing
        self._announce(self._read, need)
        q, k, v = self._head_frames(need - first), self._head_frames(need - low), self._head_frames(need - low)
        q[:old], k[:kept], v[:kept] = self._q, self._k, self._v
        self._q = self._k = self._v = self._head_frames(0)
        for begin in range(old, need - first, self._together):
            end = min(begin + self._together, need - first)
            keys = slice(first + begin - low, first + end - low)
            self._enter(x[begin:end], first + begin, q[begin:end], k[keys], v[keys])
        self._announce(need, need)
        made = na3d(q[None, :n], k[None], v[None], self._window, 1.0, Place(first, low, self.length), self._block.attn.bound)[0]
        later = self._start(stop) - low if stop < self.length else need - low
        self._q, self._k, self._v = q[n:].clone(), k[later:].clone(), v[later:].clone()
        self._x, self._read = x[n:].clone(), need
        del q, k, v
        for begin in range(0, n, self._together):
            self._leave(x[begin : min(begin + self._together, n)], made[begin : begin + self._together])
        self._breathe()
        return buffer

    def _enter(self, x: torch.Tensor, first: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """New input frames from `first` on, to queries, keys and values."""
        attn, affine = self._block.attn, self._affines[0]
        flat = x.view(-1, x.shape[-1])
        normed = add_rms_norm(flat, self._added(x, first), affine.gain, affine.shift, EPS)
        qkv = F.linear(normed, attn.qkv.weight, attn.qkv.bias).view(*x.shape[:3], -1)
        head_norm_rope(qkv, self._q_gain, self._k_gain, self._rope.frames(first, x.shape[0]), EPS, q, k, v)

    def _announce(self, first: int, stop: int) -> None:
        """Input frames first to stop are about to enter."""

    def _added(self, x: torch.Tensor, first: int) -> torch.Tensor | None:
        """What is added to the frames x from `first` on before the block proper: (tokens, C)."""
        return None

    def _leave(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """Frames x and what attention made of them, to the block's output, in place."""
        attn, mlp, affine = self._block.attn, self._block.mlp, self._affines[1]
        flat = x.view(-1, x.shape[-1])
        update = F.linear(made.view(flat.shape), attn.proj.weight, attn.proj.bias)
        hidden = gated(add_rms_norm(flat, update, affine.gain, affine.shift, EPS), mlp.w_gate.weight, mlp.w_up.weight)
        flat.addmm_(hidden, mlp.w_down.weight.T)

    def _start(self, frame: int) -> int:
        """First frame that queries of `frame` see."""
        return min(max(frame - self._size // 2, 0), self.length - self._size)


class Denoised(Attended):
    """A block of the pixel stage: the projected context is added to every frame that enters."""

    def __init__(
        self,
        block: PixelBlock,
        affines: tuple[Affine, Affine],
        window: Triple,
        angles: Rope,
        before: Stage,
        slab: int,
        breathe: Callable[[], None],
        context: Context,
        reader: int,
    ) -> None:
        super().__init__(block, affines, window, angles, before, slab, breathe)
        self._context = context
        self._reader = reader

    def _announce(self, first: int, stop: int) -> None:
        self._pieces = list(self._context.pieces(self._reader, first, stop)) if stop > first else []

    def _added(self, x: torch.Tensor, first: int) -> torch.Tensor:
        stop, linear, made = first + x.shape[0], self._block.context_proj, []
        for begin, frames in self._pieces:
            here = frames[max(first - begin, 0) : max(stop - begin, 0)]
            if here.shape[0]:
                made.append(F.linear(here, linear.weight, linear.bias))
        return (made[0] if len(made) == 1 else torch.cat(made)).view(-1, x.shape[-1])


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
            x = add_rms_norm(x.reshape(-1, x.shape[-1]), None, self._gain, None, EPS).view(x.shape)
        return between_margins(F.linear(x, self._linear.weight, self._linear.bias), lead, trail)
