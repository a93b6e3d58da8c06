"""What goes into the DiT: one stream's fixed facts, the legs of a step, and what comes out.

Letters: B batch, N video tokens, M audio tokens, T tokens of either stream, D / Da stream widths, L text tokens (1024).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class Stream:
    """What is fixed about one stream for a whole denoise: where its tokens are and how each is conditioned.

    positions: (axes, T, 2) float32, [start, end) per axis: video seconds, pixel row, pixel column; audio seconds.
    mask: (T,) float32 in [0, 1], 1 = generate, 0 = keep; a token's timestep is mask * sigma.
    marked: (T,) bool, tokens that get the keyframe embedding (first target frame, generated slots); None for audio.
    frozen: the stream is given: its scalar sigma is 0 at every step.
    bias: (T, T) float32 added to self-attention scores, None for none (attention strength of conditions).
    """

    positions: torch.Tensor
    mask: torch.Tensor
    marked: torch.Tensor | None
    frozen: bool
    bias: torch.Tensor | None


class Leg(Enum):
    """One forward of a guided step. Every leg predicts both streams."""

    COND = "cond"  # positive text
    UNCOND = "uncond"  # negative text
    STG = "stg"  # positive text, self-attention replaced by its values in some blocks
    ISOLATED = "mod"  # positive text, no attention between the streams in any block


BOTH = frozenset({"video", "audio"})


@dataclass(frozen=True)
class LegPlan:
    """Which forwards a step needs. Equal plans do equal work, whatever the scales: what a captured graph is keyed by.

    legs: in the order cond, uncond, stg, mod; COND always first.
    stg_video_blocks / stg_audio_blocks: 0-based blocks whose (audio_)attn1 is replaced in the STG leg.
    video / audio: False: that stream keeps its projected tokens through all blocks (skip_step), the other still reads it.
    isolated: streams whose isolated leg is read; the streams do not meet in it, so another one is not run there.
    read: streams whose velocities are read at all (a frozen one's are not). What is not read comes back as None.
    kept: velocities of tokens of mask 0 are read, too (a sampler needs none: x0 = x - 0 v). Else those before the first and
        behind the last other token come back as 0, and the last feed-forward and the head leave them out.
    """

    legs: tuple[Leg, ...]
    stg_video_blocks: frozenset[int]
    stg_audio_blocks: frozenset[int]
    video: bool
    audio: bool
    isolated: frozenset[str] = BOTH
    read: frozenset[str] = BOTH
    kept: bool = True


@dataclass(frozen=True)
class Contexts:
    """Text after the connectors, one side (positive or negative): (B or 1, L, D) and (B or 1, L, Da); None: no such stream."""

    video: torch.Tensor | None
    audio: torch.Tensor | None


@dataclass(frozen=True)
class Velocity:
    """The model's output for one leg: (B, N, C) and (B, M, Ca), None for a stream that is not there."""

    video: torch.Tensor | None
    audio: torch.Tensor | None
