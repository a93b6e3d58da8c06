"""Text features -> what the DiT reads: two small bidirectional transformers over tokens and learned registers.

Runs once per prompt, never per step. There is no mask: places behind the last token hold registers, and everything
attends to everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.attention import attention
from ..kernels.head_gate import head_gate
from ..kernels.linear_gelu import linear_gelu
from ..kernels.qk_norm_rope import qk_norm_rope_pair
from .config.connector import REGISTERS, THETA, ConnectorStream
from .errors import InputError
from .instrument import Phase, Tick
from .replay import Replay

CONTEXT_LENGTH = 1024  # positions, the least a context has
EPS = 1e-6

Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin: (T, D / 2) float32


@dataclass(frozen=True)
class Conditioning:
    """One prompt, connected: video (1, L, D) and audio (1, L, Da) float32 CPU, L a multiple of 128 and at least 1024.

    notices: about the prompt, for everyone who reads its contexts; told: about the run that encoded it, for that run alone.
    """

    video: torch.Tensor
    audio: torch.Tensor
    notices: tuple[str, ...]
    told: tuple[str, ...] = ()


class Connectors:
    """Both streams of a prompt. D and Da are their widths, 4096 and 2048 in the published model.

    replay: graphs of these two; None: none are made.
    """

    def __init__(self, video: Connector, audio: Connector, replay: Replay | None) -> None:
        self.video = video
        self.audio = audio
        self._replay = replay

    @property
    def blocks(self) -> int:
        """Ticks that a forward makes: the total of its phase."""
        return len(self.video.transformer_1d_blocks) + len(self.audio.transformer_1d_blocks)

    def forward(
        self, video: torch.Tensor, audio: torch.Tensor, counts: Sequence[int], length: int, phase: Phase
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """video (B, n, D), audio (B, n, Da), valid rows first, `counts` of them -> contexts (B, length, D), (B, length, Da).

        `length` comes from `context_length`. Ticks `phase` once per block. Raises InputError for features that do not fit.
        """
        for name, features, connector in (("video", video, self.video), ("audio", audio, self.audio)):
            if features.shape[-1] != connector.width:
                raise InputError(
                    f"{name} text features are {features.shape[-1]} wide and this model reads {connector.width}; "
                    "encode the prompt with this model's own text encoder."
                )
        rows = (self.video.assemble(video, counts, length), self.audio.assemble(audio, counts, length))
        ropes = (self.video.rope(length, video.device), self.audio.rope(length, audio.device))

        def both(video: torch.Tensor, audio: torch.Tensor, tick: Tick) -> tuple[torch.Tensor, torch.Tensor]:
            return self.video(video, ropes[0], tick), self.audio(audio, ropes[1], tick)

        if self._replay is None or length > CONTEXT_LENGTH:  # longer ones are rare, and busy with arithmetic
            return both(*rows, phase.tick)
        return self._replay(both, rows, phase.tick, self.blocks, (*ropes[0], *ropes[1]))

    def unprocessed(self, features: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """The host's own LTX conditioning before connectors, features (1, n, D + Da): all n tokens are valid.

        Its length is the next multiple of 128, at least 1024: prompts longer than ours may be are legal here.
        """
        widths = (self.video.width, self.audio.width)
        if features.ndim != 3 or features.shape[0] != 1 or features.shape[2] != sum(widths) or features.shape[1] < 1:
            raise InputError(
                f"unprocessed text conditioning has shape {tuple(features.shape)}, wanted (1, tokens, {sum(widths)}); "
                "encode the prompt with this model's own text encoder."
            )
        video, audio = features.split(widths, dim=-1)
        tokens = features.shape[1]
        return self.forward(video, audio, [tokens], context_length(tokens), phase)


def context_length(tokens: int) -> int:
    """Positions of a context for `tokens` valid tokens: the next multiple of 128, at least 1024."""
    return max(CONTEXT_LENGTH, -(-tokens // REGISTERS) * REGISTERS)


class Connector(nn.Module):
    """One stream. Names are those below `video_embeddings_connector.` or `audio_embeddings_connector.`."""

    def __init__(self, config: ConnectorStream) -> None:
        super().__init__()
        self.config = config
        self.width = config.width
        self.learnable_registers = nn.Parameter(torch.zeros(REGISTERS, config.width))
        self.transformer_1d_blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self._rope: tuple[int, torch.device, Rope] | None = None

    @torch.no_grad()
    def forward(self, x: torch.Tensor, rope: Rope, tick: Tick) -> torch.Tensor:
        """Assembled rows (B, T, D) -> context (B, T, D). Ticks once per block."""
        for index, block in enumerate(self.transformer_1d_blocks, start=1):
            x = block(x, rope)
            tick(1, f"block {index}/{len(self.transformer_1d_blocks)}")
        return F.rms_norm(x, (self.width,), eps=EPS)

    def rope(self, length: int, device: torch.device) -> Rope:
        """`rotary` for this stream; that of the last length is kept: on the host it takes as long as the blocks on a fast device."""
        if self._rope is None or self._rope[:2] != (length, device):
            self._rope = (length, device, rotary(self.config, length, device))
        return self._rope[2]

    def assemble(self, features: torch.Tensor, counts: Sequence[int], length: int) -> torch.Tensor:
        """features (B, n, D), in row b the first counts[b] valid -> (B, length, D). `length`: a multiple of 128.

        Tokens first; position i behind them holds register i % 128: its place in the row counts, not in the padding.
        """
        registers = self.learnable_registers
        if length % REGISTERS or max(counts) > min(length, features.shape[1]) or len(counts) != len(features):
            raise ValueError(f"{tuple(features.shape)} features with {list(counts)} valid do not fit a context of {length}")
        x = registers.repeat(length // REGISTERS, 1).repeat(len(features), 1, 1)
        for row, count in enumerate(counts):
            x[row, :count] = features[row, :count]
        return x


class Block(nn.Module):
    """Attention and an MLP, each behind a norm without weights."""

    def __init__(self, config: ConnectorStream) -> None:
        super().__init__()
        self.attn1 = Attention(config)
        self.ff = FeedForward(config.width, config.ff_bias)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        # x: (B, T, D)
        x = x + self.attn1(F.rms_norm(x, x.shape[-1:], eps=EPS), rope)
        return x + self.ff(F.rms_norm(x, x.shape[-1:], eps=EPS))


class Attention(nn.Module):
    """Bidirectional; q and k are normalised over all heads together, each head's output is gated by its input."""

    def __init__(self, config: ConnectorStream) -> None:
        super().__init__()
        self.heads = config.heads
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.q_norm = nn.RMSNorm(config.width, EPS)
        self.k_norm = nn.RMSNorm(config.width, EPS)
        self.to_gate_logits = nn.Linear(config.width, config.heads)
        self.to_out = nn.ModuleList([nn.Linear(config.width, config.width)])

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]:
        return {f"to_qkv.{leaf}": tuple(f"{name}.{leaf}" for name in ("to_q", "to_k", "to_v")) for leaf in ("weight", "bias")}

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        # x: (B, T, D)
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k = qk_norm_rope_pair(q, k, self.q_norm.weight, self.k_norm.weight, *rope, None, self.heads, EPS)
        out = attention(q, k, v.unflatten(-1, (self.heads, -1)), None)  # (B, T, heads, head_dim)
        return self.to_out[0](head_gate(out, self.to_gate_logits(x)))


class FeedForward(nn.Module):
    """D -> 4 D -> D with a tanh GELU."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        up = nn.ModuleDict({"proj": nn.Linear(width, 4 * width, bias=bias)})
        self.net = nn.ModuleDict({"0": up, "2": nn.Linear(4 * width, width, bias=bias)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.net["0"]["proj"]
        return self.net["2"](linear_gelu(x, up.weight, up.bias))


def rotary(config: ConnectorStream, length: int, device: torch.device) -> Rope:
    """Tables of positions 0 to length - 1. Heads share no frequency: the D / 2 of them are dealt out to heads in order.

    Frequencies pi/2 * theta^(m / (D/2 - 1)) from float64, angles in float32 (up to 1e4 rad), made on the CPU so that
    every device gets the same.
    """
    steps = torch.linspace(0.0, 1.0, config.width // 2, dtype=torch.float64)
    frequencies = (THETA**steps * math.pi / 2).float()
    place = torch.arange(length, dtype=torch.float32) / config.max_position * 2 - 1  # [-1, 1) for positions below max_position
    angles = place[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)
