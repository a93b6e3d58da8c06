"""Rows in eight bits: e4m3 values and one float32 scale per row, x = values * scale. What fp8 products read.

The scale takes a row's largest magnitude to 448, e4m3's largest number. Ops that make what such a product reads write it
in this form themselves, from their float32 result: a row is neither rounded to bf16 nor read again in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12  # of a row's largest magnitude: a row of zeros stays zeros
_WIDE_AT_ONCE = 1 << 24  # numbers of a weight that are widened at a time


@dataclass(frozen=True)
class Quantised:
    """values (R, T, D) e4m3 and scale (R, T, 1) float32, both contiguous."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Quantised:
        return Quantised(self.values[rows], self.scale[rows])

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.to(wide(dtype)) * self.scale.to(wide(dtype))).to(dtype)


Activation = torch.Tensor | Quantised


def room(like: torch.Tensor, width: int, quantised: bool) -> Activation:
    """Unwritten memory for (R, T, `width`) results of rows like `like` (R, T, ...)."""
    shape = (*like.shape[:2], width)
    if not quantised:
        return like.new_empty(shape)
    return Quantised(like.new_empty(shape, dtype=E4M3), like.new_empty((*shape[:2], 1), dtype=torch.float32))


def quantise_reference(x: torch.Tensor) -> Quantised:
    """x (R, T, D), best in the wide dtype it was computed in: scale = largest magnitude of a row / 448."""
    x = x.to(wide(x.dtype))
    scale = x.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST
    return Quantised((x / scale).to(E4M3), scale.float())


def quantise_matrix(weight: torch.Tensor) -> Quantised:
    """weight (out, in): its rows as a Quantised (1, out, in), made in runs of rows: little is held beside it in float32."""
    values, scale = torch.empty_like(weight, dtype=E4M3), weight.new_empty((len(weight), 1), dtype=torch.float32)
    at_once = max(1, _WIDE_AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), at_once):
        rows = quantise_reference(weight[None, start : start + at_once])
        values[start : start + at_once], scale[start : start + at_once] = rows.values[0], rows.scale[0]
    return Quantised(values[None], scale[None])


def matrix_workspace(weight: torch.Tensor) -> int:
    """Bytes that `quantise_matrix` takes beside a weight and its result: numbers in float32, their magnitudes, over their scale."""
    return 3 * 4 * min(weight.numel(), max(_WIDE_AT_ONCE, weight.shape[1]))


def write_reference(y: torch.Tensor, dtype: torch.dtype, out: Activation | None, quantised: bool) -> Activation:
    """What a twin does with its wide result y: rounded to `dtype` or quantised, into `out` where given."""
    made = quantise_reference(y) if quantised else y.to(dtype)
    if out is None:
        return made
    if isinstance(made, Quantised):
        out.values.copy_(made.values)
        out.scale.copy_(made.scale)
        return out
    return out.copy_(made)


@jit
def store_row(out_ptr, scale_ptr, row, at, y, there, QUANT: tl.constexpr):
    """Store the float32 row `y` (0 where not `there`) at out_ptr + at, as it is or over its scale, which goes to scale_ptr + row."""
    if QUANT:
        scale = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / 448.0
        tl.store(scale_ptr + row, scale)
        y = y / scale
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)


def pointers(out: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) for a kernel; an `out` that is not quantised stands in for the scale, which is then not written."""
    return (out.values, out.scale) if isinstance(out, Quantised) else (out, out)


@jit
def _kernel(x_ptr, out_ptr, scale_ptr, x_row, width, GELU: tl.constexpr, WIDTH: tl.constexpr):
    """One program per row of (R * T, D); GELU: of tanh-gelu(x) instead of x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    x = tl.load(x_ptr + row * x_row + column, mask=there, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh(u)) = 1 / (1 + e^(-2u))
    store_row(out_ptr, scale_ptr, row, row * width + column, x, there, True)


def _launch(x: torch.Tensor, out: Quantised, gelu: bool) -> Quantised:
    width = x.shape[-1]
    x = x.contiguous()
    _kernel[(x.numel() // width,)](x, out.values, out.scale, width, width, GELU=gelu, WIDTH=power_of_two(width), num_warps=row_warps(width))
    return out


def gelu_quantise_reference(x: torch.Tensor) -> Quantised:
    """x (R, T, D): the tanh GELU of it, quantised. What stands between the two products of a feed-forward."""
    return quantise_reference(torch.nn.functional.gelu(x.to(wide(x.dtype)), approximate="tanh"))


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    x = (3 * torch.randn(2, 3, 72, generator=torch.Generator().manual_seed(0))).to(dtype)
    results = []
    for gelu, reference in ((False, quantise_reference), (True, gelu_quantise_reference)):
        got = _launch(x.to(device), room(x.to(device), 72, True), gelu)
        truth = torch.nn.functional.gelu(x.double(), approximate="tanh") if gelu else x.double()
        results.append((got.dequantised(torch.float32), reference(x).dequantised(torch.float32), truth))
    return results


_OP = Op("quantise", _check)


def quantise(x: torch.Tensor) -> Quantised:
    """See `quantise_reference`."""
    return _launch(x, room(x, x.shape[-1], True), False) if _OP.runs(x) else quantise_reference(x)


def gelu_quantise(x: torch.Tensor) -> Quantised:
    """See `gelu_quantise_reference`."""
    return _launch(x, room(x, x.shape[-1], True), True) if _OP.runs(x) else gelu_quantise_reference(x)
