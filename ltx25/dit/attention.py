"""The two kinds of attention of a block: within a stream, and from a stream to something else (text, the other stream).

Products that read the same input are one product: q, k, v and the gate logits within a stream; q and gate, k and v
towards something else. Order in both: project, norm over all heads, rotate, attend, gate per head, project out.
"""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.attention import attention
from ...kernels.head_gate import head_gate
from ...kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_pair
from ...kernels.quantise import Activation, gelu_quantise
from ..linear import Linear
from .modality import Leg
from .rope import Rope
from .rows import Groups, Rows, join


class NormWeight(nn.Module):
    """The weight of a q or k norm, (heads * d,): it spans all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class SelfAttention(nn.Module):
    """Attention of one stream to itself, width D = heads * d."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.width, self.heads, self.eps = width, heads, eps
        self.qkvg = Linear(width, 3 * width + heads)
        self.q_norm, self.k_norm = NormWeight(width), NormWeight(width)
        self.to_out = nn.ModuleList([Linear(width, width)])

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return _merged("qkvg", "to_q", "to_k", "to_v", "to_gate_logits")

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]:
        return {f"qkvg.{leaf}": (self.width, self.width, self.width, self.heads) for leaf in ("weight", "bias")}

    def forward(self, x: Activation, rope: Rope, bias: torch.Tensor | None) -> torch.Tensor:
        """x (R, T, D), modulated; bias (T, T) or None: (R, T, D)."""
        q, k, v, gate = self._project(x)
        return self.to_out[0](self._gate(self._attend(q, k, v, rope, bias), gate))

    def perturbed(self, x: Rows, after: Groups, rope: Rope, bias: torch.Tensor | None) -> Rows:
        """As forward, but the STG leg's row carries its values in place of what attention makes of them.

        `after` are the groups behind this attention, the STG leg in a row of its own. Where that leg still shares the
        conditional row it takes values and gate from there. q and k of a row that needs neither are multiplied along: the
        merged product keeps the values' bits equal in every leg, for at most one leg in a perturbed block.
        """
        q, k, v, gate = (Rows(x.groups, parts, x.batched) for parts in zip(*map(self._project, x.tensors), strict=True))
        attended: dict[int, torch.Tensor] = {}
        gated = []
        for legs in after:
            row = x.of(legs[0])
            if legs == (Leg.STG,):
                o = v.row(row).unflatten(-1, (self.heads, -1))
            else:
                if row not in attended:
                    attended[row] = self._attend(q.row(row), k.row(row), v.row(row), rope, bias)
                o = attended[row]
            gated.append(self._gate(o, gate.row(row)))
        return join(after, gated, x.batched).map(self.to_out[0])

    def _gate(self, o: torch.Tensor, logits: torch.Tensor) -> Activation:
        return head_gate(o, logits, quantised=self.to_out[0].quantised)

    def _project(self, x: Activation) -> tuple[torch.Tensor, ...]:
        return self.qkvg(x).split((self.width, self.width, self.width, self.heads), dim=-1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope, bias: torch.Tensor | None) -> torch.Tensor:
        q, k = qk_norm_rope_pair(
            q, k, self.q_norm.weight, self.k_norm.weight, rope.cos, rope.sin, rope.rows, self.heads, self.eps
        )
        return attention(q, k, v.unflatten(-1, (self.heads, -1)), bias)


class CrossAttention(nn.Module):
    """Attention of a stream of `width` to rows of `context_width`, `inner` = heads * d wide. Never masked."""

    def __init__(self, width: int, context_width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.inner, self.heads, self.eps = inner, heads, eps
        self.qg = Linear(width, inner + heads)
        self.kv = Linear(context_width, 2 * inner)
        self.q_norm, self.k_norm = NormWeight(inner), NormWeight(inner)
        self.to_out = nn.ModuleList([Linear(inner, width)])

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return _merged("qg", "to_q", "to_gate_logits") | _merged("kv", "to_k", "to_v")

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]:
        return {f"qg.{leaf}": (self.inner, self.heads) for leaf in ("weight", "bias")}

    def keys_values(self, context: Activation, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """context (R, S, context_width), modulated: keys and values, (R, S, H, d) each."""
        k, v = self.kv(context).split(self.inner, dim=-1)
        return self._norm(k, self.k_norm, rope), v.unflatten(-1, (self.heads, -1))

    def queries(self, x: Activation, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x (R, T, width), modulated: queries (R, T, H, d) and gate logits (R, T, H)."""
        q, gate = self.qg(x).split((self.inner, self.heads), dim=-1)
        return self._norm(q, self.q_norm, rope), gate

    def forward(self, queries: Rows, gates: Rows, keys: Rows, values: Rows) -> Rows:
        """Query and gate rows (B, T, ...) against the key and value row of the same legs: rows (B, T, width).

        One key and value row may serve several rows of queries; its batch may be 1.
        """
        if queries.groups == keys.groups and _same_batch(queries, keys):
            return queries.map(self._attend, gates, keys, values)
        serving = [keys.of(legs[0]) for legs in queries.groups]
        if not queries.batched:
            parts = zip(queries.tensors, gates.tensors, serving, strict=True)
            return Rows(queries.groups, tuple(self._attend(q, gate, keys.row(j), values.row(j)) for q, gate, j in parts), False)
        gated = queries.room(self.inner, self.to_out[0].quantised)
        for j in sorted(set(serving)):
            start, stop = serving.index(j), len(serving) - serving[::-1].index(j)
            o = _attend_shared(queries.run(start, stop).tensors[0], keys.row(j), values.row(j))
            head_gate(o, gates.run(start, stop).tensors[0], out=gated.run(start, stop).tensors[0])
        return gated.map(self.to_out[0])

    def _attend(self, q: torch.Tensor, gate: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.to_out[0](head_gate(_attend_shared(q, k, v), gate, quantised=self.to_out[0].quantised))

    def _norm(self, x: torch.Tensor, weight: NormWeight, rope: Rope | None) -> torch.Tensor:
        table = (None, None, None) if rope is None else (rope.cos, rope.sin, rope.rows)
        return qk_norm_rope(x, weight.weight, *table, self.heads, self.eps)


class FeedForward(nn.Module):
    """Linear to 4 D, tanh GELU, linear back. Names are the file's: net.0.proj and net.2."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        enter = nn.Module()
        enter.proj = Linear(width, 4 * width, bias)
        self.net = nn.ModuleList([enter, nn.Identity(), Linear(4 * width, width, bias)])

    @property
    def quantised(self) -> bool:
        """In which form it likes its input."""
        return self.net[0].proj.quantised

    def forward(self, x: Activation) -> torch.Tensor:
        up, down = self.net[0].proj, self.net[2]
        return down(gelu_quantise(up(x)) if down.quantised else up.gelu(x))


def _same_batch(x: Rows, keys: Rows) -> bool:
    """Whether tensors pair up one to one: laid out alike, and no batch of one among larger ones."""
    return x.batched == keys.batched and x.tensors[0].shape[0] == keys.tensors[0].shape[0]


def _merged(own: str, *names: str) -> dict[str, tuple[str, ...]]:
    return {f"{own}.{leaf}": tuple(f"{name}.{leaf}" for name in names) for leaf in ("weight", "bias")}


def _attend_shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q (r * Bk, T, H, d) for r rows that share keys and values (Bk, S, H, d). Queries do not see each other, so
    rows that share a batch of one are laid end to end instead of copying what they share."""
    if q.shape[0] == k.shape[0]:
        return attention(q, k, v, None)
    if k.shape[0] == 1:
        return attention(q.reshape(1, -1, *q.shape[2:]), k, v, None).reshape(q.shape)
    return torch.cat([attention(part, k, v, None) for part in q.split(k.shape[0])])
