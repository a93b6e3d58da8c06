"""Temporal convolutions as streams: frames are pulled through a chain of stages, each keeping only what it must.

A stage makes frames 0, 1, 2, ... of its output in order. `advance(to, lead, trail)` returns the frames from where it
stands up to (not including) `to` as the middle of a contiguous buffer (lead + n + trail, H, W, C): the reader fills the
margins with the context of its own convolution, so that no convolution input is ever copied to be padded.
A 3-frame convolution that reads frames i - 1, i, i + 1 must be one frame ahead of its output (a causal one reads i - 2,
i - 1, i); the first and the last frame of the clip are repeated at the ends, as the official code does by concatenation.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.pixel_norm_silu import pixel_norm_silu
from .shuffle import Stride, unfold_runs

_EPS = 1e-8  # of the pixel norm


class Stage:
    """Makes `length` frames (H, W, C) in order. `nothing` is (0, H, W, C) on their device, in their dtype.

    bias: (C,), still to be added to every frame: whoever reads them adds it along the way, which saves a pass.
    """

    def __init__(self, length: int, nothing: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.length = length
        self.nothing = nothing
        self.bias = bias
        self.at = 0  # the frame made next

    def advance(self, to: int, lead: int, trail: int) -> torch.Tensor:
        """The frames from `at` up to `to`, between `lead` and `trail` frames of uninitialised margin."""
        if to == self.at:
            return with_margins(self.nothing, lead, trail)
        out = self._make(to, lead, trail)
        self.at = to
        return out

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        raise NotImplementedError


class Given(Stage):
    """Frames that are all there already: (F, H, W, C)."""

    def __init__(self, frames: torch.Tensor) -> None:
        super().__init__(frames.shape[0], frames[:0])
        self.frames = frames

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        return between_margins(self.frames[self.at : to], lead, trail)


class Settled(Stage):
    """The frames of `before` with their bias, for readers that cannot add it themselves."""

    def __init__(self, before: Stage) -> None:
        super().__init__(before.length, before.nothing)
        self._before = before

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        frames = self._before.advance(to, lead, trail)
        if self._before.bias is not None:
            frames[lead : frames.shape[0] - trail] += self._before.bias
        return frames


class Activated(Stage):
    """silu(pixel norm); the frames read are also put into `tap`, for a skip connection around what follows."""

    def __init__(self, before: Stage, tap: deque[torch.Tensor] | None = None) -> None:
        super().__init__(before.length, before.nothing)
        self._before = before
        self._tap = tap

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        x = self._before.advance(to, 0, 0)
        if self._tap is not None:
            self._tap.append(x)
        out = with_margins(x, lead, trail)
        pixel_norm_silu(x, self._before.bias, _EPS, out[lead : lead + x.shape[0]])
        return out


class Tapped(Stage):
    """The frames of `before` in `dtype`; `tap`, where given, keeps them as they were."""

    def __init__(self, before: Stage, dtype: torch.dtype, tap: deque[torch.Tensor] | None) -> None:
        super().__init__(before.length, before.nothing.to(dtype))
        self._before = before
        self._tap = tap

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        x = self._before.advance(to, lead, trail)
        if self._tap is not None:
            self._tap.append(x[lead : x.shape[0] - trail])
        return x.to(self.nothing.dtype)


class Convolved(Stage):
    """A FrameConv that sees `ahead` frames of the future and 2 - `ahead` of the past; the clip's ends are repeated.

    Its own bias is left to the reader; what it reads must have none left.
    """

    def __init__(self, conv: FrameConv, before: Stage, ahead: int) -> None:
        super().__init__(before.length, before.nothing.new_empty(*before.nothing.shape[:-1], conv.made), conv.conv.bias)
        self._conv = conv
        self._before = before
        self._ahead = ahead
        self._tail: torch.Tensor | None = None  # the last two frames read, repeated first ones included

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        return between_margins(self._conv(self._window(to)), lead, trail)

    def _window(self, to: int) -> torch.Tensor:
        lead = 2 if self._tail is not None else 2 - self._ahead
        trail = self._ahead if to == self.length else 0
        frames = self._before.advance(min(to + self._ahead, self.length), lead, trail)
        frames[:lead] = frames[lead] if self._tail is None else self._tail
        if trail:
            frames[-1] = frames[-2]
        self._tail = None if to == self.length else frames[-2:].clone()
        return frames


class Added(Stage):
    """What a stage makes plus the frames tapped from `source` before it; the biases of both are left to the reader."""

    def __init__(self, before: Stage, tap: deque[torch.Tensor], source: Stage) -> None:
        bias = wide(before.bias) if source.bias is None else wide(before.bias) + wide(source.bias)
        super().__init__(before.length, before.nothing, bias)
        self._before = before
        self._tap = tap

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        made = self._before.advance(to, 0, 0)
        out = with_margins(made, lead, trail) if lead or trail else made
        done = lead
        for skip in take(self._tap, made.shape[0]):
            n = skip.shape[0]
            torch.add(made[done - lead : done - lead + n], skip, out=out[done : done + n])
            done += n
        return out


class Unfolded(Stage):
    """Depth to space of frames in run order (shuffle.py); where time is doubled, the first frame is dropped."""

    def __init__(self, before: Stage, stride: Stride) -> None:
        t, h, w = stride
        height, width, channels = before.nothing.shape[1:]
        super().__init__(t * before.length - (t - 1), before.nothing.new_empty(0, height * h, width * w, channels // (t * h * w)))
        self._before = before
        self._stride = stride
        self._spare = self.nothing  # the second half of a doubled frame whose first half was asked for

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        t = self._stride[0]
        folded = self._before.advance((to + t - 2) // t + 1, 0, 0)
        spare, made = self._spare.shape[0], folded.shape[0] * t
        dropped = t - 1 if self.at == 0 else 0
        first = lead + spare - dropped  # where the unfolded frames begin; a dropped one lands in the margin
        above = max(0, -first)
        room = with_margins(self.nothing, above + max(lead + (to - self.at) + trail, first + made), 0)
        out = room[above:]
        if made:
            unfold_runs(folded, self._before.bias, self._stride, room[above + first : above + first + made])
        out[lead : lead + spare] = self._spare
        end = lead + (to - self.at)
        self._spare = out[end : first + made].clone()
        return out[: end + trail]


class FrameConv(nn.Module):
    """A 3 x 3 x 3 convolution over (F + 2, H, W, C_in) whose two extra frames are context: zeros around H and W only.

    The bias is not added: cuDNN would do it in a pass of its own.
    """

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.made = made
        self.conv = nn.Conv3d(channels, made, kernel_size=3)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(F + 2, H, W, C_in) -> (F, H, W, C_out), both contiguous."""
        x = frames.permute(3, 0, 1, 2).unsqueeze(0)  # (1, C, F, H, W) in channels-last memory
        y = F.conv3d(x, self.conv.weight, None, padding=(0, 1, 1))
        return y.squeeze(0).permute(1, 2, 3, 0).contiguous()


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def take(tapped: deque[torch.Tensor], frames: int) -> list[torch.Tensor]:
    """Remove the first `frames` frames, in pieces; what is left of a piece is copied, so that the rest can be freed."""
    taken = []
    while frames:
        piece = tapped.popleft()
        if frames < piece.shape[0]:
            tapped.appendleft(piece[frames:].clone())
            piece = piece[:frames]
        taken.append(piece)
        frames -= piece.shape[0]
    return taken


def with_margins(like: torch.Tensor, lead: int, trail: int) -> torch.Tensor:
    """An uninitialised (lead + F + trail, H, W, C) buffer for frames such as `like`."""
    return like.new_empty(lead + like.shape[0] + trail, *like.shape[1:])


def between_margins(frames: torch.Tensor, lead: int, trail: int) -> torch.Tensor:
    """The frames themselves where no margin is asked for, otherwise a copy between margins."""
    if not lead and not trail:
        return frames
    out = with_margins(frames, lead, trail)
    out[lead : lead + frames.shape[0]] = frames
    return out
