"""Moving pixels between grid and channels, channels-last: (..., T, H, W, C).

The published order of folded channels is (channel, t, h, w) with the channel slowest; inside a pixel patch it is
(channel, column, row): columns are slower than rows. `run_order` re-orders the rows of a layer whose output gets
unfolded, once after loading, so that the channels of one pixel lie together and unfolding copies whole runs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from einops import rearrange
from torch import nn

Stride = tuple[int, int, int]
Order = Callable[[torch.Tensor], torch.Tensor]


def patchify(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """(..., H, W, c) -> (..., H / patch, W / patch, c * patch * patch)."""
    return rearrange(pixels, "... (h row) (w column) c -> ... h w (c column row)", row=patch, column=patch)


def space_to_depth(x: torch.Tensor, stride: Stride) -> torch.Tensor:
    """(..., T, H, W, c) -> (..., T / t, H / h, W / w, c * t * h * w)."""
    t, h, w = stride
    return rearrange(x, "... (f t) (y h) (x w) c -> ... f y x (c t h w)", t=t, h=h, w=w)


def run_order(rows: torch.Tensor, stride: Stride) -> torch.Tensor:
    """Rows (c t h w) of a weight or bias -> (t h w c): the layer's output is then unfolded by `unfold_runs`."""
    return rearrange(rows, "(c cell) ... -> (cell c) ...", cell=prod(stride))


def patch_run_order(rows: torch.Tensor, patch: int) -> torch.Tensor:
    """Rows (c column row) of a weight or bias -> (row column c), for `unfold_runs` with stride (1, patch, patch)."""
    return rearrange(rows, "(c column row) ... -> (row column c) ...", column=patch, row=patch)


class Reordered:
    """The parameters that are in run order by now: each is put into it once, however often a try that ran out of memory is repeated."""

    def __init__(self) -> None:
        self._done: set[nn.Parameter] = set()

    def each(self, layer: nn.Module, order: Order) -> None:
        """`one` for the weight and, where there is one, the bias of a layer."""
        for name, _ in layer.named_parameters():
            self.one(layer, name, order)

    def one(self, layer: nn.Module, name: str, order: Order) -> None:
        """A parameter becomes `order` of it."""
        parameter = getattr(layer, name)
        if parameter not in self._done:
            parameter.data = order(parameter.data)
            self._done.add(parameter)


def unfold_runs(x: torch.Tensor, bias: torch.Tensor | None, stride: Stride, out: torch.Tensor) -> None:
    """Unfold (F, H, W, t * h * w * c) in run order, plus a bias in run order, into `out` (F * t, H * h, W * w, c).

    `out` is a part of a contiguous buffer.
    """
    t, h, w = stride
    frames, height, width, channels = x.shape
    cells = x.view(frames, height, width, t, h, w, channels // prod(stride)).permute(0, 3, 1, 4, 2, 5, 6)
    target = out.view(frames, t, height, h, width, w, -1)
    if bias is None:
        target.copy_(cells)
    else:
        torch.add(cells, bias.view(1, t, 1, h, 1, w, -1), out=target)
