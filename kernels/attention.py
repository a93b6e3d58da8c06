"""Dense attention: which back end computes it, for which shape, mask and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) v. q (R, T, H, d), k and v (R, S, H, d), bias (T, S) in q's dtype or None: (R, T, H, d)."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias).transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `attention_reference`."""
    return attention_reference(q, k, v, bias)
