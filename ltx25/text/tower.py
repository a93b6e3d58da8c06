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

from ...kernels.gelu_gate import gelu_gate
from ...kernels.grouped_heads import grouped_heads
from ...kernels.sandwich_norm import sandwich_norm
from ..config.text import TowerConfig
from ..instrument import Tick
from ..linear import Linear
from .tokenizer import MAX_TOKENS

PACKED_EPS = 1e-6  # of the norm that packs states: its own, not the tower's

Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin: (n, head_dim / 2) float32


class Tower(nn.Module):
    """Runs on the valid tokens only: n of them at positions 0 to n - 1, 1 <= n <= 1024. Names are those below `model.`."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config, full) for full in config.full)
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self._tables: dict[torch.device, dict[bool, Rope]] = {}

    def forward(self, ids: torch.Tensor, tick: Tick) -> torch.Tensor:
        """ids (n,) -> (n, H * S) in the weights' dtype: S = layers + 1 states, each of unit RMS over its H channels.

        Channel d of state s is at d * S + s, the order the projections were trained with. States go straight into this
        buffer: no second copy of all of them exists. Ticks once per layer.
        """
        count = self.config.states
        packed = ids.new_empty((len(ids), self.config.hidden, count), dtype=self.embed_tokens.weight.dtype)
        for index, _ in enumerate(self.states(ids, packed)):
            if index:
                tick(1, f"layer {index}/{count - 1}")
        return packed.flatten(1)

    def states(self, ids: torch.Tensor, packed: torch.Tensor) -> Iterator[torch.Tensor]:
        """The S states (n, H) in order: scaled embedding, every layer's output but the last, the last one normalised.

        packed (n, H, S) gets the RMS norm of each: one statistic per token and state.
        """
        x = self.embed_tokens(ids) * self._embedding_scale()
        packed[:, :, 0] = _packed(x)
        yield x
        ropes = {full: self._rope(len(ids), full, ids.device) for full in (False, True)}
        window = sliding_mask(len(ids), self.config.window, ids.device)
        last = len(self.layers)
        for index, layer in enumerate(self.layers, start=1):
            x = layer(x, ropes[layer.full], None if layer.full else window, packed[:, :, index])
            if index == last:  # packed once more
                x = self.norm(x)
                packed[:, :, index] = _packed(x)
            yield x

    def _embedding_scale(self) -> float:
        """sqrt(H), rounded to the weights' dtype as the official code does: 62.0 instead of 61.97 in bf16."""
        return torch.tensor(math.sqrt(self.config.hidden), dtype=self.embed_tokens.weight.dtype).item()

    def _rope(self, n: int, full: bool, device: torch.device) -> Rope:
        """The first n rows of tables made once: on the host they take longer than the tower on a fast device."""
        if device not in self._tables:
            config = self.config
            self._tables[device] = {
                False: rope(MAX_TOKENS, config.head_dim, config.theta, 1.0, device),
                True: rope(MAX_TOKENS, config.full_head_dim, config.full_theta, config.rotated, device),
            }
        cos, sin = self._tables[device][full]
        return cos[:n], sin[:n]


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

    def forward(self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None, state: torch.Tensor | None) -> torch.Tensor:
        """x (n, H) -> (n, H). state (n, H), any strides, gets the packed form of the result; None: it is not packed."""
        eps = self.input_layernorm.eps
        y = self.self_attn(self.input_layernorm(x), rope, mask)
        x, y = sandwich_norm(x, y, self.post_attention_layernorm.weight, None, self.pre_feedforward_layernorm.weight, None, eps, PACKED_EPS)
        return sandwich_norm(x, self.mlp(y), self.post_feedforward_layernorm.weight, self.layer_scalar, None, state, eps, PACKED_EPS)[0]


class Attention(nn.Module):
    """Causal grouped-query attention. The projections of one input are one matrix: rows q, k and, on sliding layers, v."""

    def __init__(self, config: TowerConfig, full: bool) -> None:
        super().__init__()
        self.heads, self.eps = config.heads, config.eps
        self.kv_heads, self.head_dim = (config.full_kv_heads, config.full_head_dim) if full else (config.kv_heads, config.head_dim)
        self.sources = ("q_proj", "k_proj") if full else ("q_proj", "k_proj", "v_proj")
        self.rows = [config.heads * self.head_dim] + [self.kv_heads * self.head_dim] * (len(self.sources) - 1)
        self.qkv_proj = Linear(config.hidden, sum(self.rows), bias=False)
        self.o_proj = Linear(config.heads * self.head_dim, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.eps)

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return {"qkv_proj.weight": tuple(f"{name}.weight" for name in self.sources)}

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]:
        return {"qkv_proj.weight": tuple(self.rows)}

    def forward(self, x: torch.Tensor, rope: Rope, mask: torch.Tensor | None) -> torch.Tensor:
        # x: (n, H); mask: (n, n) bool, True = seen, None = causal
        parts = grouped_heads(self.qkv_proj(x), self.q_norm.weight, self.k_norm.weight, *rope, self.heads, self.kv_heads, self.eps)
        q, k, v = (part.transpose(0, 1)[None] for part in parts)  # (1, heads, n, head_dim)
        if self.kv_heads == 1:  # a view: back ends that know no groups, the only ones for heads this wide, then take it as well
            k, v = (part.expand(-1, self.heads, -1, -1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=self.kv_heads > 1)
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
        return self.down_proj(gelu_gate(self.gate_up_proj(x)))


def _packed(state: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(state, state.shape[-1:], eps=PACKED_EPS)


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
