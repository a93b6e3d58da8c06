"""The gated half of an MLP: silu(w_gate x) * (w_up x), both products and the gate in one go.

The two hidden tensors of a token are eight times its width; made and read apart they would be most of a block's traffic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import Compared, Op, jit, tl


def gated_reference(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """x (N, C), weights (hidden, C), no biases: (N, hidden)."""
    return F.silu(F.linear(x, w_gate)).mul_(F.linear(x, w_up))


@jit
def _gated(
    x_ptr,  # (N, C), contiguous
    gate_ptr,  # (hidden, C), contiguous; up alike
    up_ptr,
    out_ptr,  # (N, hidden), contiguous
    rows,
    hidden,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS x COLUMNS of the result per program, accumulated in float32. Programs of the same rows are neighbours."""
    tiles = tl.cdiv(hidden, COLUMNS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_at = x_ptr + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * width + depth[None, :]
    w_at = tl.minimum(column, hidden - 1)[:, None] * width + depth[None, :]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, width, DEPTH):
        there = (begin + depth < width)[None, :]
        x = tl.load(x_at + begin, mask=there, other=0.0)
        gate = tl.dot(x, tl.trans(tl.load(gate_ptr + w_at + begin, mask=there, other=0.0)), acc=gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(tl.load(up_ptr + w_at + begin, mask=there, other=0.0)), acc=up, input_precision="ieee")
    out = gate / (1 + tl.exp(-gate)) * up
    at = row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < hidden)[None, :])


def _launch(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    rows, width = x.shape
    hidden = w_gate.shape[0]
    out = x.new_empty(rows, hidden)
    _gated[(-(-rows // 128) * -(-hidden // 128),)](
        x, w_gate, w_up, out, rows, hidden, width, ROWS=128, COLUMNS=128, DEPTH=64, num_warps=8, num_stages=3
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 96, generator=generator).to(dtype)
    weights = [(torch.randn(144, 96, generator=generator) / 10).to(dtype) for _ in range(2)]
    got = _launch(x.to(device), *(w.to(device) for w in weights))
    return [(got, gated_reference(x, *weights), gated_reference(x.double(), *(w.double() for w in weights)))]


_OP = Op("gated", _check)


def gated(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """See `gated_reference`. All contiguous."""
    return (_launch if x.dtype != torch.float32 and _OP.runs(x) else gated_reference)(x, w_gate, w_up)
