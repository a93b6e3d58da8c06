"""The Gemma-4 text tower: token ids -> one normalised row of all hidden states per token.

What is unusual about it, all of it per the published checkpoint:
* two kinds of layers with different heads: sliding ones and, every sixth, full ones with a few wide key heads;
* full layers have no value projection: the value is the key projection, before its norm and rotation;
* queries and keys are normalised per head with a weight, values without one; attention scale is 1;
* norm weights multiply directly (no "1 + w"); every layer's output is multiplied by a learned scalar, residual included;
* full layers rotate a quarter of their head, with the frequency steps of the whole head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.qk_norm_rope import qk_norm_rope
from ..config.text import TowerConfig
from ..instrument import Phase
from ..linear import Linear

Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin: (n, head_dim / 2) float32


class Tower(nn.Module):
    """Runs on the valid tokens only: n of them at positions 0 to n - 1, 1 <= n <= 1024. Names are those below `model.`."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config, full) for full in config.full)
        self.norm = nn.RMSNorm(config.hidden, config.eps)

    def forward(self, ids: torch.Tensor, phase: Phase) -> torch.Tensor:
        """ids (n,) -> (n, H * S) in the weights' dtype: S = layers + 1 states, each of unit RMS over its H channels.

        Channel d of state s is at d * S + s, the order the projections were trained with. States go straight into this
        buffer: no second copy of all of them exists. Ticks `phase` once per layer.
        """
        count = self.config.states
        packed = ids.new_empty((len(ids), self.config.hidden, count), dtype=self.embed_tokens.weight.dtype)
        for index, state in enumerate(self.states(ids)):
            # One statistic per token and state; 1e-6 is the packing's own, not the tower's.
            packed[:, :, index] = F.rms_norm(state, (self.config.hidden,), eps=1e-6)
            if index:
                phase.tick(1, f"layer {index}/{count - 1}")
        return packed.flatten(1)

    def states(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """The S states (n, H) in order: scaled embedding, every layer's output but the last, the last one normalised."""
        x = self.embed_tokens(ids) * self._embedding_scale()
        yield x
        ropes = {full: self._rope(len(ids), full, ids.device) for full in (False, True)}
        window = sliding_mask(len(ids), self.config.window, ids.device)
        for index, layer in enumerate(self.layers, start=1):
            x = layer(x, ropes[layer.full], None if layer.full else window)
            yield self.norm(x) if index == len(self.layers) else x

    def _embedding_scale(self) -> float:
        """sqrt(H), rounded to the weights' dtype as the official code does: 62.0 instead of 61.97 in bf16."""
        return torch.tensor(math.sqrt(self.config.hidden), dtype=self.embed_tokens.weight.dtype).item()

    def _rope(self, n: int, full: bool, device: torch.device) -> Rope:
        config = self.config
        if full:
            return rope(n, config.full_head_dim, config.full_theta, config.rotated, device)
        return rope(n, config.head_dim, config.theta, 1.0, device)


class Layer(nn.Module):
    """Attention and a gated MLP, each normalised before and after, and the scalar at the end."""

    def __init__(self, config: TowerConfig, full: bool) -> None:
        super().__init__()
        self.full = full
        self.self_attn = Attention(config, full)
        self.mlp = MLP(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None) -> torch.Tensor:
        # x: (n, H)
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Attention(nn.Module):
    """Causal grouped-query attention. The projections of one input are one matrix: rows q, k and, on sliding layers, v."""

    def __init__(self, config: TowerConfig, full: bool) -> None:
        super().__init__()
        kv_heads, self.head_dim = (config.full_kv_heads, config.full_head_dim) if full else (config.kv_heads, config.head_dim)
        self.sources = ("q_proj", "k_proj") if full else ("q_proj", "k_proj", "v_proj")
        self.rows = [config.heads * self.head_dim] + [kv_heads * self.head_dim] * (len(self.sources) - 1)
        self.qkv_proj = Linear(config.hidden, sum(self.rows), bias=False)
        self.o_proj = Linear(config.heads * self.head_dim, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.eps)
        self.eps = config.eps

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return {"qkv_proj.weight": tuple(f"{name}.weight" for name in self.sources)}

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]:
        return {"qkv_proj.weight": tuple(self.rows)}

    def forward(self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None) -> torch.Tensor:
        # x: (n, H); mask: (n, n) bool, True = seen, None = causal
        q, k, *v = (part.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for part in self.qkv_proj(x).split(self.rows, dim=-1))
        v = F.rms_norm(v[0] if v else k, (self.head_dim,), eps=self.eps)
        # (heads, n, head_dim): to the op, whose norm spans all heads of a row, every head is a row of one head
        q, k = (qk_norm_rope(part, norm.weight, *rope, None, 1, self.eps).flatten(2) for part, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k, v = q[None], k[None], v[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), gate and up as one matrix."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return {"gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


def rope(n: int, head_dim: int, theta: float, rotated: float, device: torch.device) -> Rope:
    """cos and sin of position * theta^(-2j / head_dim); pairs j beyond the rotated share stay as they are.

    Frequencies and angles in float32, as in the official code; made on the CPU so that every device gets the same.
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    frequencies = 1.0 / (theta ** (2 * pairs / head_dim))
    frequencies[int(rotated * head_dim // 2) :] = 0.0
    angles = torch.arange(n, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def sliding_mask(n: int, window: int, device: torch.device) -> torch.Tensor | None:
    """(n, n) bool: a query sees itself and the window - 1 keys before it. None when that is plain causal attention."""
    if n <= window:
        return None
    steps_back = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
    return (steps_back >= 0) & (steps_back < window)


def working_bytes(config: TowerConfig, n: int, itemsize: int) -> int:
    """Upper estimate of the memory a forward of n tokens needs beside the weights."""
    widest = max(4 * config.intermediate, 4 * config.heads * max(config.head_dim, config.full_head_dim))
    scores = 2 * 4 * config.heads * n * n  # full layers may fall back to materialised float32 scores and their softmax
    partial_sums = 64 << 20  # of attention kernels that split a short row of keys over the whole device
    return n * itemsize * (config.hidden * (config.states + 8) + widest) + scores + partial_sums
