"""Low-rank changes of a weight, where it is: W + sum of alpha_i B_i A_i, summed in float32 and rounded once.

A LoRA of a large rank on blocks that take turns on the device is put on in every step. In float32 that costs more than the
step itself; tensor cores multiply what halves stand for exactly, and one pass over the weight is the least there can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from .dispatch import Compared, Op, jit, tl, wide

_WIDE = 64 << 20  # bytes of a weight that the twin has in float32 at a time
_MOST = 3  # pairs one launch adds
_HALVES = {torch.bfloat16, torch.float16}
_M, _N, _K = 128, 128, 64  # rows, columns and ranks of a tile
_WARPS, _STAGES = 8, 3


class LowRank(NamedTuple):
    """a (rank, in), b (out, rank), of any dtypes; alpha: what their product is multiplied by. Rows of b may go on with zeros: those of
    `padded_rank` columns need not be copied first."""

    a: torch.Tensor
    b: torch.Tensor
    alpha: float


def add_low_rank_reference(weight: torch.Tensor, pairs: Sequence[LowRank]) -> None:
    """weight (out, in), changed in place, some rows at a time: the same ones wherever it is, so that the sums are the same."""
    dtype = wide(weight.dtype)
    there = [(pair.a.to(dtype), pair.b[:, : len(pair.a)].to(dtype), pair.alpha) for pair in pairs]
    rows = max(1, _WIDE // (weight.shape[1] * dtype.itemsize))
    for first in range(0, len(weight), rows):
        part = weight[first : first + rows]
        total = part.to(dtype, copy=True)
        for a, b, alpha in there:
            total.addmm_(b[first : first + rows], a, alpha=alpha)
        part.copy_(total)


def padded_rank(rank: int) -> int:
    """How long the kernel has rows of b."""
    return -(-rank // _K) * _K


def passing_bytes(rows: int, columns: int, ranks: int) -> int:
    """The most device memory, beside weight and pairs, while a weight (rows, columns) is changed by pairs of `ranks` together."""
    return min(_WIDE, 4 * rows * columns) + 4 * ranks * (rows + columns)


@jit
def _with_product(sums, a_ptr, b_ptr, rank, padded, rows, columns, many, wide_in, K: tl.constexpr):
    """sums + B A of one tile. Rows of b go on to `padded` with zeros: without a mask along them they come 16 bytes at a time."""
    ranks = tl.arange(0, K)
    for first in range(0, padded, K):
        at = first + ranks
        b = tl.load(b_ptr + rows[:, None] * padded + at[None, :], mask=rows[:, None] < many, other=0.0)
        a = tl.load(a_ptr + at[:, None].to(tl.int64) * wide_in + columns[None, :], mask=(at[:, None] < rank) & (columns[None, :] < wide_in), other=0.0)
        sums = tl.dot(b, a, sums)
    return sums


@partial(jit, general=("rank", "second", "third"))
def _add(
    weight_ptr,  # (rows, columns), columns one behind the other
    stride,
    many,
    wide_in,
    a_ptr,  # (rank, columns), b (rows, padded), of each pair
    b_ptr,
    rank,
    padded,
    c_ptr,
    d_ptr,
    second,
    second_padded,
    e_ptr,
    f_ptr,
    third,
    third_padded,
    turn,  # alpha of the first pair over that of the second, and so on: one set of sums serves all
    other_turn,
    alpha,  # of the last pair
    PAIRS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One program per tile; those of the same rows follow each other."""
    rows = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    sums = _with_product(tl.zeros((M, N), tl.float32), a_ptr, b_ptr, rank, padded, rows, columns, many, wide_in, K)
    if PAIRS > 1:
        sums = _with_product(sums * turn, c_ptr, d_ptr, second, second_padded, rows, columns, many, wide_in, K)
    if PAIRS > 2:
        sums = _with_product(sums * other_turn, e_ptr, f_ptr, third, third_padded, rows, columns, many, wide_in, K)
    place = weight_ptr + rows[:, None] * stride + columns[None, :]
    there = (rows[:, None] < many) & (columns[None, :] < wide_in)
    weight = tl.load(place, mask=there, other=0.0)
    tl.store(place, (weight.to(tl.float32) + alpha * sums).to(weight.dtype), mask=there)


def _launch(weight: torch.Tensor, pairs: Sequence[LowRank]) -> None:
    pairs = sorted(pairs, key=lambda pair: abs(pair.alpha))  # then no alpha over the next one is more than 1, whatever they are
    given = [part for pair in pairs for part in (pair.a.contiguous(), *_padded(pair.b, len(pair.a)))]
    given += given[:4] * (_MOST - len(pairs))  # never read
    turns = [before.alpha / after.alpha for before, after in pairwise(pairs)] + [0.0] * (_MOST - len(pairs))
    grid = (-(-weight.shape[1] // _N), -(-len(weight) // _M))
    _add[grid](weight, weight.stride(0), *weight.shape, *given, *turns, pairs[-1].alpha, PAIRS=len(pairs), M=_M, N=_N, K=_K, num_warps=_WARPS, num_stages=_STAGES)


def _padded(b: torch.Tensor, rank: int) -> tuple[torch.Tensor, int, int]:
    """b with zeros behind its rows, the rank, and how long its rows are with them."""
    if b.shape[1] == padded_rank(rank) and b.is_contiguous():
        return b, rank, b.shape[1]
    whole = b.new_zeros(len(b), padded_rank(rank))
    whole[:, :rank] = b[:, :rank]
    return whole, rank, whole.shape[1]


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    draw = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw).to(dtype)

    compared = []
    for kind, count in ((torch.bfloat16, 1), (torch.float16, _MOST)) if device.type == "cuda" else ((torch.float16, _MOST),):  # the interpreter has no right bf16
        weight = random(131, 264, dtype)
        pairs = [LowRank(random(rank, 264, kind), random(131, rank, kind), alpha) for rank, alpha in zip((72, 3, 33)[:count], (0.5, -2.0, 0.25), strict=False)]
        got, twin, truth = weight.to(device), weight.clone(), weight.double()
        _launch(got, [LowRank(a.to(device), b.to(device), alpha) for a, b, alpha in pairs])
        add_low_rank_reference(twin, pairs)
        add_low_rank_reference(truth, pairs)
        compared.append((got, twin, truth))
    return compared


_OP = Op("low_rank", _check)


def add_low_rank(weight: torch.Tensor, pairs: Sequence[LowRank]) -> None:
    """See `add_low_rank_reference`, whose are weights that are no halves or have scattered rows, and pairs that are not all halves of one kind, or too many.

    A float32 weight would show that tensor cores do not round their sums as float32 arithmetic does.
    """
    pairs = [pair for pair in pairs if pair.alpha]
    if not pairs:
        return
    kinds = {part.dtype for pair in pairs for part in (pair.a, pair.b)}
    fits = len(pairs) <= _MOST and len(kinds) == 1 and kinds | {weight.dtype} <= _HALVES and weight.stride(1) == 1
    runs = fits and _OP.runs(weight)
    (_launch if runs else add_low_rank_reference)(weight, pairs)
