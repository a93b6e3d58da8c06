"""The duration head: how many seconds a prompt wants, read from its contexts.

Source: ltx_core.duration_head. One learned query attends to all tokens of both contexts; an MLP gives the logarithm of
the seconds.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .config.duration import DurationConfig
from .errors import InputError
from .shapes import MAX_FRAMES, Compression, check_frame_rate, seconds_to_frames

LEAST, MOST = 1.0, 20.0  # s, the official limits
LONGEST = 1e6  # s, wanted of a limit: beyond it nothing is a clip


class DurationHead(nn.Module):
    """Contexts -> seconds. Parameter names are the file's after its prefix."""

    def __init__(self, config: DurationConfig) -> None:
        super().__init__()
        self.video_input_proj = nn.Linear(config.video, config.width)
        self.audio_input_proj = nn.Linear(config.audio, config.width)
        self.video_modality_emb = nn.Parameter(torch.empty(config.width))
        self.audio_modality_emb = nn.Parameter(torch.empty(config.width))
        self.attention_pooler = _Pooler(config)
        self.mlp_hidden = nn.Linear(config.width * config.queries, config.hidden)
        self.mlp_out = nn.Linear(config.hidden, 1)

    def forward(self, video: torch.Tensor | None, audio: torch.Tensor | None) -> torch.Tensor:
        """(B, T, D) and (B, T', Da), one of them may be None -> (B,) seconds."""
        tokens = []
        if video is not None:
            tokens.append(self.video_input_proj(video) + self.video_modality_emb)
        if audio is not None:
            tokens.append(self.audio_input_proj(audio) + self.audio_modality_emb)
        if not tokens:
            raise InputError("the duration head was given neither a video nor an audio context; connect a prompt from Encode Gemma Text.")
        pooled = self.attention_pooler(torch.cat(tokens, 1)).flatten(1)
        return self.mlp_out(F.gelu(self.mlp_hidden(pooled), approximate="tanh")).squeeze(-1).exp()


class _Pooler(nn.Module):
    def __init__(self, config: DurationConfig) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.empty(config.queries, config.width))
        self.cross_attn = _Attention(config.width, config.heads)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.cross_attn(self.query_tokens.expand(tokens.shape[0], -1, -1), tokens)


class _Attention(nn.Module):
    """Multi-head attention whose q, k and v share one stacked weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2) for x, w, b in zip((queries, tokens, tokens), weights, biases, strict=True))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def frames_of(seconds: float, frame_rate: float, least: float, most: float, compression: Compression) -> int:
    """Frames on the grid for a predicted length in s, held between `least` and `most` s.

    As ltx_pipelines, except that a least length below one frame counts as one frame there and here on (theirs fails), and
    that where no length of the grid lies between the two the longest below them is taken (theirs is one no clip can have).
    Never more frames than a clip may have. Raises InputError unless 0 <= least <= most, and for seconds that are no finite number.
    """
    if not 0.0 <= least <= most <= LONGEST:
        raise InputError(f"a length from {least:g} to {most:g} s is no range; min_seconds must be 0 or more and not above max_seconds, such as {LEAST:g} and {MOST:g}.")
    if not math.isfinite(seconds):
        raise InputError(f"the duration head answered {seconds} s; download its file again, and that of the text encoder.")
    rate = check_frame_rate(frame_rate)
    limits = (min(max(1, round(limit * rate)), MAX_FRAMES) for limit in (least, most))
    return compression.snap(seconds_to_frames(seconds, rate, *limits, compression))
