"""The end of a sub-layer: x += y * gate in place, alone or with the norms that open what comes next.

In place, because the residual stream is the one tensor that lives through all blocks, and rows of several legs are
updated as slices of it. Gate rows are (K, D) as in rms_adaln.py; a single row serves tokens of every level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide
from .quantise import Activation
from .rms_adaln import Norm, norm_arguments, norm_rows, rms_adaln_reference, rows


def gated_residual_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    norms: Sequence[Norm],
    index: torch.Tensor | None,
    eps: float,
    out: Sequence[Activation] | None = None,
) -> tuple[Activation, ...]:
    """x and y (R, T, D), gate (K, D), index (T,) or None. Writes x + y * gate into x, rounded once.

    Returns what `rms_adaln` makes of the updated (and rounded) x, one result per norm.
    """
    dtype = wide(x.dtype)
    x.copy_(x.to(dtype) + y.to(dtype) * rows(gate, index, dtype))
    return rms_adaln_reference(x, norms, index, eps, out) if norms else ()


@jit
def _kernel(
    x_ptr,  # (R * T, D), contiguous, updated in place
    y_ptr,  # (R * T, D), contiguous
    index_ptr,  # (T,) int64, read if LEVELS
    gate_ptr,  # (K, D), rows gate_row apart
    a_scale_ptr,  # these as in rms_adaln.norm_rows, used if NORM
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
    gate_row,
    tokens,
    width,
    eps,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    A_QUANT: tl.constexpr,
    B_QUANT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x = round(x + y * gate), then its norms. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    at = row * width + column
    level = row * 0
    if LEVELS:
        level = tl.load(index_ptr + row % tokens).to(tl.int64)
    x = tl.load(x_ptr + at, mask=there, other=0.0)
    y = tl.load(y_ptr + at, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + level * gate_row + column, mask=there, other=0.0).to(tl.float32)
    rounded = (x.to(tl.float32) + y * gate).to(x.dtype)
    tl.store(x_ptr + at, rounded, mask=there)
    if NORM:
        norm_rows(
            rounded.to(tl.float32), a_scale_ptr, a_shift_ptr, b_scale_ptr, b_shift_ptr, a_ptr, a_quant_ptr, b_ptr, b_quant_ptr,
            a_scale_row, a_shift_row, b_scale_row, b_shift_row, row, level, column, there, width, eps, PAIR, A_QUANT, B_QUANT,
        )  # fmt: skip


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    norms: Sequence[Norm],
    index: torch.Tensor | None,
    eps: float,
    out: Sequence[Activation] | None = None,
) -> tuple[Activation, ...]:
    if x.shape != y.shape or not x.is_contiguous():
        raise ValueError(f"gated_residual updates a contiguous x by a y of its shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    tokens, width = x.shape[-2:]
    y = y.contiguous()
    if norms:
        out, arguments, flags = norm_arguments(x, norms, out)
    else:
        out, arguments, flags = (), [x] * 8 + [0] * 4, {"PAIR": False, "A_QUANT": False, "B_QUANT": False}
    _kernel[(x.numel() // width,)](
        x,
        y,
        x if index is None else index,
        gate,
        *arguments,
        0 if len(gate) == 1 else gate.stride(0),
        tokens,
        width,
        eps,
        LEVELS=index is not None,
        NORM=bool(norms),
        **flags,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 3, 72, generator=generator).to(dtype)
    gate, *tables = torch.randn(5, 2, 72, generator=generator).to(dtype)
    index = torch.tensor([1, 0, 1])

    def norms(device: torch.device, dtype: torch.dtype) -> list[Norm]:
        return [Norm(tables[i].to(device, dtype), tables[i + 1].to(device, dtype), False) for i in (0, 2)]

    got_x, twin_x, truth_x = x.to(device, copy=True), x.clone(), x.double()
    got = _launch(got_x, y.to(device), gate.to(device), norms(device, dtype), index.to(device), 1e-6)
    cpu = torch.device("cpu")
    twin = gated_residual_reference(twin_x, y, gate, norms(cpu, dtype), index, 1e-6)
    gated_residual_reference(truth_x, y.double(), gate.double(), (), index, 1e-6)
    # The norms read the rounded x, so their truth starts from that.
    truth = rms_adaln_reference(twin_x.double(), norms(cpu, torch.float64), index, 1e-6)
    return [(got_x, twin_x, truth_x), *zip(got, twin, truth, strict=True)]


_OP = Op("gated_residual", _check)


def gated_residual(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    norms: Sequence[Norm],
    index: torch.Tensor | None,
    eps: float,
    out: Sequence[Activation] | None = None,
) -> tuple[Activation, ...]:
    """See `gated_residual_reference`; none, one or two norms."""
    return (_launch if _OP.runs(x) else gated_residual_reference)(x, y, gate, norms, index, eps, out)
