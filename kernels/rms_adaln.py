"""RMS norm without weight, then an affine given per timestep level: RMS(x) * (1 + scale) + shift.

Modulation rows are (K, D), one per distinct timestep of the stream; `index` (T,) names the row of every token, None where
K is 1. They are never spread to (T, D) outside a kernel. Rows may be strided, their last dimension may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide
from .quantise import Activation, pointers, room, store_row, write_reference


class Norm(NamedTuple):
    """One affine of a norm: scale and shift (K, D). quantised: its result is for fp8 products, in the form of quantise.py."""

    scale: torch.Tensor
    shift: torch.Tensor
    quantised: bool


def rms_adaln_reference(
    x: torch.Tensor, norms: Sequence[Norm], index: torch.Tensor | None, eps: float, out: Sequence[Activation] | None = None
) -> tuple[Activation, ...]:
    """x (R, T, D), index (T,) or None, one result (R, T, D) per norm: in x's dtype, rounded once, or quantised.

    Several affines of one norm are what both directions of audio-video attention read. `out`: memory for the results.
    """
    normed = rms(x, eps)
    return tuple(
        write_reference(affine(normed, norm.scale, norm.shift, index), x.dtype, place, norm.quantised)
        for norm, place in zip(norms, out or (None,) * len(norms), strict=True)
    )


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in the wide dtype."""
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def affine(normed: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """normed (R, T, D) in the wide dtype, modulated by each token's own row."""
    return normed * (1 + rows(scale, index, normed.dtype)) + rows(shift, index, normed.dtype)


def rows(values: torch.Tensor, index: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """(K, D) -> (T, D), or (1, D) where one row serves every token."""
    return values.to(dtype) if index is None or len(values) == 1 else values.to(dtype)[index]


@jit
def norm_rows(
    z,  # one row in float32, 0 where not `there`
    a_scale_ptr,  # (K, D), rows a_scale_row apart; likewise the other three
    a_shift_ptr,
    b_scale_ptr,
    b_shift_ptr,
    a_ptr,  # (R * T, D), contiguous; with a_quant_ptr (R * T,) for its scales if A_QUANT
    a_quant_ptr,
    b_ptr,
    b_quant_ptr,
    a_scale_row,
    a_shift_row,
    b_scale_row,
    b_shift_row,
    row,
    level,
    column,
    there,
    width,
    eps,
    PAIR: tl.constexpr,
    A_QUANT: tl.constexpr,
    B_QUANT: tl.constexpr,
):
    """z / sqrt(mean(z^2) + eps) * (1 + scale) + shift for one or two affines: the same instructions in every kernel that norms."""
    at = row * width + column
    z *= tl.rsqrt(tl.sum(z * z, axis=0) / width + eps)
    scale = tl.load(a_scale_ptr + level * a_scale_row + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(a_shift_ptr + level * a_shift_row + column, mask=there, other=0.0).to(tl.float32)
    store_row(a_ptr, a_quant_ptr, row, at, z * (1 + scale) + shift, there, A_QUANT)
    if PAIR:
        scale = tl.load(b_scale_ptr + level * b_scale_row + column, mask=there, other=0.0).to(tl.float32)
        shift = tl.load(b_shift_ptr + level * b_shift_row + column, mask=there, other=0.0).to(tl.float32)
        store_row(b_ptr, b_quant_ptr, row, at, z * (1 + scale) + shift, there, B_QUANT)


def norm_arguments(x: torch.Tensor, norms: Sequence[Norm], out: Sequence[Activation] | None) -> tuple[tuple[Activation, ...], list[object], dict[str, bool]]:
    """Results for one or two norms of x, and what `norm_rows` needs for them: arguments in its order, flags by name."""
    out = tuple(out) if out is not None else tuple(room(x, x.shape[-1], norm.quantised) for norm in norms)
    first, second = norms[0], norms[-1]
    tables = (first.scale, first.shift, second.scale, second.shift)
    rows = [0 if len(table) == 1 else table.stride(0) for table in tables]  # one row serves tokens of every level
    arguments = [*tables, *pointers(out[0]), *pointers(out[-1]), *rows]
    return out, arguments, {"PAIR": len(norms) > 1, "A_QUANT": first.quantised, "B_QUANT": second.quantised}


@jit
def _kernel(
    x_ptr,  # (R * T, D), contiguous
    index_ptr,  # (T,) int64, read if LEVELS
    a_scale_ptr,
    a_shift_ptr,
    b_scale_ptr,
    b_shift_ptr,
    a_ptr,
    a_quant_ptr,
    b_ptr,
    b_quant_ptr,
    a_scale_row,
    a_shift_row,
    b_scale_row,
    b_shift_row,
    tokens,
    width,
    eps,
    LEVELS: tl.constexpr,
    PAIR: tl.constexpr,
    A_QUANT: tl.constexpr,
    B_QUANT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per row, statistics in float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    x = tl.load(x_ptr + row * width + column, mask=there, other=0.0).to(tl.float32)
    level = row * 0
    if LEVELS:
        level = tl.load(index_ptr + row % tokens).to(tl.int64)
    norm_rows(
        x, a_scale_ptr, a_shift_ptr, b_scale_ptr, b_shift_ptr, a_ptr, a_quant_ptr, b_ptr, b_quant_ptr,
        a_scale_row, a_shift_row, b_scale_row, b_shift_row, row, level, column, there, width, eps, PAIR, A_QUANT, B_QUANT,
    )  # fmt: skip


def _launch(
    x: torch.Tensor, norms: Sequence[Norm], index: torch.Tensor | None, eps: float, out: Sequence[Activation] | None = None
) -> tuple[Activation, ...]:
    tokens, width = x.shape[-2:]
    x = x.contiguous()
    out, arguments, flags = norm_arguments(x, norms, out)
    _kernel[(x.numel() // width,)](
        x,
        x if index is None else index,
        *arguments,
        tokens,
        width,
        eps,
        LEVELS=index is not None,
        **flags,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 72, generator=generator).to(dtype)
    modulation = torch.randn(2, 4, 72, generator=generator).to(dtype)
    index = torch.tensor([1, 0, 1])

    def norms(device: torch.device, dtype: torch.dtype) -> list[Norm]:
        return [Norm(modulation[:, i].to(device, dtype), modulation[:, i + 1].to(device, dtype), False) for i in (0, 2)]

    got = _launch(x.to(device), norms(device, dtype), index.to(device), 1e-6)
    cpu = torch.device("cpu")
    twin = rms_adaln_reference(x, norms(cpu, dtype), index, 1e-6)
    truth = rms_adaln_reference(x.double(), norms(cpu, torch.float64), index, 1e-6)
    return list(zip(got, twin, truth, strict=True))


_OP = Op("rms_adaln", _check)


def rms_adaln(
    x: torch.Tensor, norms: Sequence[Norm], index: torch.Tensor | None, eps: float, out: Sequence[Activation] | None = None
) -> tuple[Activation, ...]:
    """See `rms_adaln_reference`; one or two norms."""
    return (_launch if _OP.runs(x) else rms_adaln_reference)(x, norms, index, eps, out)
