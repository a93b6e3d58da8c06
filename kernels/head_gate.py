"""The per-head gate between attention and its output projection: out = o * 2 sigmoid(logits)."""

from __future__ import annotations

import torch

from .dispatch import wide


def head_gate_reference(o: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """o (R, T, H, d), logits (R, T, H), both may be strided over rows: (R, T, H*d), written into `out` where given."""
    dtype = wide(o.dtype)
    gated = (o.to(dtype) * (2 * torch.sigmoid(logits.to(dtype))).unsqueeze(-1)).flatten(2).to(o.dtype)
    return gated if out is None else out.copy_(gated)


def head_gate(o: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `head_gate_reference`."""
    return head_gate_reference(o, logits, out)
