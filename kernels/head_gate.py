"""The per-head gate between attention and its output projection: out = o * 2 sigmoid(logits)."""

from __future__ import annotations

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide
from .quantise import Activation, Quantised, pointers, room, store_row, write_reference


def head_gate_reference(o: torch.Tensor, logits: torch.Tensor, out: Activation | None = None, quantised: bool = False) -> Activation:
    """o (R, T, H, d), logits (R, T, H), both may be strided over rows: (R, T, H*d), written into `out` where given.

    quantised: the result is for an fp8 product, in the form of quantise.py; an `out` says it by its own form.
    """
    dtype = wide(o.dtype)
    gated = (o.to(dtype) * (2 * torch.sigmoid(logits.to(dtype))).unsqueeze(-1)).flatten(2)
    return write_reference(gated, o.dtype, out, quantised or isinstance(out, Quantised))


@jit
def _kernel(
    o_ptr,  # (R, T, H, d), last dimension contiguous
    logits_ptr,  # (R, T, H), last dimension contiguous
    out_ptr,  # (R, T, H * d), contiguous
    scale_ptr,  # (R, T), written if QUANT
    o_row,
    o_token,
    o_head,
    logits_row,
    logits_token,
    tokens,
    width,
    QUANT: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out = o * 2 / (1 + exp(-logit of its head)); one program per token."""
    row, token = (tl.program_id(0) // tokens).to(tl.int64), (tl.program_id(0) % tokens).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    head = column // HEAD
    o = tl.load(o_ptr + row * o_row + token * o_token + head * o_head + column % HEAD, mask=there, other=0.0).to(tl.float32)
    logit = tl.load(logits_ptr + row * logits_row + token * logits_token + head, mask=there, other=0.0).to(tl.float32)
    place = row * tokens + token
    store_row(out_ptr, scale_ptr, place, place * width + column, o * 2.0 / (1.0 + tl.exp(-logit)), there, QUANT)


def _launch(o: torch.Tensor, logits: torch.Tensor, out: Activation | None = None, quantised: bool = False) -> Activation:
    batch, tokens, heads, head = o.shape
    o = o if o.stride(3) == 1 else o.contiguous()
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    if out is None:
        out = room(o, heads * head, quantised)
    values, scale = pointers(out)
    if out.shape != (batch, tokens, heads * head) or not values.is_contiguous():
        raise ValueError(f"head_gate writes ({batch}, {tokens}, {heads * head}), contiguous, got {tuple(out.shape)}")
    width = heads * head
    _kernel[(batch * tokens,)](
        o,
        logits,
        values,
        scale,
        o.stride(0),
        o.stride(1),
        o.stride(2),
        logits.stride(0),
        logits.stride(1),
        tokens,
        width,
        QUANT=isinstance(out, Quantised),
        HEAD=head,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(2, 4, 3, 24, generator=generator).to(dtype).transpose(1, 2)  # (R, T, H, d), as attention leaves it
    logits = torch.randn(2, 3, 9, generator=generator).to(dtype)[..., 5:]
    got = _launch(o.to(device), logits.to(device))
    return [(got, head_gate_reference(o, logits), head_gate_reference(o.double(), logits.double()))]


_OP = Op("head_gate", _check)


def head_gate(o: torch.Tensor, logits: torch.Tensor, out: Activation | None = None, quantised: bool = False) -> Activation:
    """See `head_gate_reference`."""
    return (_launch if _OP.runs(o) else head_gate_reference)(o, logits, out, quantised)
