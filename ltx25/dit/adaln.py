"""adaLN: a timestep becomes the shifts, scales and gates of every norm. Evaluated per distinct timestep, never per token.

`Producer` is one of the eight small networks of the file; `StepTables` holds what all of them make for one step;
`StreamModulation` names the rows once a block's own table is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SINUSOID = 256
BLOCK_ROWS = 9
PROMPT_ROWS = 2
CROSS_ROWS = 4


class Producer(nn.Module):
    """Timestep -> `rows` modulation rows of `width`, and the embedding the output head reads. Names are the file's."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.emb = nn.Module()
        self.emb.timestep_embedder = nn.Module()
        self.emb.timestep_embedder.linear_1 = nn.Linear(SINUSOID, width)
        self.emb.timestep_embedder.linear_2 = nn.Linear(width, width)
        self.linear = nn.Linear(width, rows * width)

    def forward(self, wave: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """wave (K, 256) from `sinusoid`, any dtype and device: rows (K, rows, width) and embedding (K, width)."""
        embedder, weight = self.emb.timestep_embedder, self.linear.weight
        wave = wave.to(weight.device, weight.dtype)
        embedded = embedder.linear_2(F.silu(embedder.linear_1(wave)))
        return self.linear(F.silu(embedded)).unflatten(-1, (-1, embedded.shape[-1])), embedded


def sinusoid(t: torch.Tensor) -> torch.Tensor:
    """t (K,) float32, already times 1000: (K, 256) float32, cosines then sines, periods 2 pi to 2e4 pi."""
    half = SINUSOID // 2
    step = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angle = t.unsqueeze(-1) * step
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@dataclass(frozen=True)
class StreamTables:
    """What the producers make for one stream at one step. K distinct timesteps; cross parts None where it is alone."""

    rows: torch.Tensor  # (K, 9, D)
    embedded: torch.Tensor  # (K, D), for the output head
    prompt: torch.Tensor | None  # (1, 2, D) from the scalar sigma; None: the file has no prompt producers
    cross: torch.Tensor | None  # (K, 4, D)
    cross_gate: torch.Tensor | None  # (1, 1, D) from the *other* stream's scalar sigma


@dataclass(frozen=True)
class StepTables:
    """Everything adaLN makes for one step; the same for every leg, prompt and seed."""

    video: StreamTables | None
    audio: StreamTables | None


@dataclass(frozen=True)
class Modulation:
    """Rows of one sub-layer, (K, D) each: y = f(RMS(x) * (1 + scale) + shift), x += y * gate."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class StreamModulation:
    """All rows one block uses on one stream."""

    attn: Modulation
    text: Modulation
    ff: Modulation
    text_shift: torch.Tensor  # (1, D), of the context before keys and values
    text_scale: torch.Tensor
    a2v: tuple[torch.Tensor, torch.Tensor] | None  # (scale, shift), (K, D)
    v2a: tuple[torch.Tensor, torch.Tensor] | None
    cross_gate: torch.Tensor | None  # (1, D)


@dataclass(frozen=True)
class BlockModulation:
    """The rows of one block for both streams."""

    video: StreamModulation | None
    audio: StreamModulation | None


def modulate_blocks(
    tables: StreamTables, own: list[torch.Tensor], prompt: list[torch.Tensor], cross: list[torch.Tensor]
) -> list[StreamModulation]:
    """Add the tables of G consecutive blocks, each (9, D), (2, D) and (5, D), to the rows of this step.

    Tables are stored in float32 and rounded to the rows' dtype before the sum, as the official code does. Blocks go
    together so that a step costs a few launches instead of six a block.
    """
    rows = _stack(own, tables.rows).unsqueeze(1) + tables.rows  # (G, K, 9, D)
    text = _stack(prompt, tables.rows).unsqueeze(1)  # (G, 1, 2, D)
    if tables.prompt is not None:
        text = text + tables.prompt
    if tables.cross is None:
        return [_name(rows[i], text[i], None, None) for i in range(len(own))]
    both = _stack(cross, tables.rows).unsqueeze(1)  # (G, 1, 5, D)
    affine = both[:, :, :CROSS_ROWS] + tables.cross  # (G, K, 4, D)
    gate = both[:, :, CROSS_ROWS:] + tables.cross_gate  # (G, 1, 1, D)
    return [_name(rows[i], text[i], affine[i], gate[i]) for i in range(len(own))]


def _stack(block_tables: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(block_tables).to(like.dtype)


def _name(rows: torch.Tensor, text: torch.Tensor, affine: torch.Tensor | None, gate: torch.Tensor | None) -> StreamModulation:
    """Row numbers to names. The main table puts shift before scale, the one between the streams scale before shift."""
    r = rows.unbind(1)
    cross = (None, None) if affine is None else ((affine[:, 0], affine[:, 1]), (affine[:, 2], affine[:, 3]))
    return StreamModulation(
        attn=Modulation(*r[0:3]),
        ff=Modulation(*r[3:6]),
        text=Modulation(*r[6:9]),
        text_shift=text[:, 0],
        text_scale=text[:, 1],
        a2v=cross[0],
        v2a=cross[1],
        cross_gate=None if gate is None else gate[:, 0],
    )
