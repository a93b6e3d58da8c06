"""Between the products of a gated MLP: gelu_tanh(gate) * up, where gate and up lie side by side in one product's rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import Compared, Op, jit, tl, wide

BLOCK = 1024  # columns a program makes


def gelu_gate_reference(x: torch.Tensor) -> torch.Tensor:
    """x (N, 2 I), gate first: gelu_tanh(gate) * up (N, I), rounded once."""
    gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


@jit
def _kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """x (N, 2 * width), out (N, width), contiguous. One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    at = x_ptr + row * (2 * width) + column
    gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=there, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    gelu = gate / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh(u)) = 1 / (1 + e^(-2u))
    tl.store(out_ptr + row * width + column, (gelu * up).to(out_ptr.dtype.element_ty), mask=there)


def _launch(x: torch.Tensor) -> torch.Tensor:
    rows, both = x.shape
    if both % 2:
        raise ValueError(f"gelu_gate reads a gate and an up of one width, got rows of {both}")
    x = x.contiguous()
    out = x.new_empty(rows, both // 2)
    _kernel[(rows, -(-both // 2 // BLOCK))](x, out, both // 2, BLOCK=BLOCK, num_warps=4)
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    x = (3 * torch.randn(3, 2 * 80, generator=torch.Generator().manual_seed(0))).to(dtype)
    return [(_launch(x.to(device)), gelu_gate_reference(x), gelu_gate_reference(x.double()))]


_OP = Op("gelu_gate", _check)


def gelu_gate(x: torch.Tensor) -> torch.Tensor:
    """See `gelu_gate_reference`."""
    return (_launch if _OP.runs(x) else gelu_gate_reference)(x)
