"""The state of one stream for several legs at once, and where in the block stack legs stop being equal.

Legs that are still equal share a row. A row is (B, T, D); rows sit in one tensor (batched: one launch serves all) or in
one tensor each (sequential: every op has the shapes of a single forward, so results equal it bit for bit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from ...kernels.quantise import Activation, Quantised, room
from .geometry import StreamGeometry
from .modality import Leg, LegPlan

Groups = tuple[tuple[Leg, ...], ...]

# Rows in this order: those with audio-video attention are a prefix, those with the positive text a suffix.
ORDER = (Leg.UNCOND, Leg.COND, Leg.STG, Leg.ISOLATED)


@dataclass(frozen=True)
class Rows:
    """`groups` names the legs of every row; `tensors` is one tensor of (rows * B, ...) or one of (B, ...) per row."""

    groups: Groups
    tensors: tuple[Activation, ...]
    batched: bool

    def map(self, op: Callable[..., Activation], *others: Rows) -> Rows:
        """Apply `op` to each tensor, together with those of `others` (same groups, same layout)."""
        results = tuple(op(*parts) for parts in zip(self.tensors, *(other.tensors for other in others), strict=True))
        return Rows(self.groups, results, self.batched)

    def spread(self, op: Callable[..., Sequence[Activation]], *others: Rows) -> tuple[Rows, ...]:
        """As `map`, for an op with several results: one Rows for each."""
        results = [op(*parts) for parts in zip(self.tensors, *(other.tensors for other in others), strict=True)]
        return tuple(Rows(self.groups, column, self.batched) for column in zip(*results, strict=True))

    def room(self, width: int, quantised: bool) -> Rows:
        """Unwritten memory for results (B, T, `width`) of every row."""
        return self.map(lambda tensor: room(tensor, width, quantised))

    def run(self, start: int, stop: int) -> Rows:
        """Rows [start, stop) as views: writing to them writes to this state."""
        if start == 0 and stop == len(self.groups):
            return self
        if not self.batched:
            return Rows(self.groups[start:stop], self.tensors[start:stop], False)
        size = self.tensors[0].shape[0] // len(self.groups)
        return Rows(self.groups[start:stop], (self.tensors[0][start * size : stop * size],), True)

    def tokens(self, start: int, stop: int) -> Rows:
        """Tokens [start, stop) of every row, copied: products want them without gaps."""
        return self.map(lambda tensor: _copied(tensor, start, stop))

    def row(self, number: int) -> Activation:
        """(B, ...), a view."""
        return self.run(number, number + 1).tensors[0]

    def of(self, leg: Leg) -> int:
        """The number of the row that holds `leg`."""
        return next(number for number, legs in enumerate(self.groups) if leg in legs)

    def fork(self, groups: Groups) -> Rows:
        """Finer groups: rows that split are copied, so that each may be written on its own."""
        if groups == self.groups:
            return self
        sources = [self.of(legs[0]) for legs in groups]
        parts = [self.row(source) for source in sources]
        if self.batched:
            return Rows(groups, (_cat(parts),), True)
        first = {source: sources.index(source) for source in sources}
        return Rows(groups, tuple(part if first[s] == i else _cat([part]) for i, (s, part) in enumerate(zip(sources, parts, strict=True))), False)


def join(groups: Groups, parts: list[Activation], batched: bool) -> Rows:
    """Rows from one (B, ...) tensor each, laid out as asked."""
    return Rows(groups, (_cat(parts),) if batched else tuple(parts), batched)


def _copied(tensor: Activation, start: int, stop: int) -> Activation:
    if isinstance(tensor, Quantised):
        return Quantised(_copied(tensor.values, start, stop), _copied(tensor.scale, start, stop))
    return tensor[:, start:stop].clone(memory_format=torch.contiguous_format)


def _cat(parts: list[Activation]) -> Activation:
    """A new tensor of all rows of `parts`."""
    if isinstance(parts[0], Quantised):
        return Quantised(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]))
    return torch.cat(parts)


class Point(IntEnum):
    """Places in a block where legs can part."""

    ENTRY = 0
    TEXT = 1  # after self-attention
    CROSS = 2  # after text attention


@dataclass(frozen=True)
class StreamSchedule:
    """When each leg leaves the others, for one stream: (block, point); None: never. What a plan and a geometry decide."""

    legs: tuple[Leg, ...]
    enabled: bool
    read: bool  # anyone wants its velocities; else its last block ends where nobody reads it any more
    kept: bool  # ... those of tokens of mask 0, too
    perturbed: frozenset[int]  # blocks whose self-attention the STG leg replaces
    stg: tuple[int, Point] | None
    isolated: tuple[int, Point] | None

    def groups(self, block: int, point: Point) -> Groups:
        """Legs that are still equal at `point` of `block`, in row order. A stream that is not updated has one row."""
        if not self.enabled:
            return (self.legs,)
        here = (block, point)
        parted: dict[tuple[bool, ...], list[Leg]] = {}
        for leg in self.legs:
            key = (
                leg is Leg.UNCOND and here >= (0, Point.TEXT),
                leg is Leg.STG and self.stg is not None and here >= self.stg,
                leg is Leg.ISOLATED and self.isolated is not None and here >= self.isolated,
            )
            parted.setdefault(key, []).append(leg)
        return tuple(tuple(legs) for legs in parted.values())

    def span(self, geometry: StreamGeometry) -> tuple[int, int] | None:
        """[first, stop) of the tokens whose velocities are read; None: of all."""
        return None if self.kept or not self.enabled or geometry.made == (0, geometry.tokens) else geometry.made


@dataclass(frozen=True)
class Schedule:
    """Both streams' schedules; None: the stream is not there."""

    video: StreamSchedule | None
    audio: StreamSchedule | None


def schedule(plan: LegPlan, has_video: bool, has_audio: bool) -> Schedule:
    """Work out which legs are equal where. The STG leg is the conditional one up to its first perturbed block: there a
    perturbed stream parts after self-attention, the other one before it meets it.
    """
    legs = tuple(leg for leg in ORDER if leg in plan.legs)
    video, audio = has_video and plan.video, has_audio and plan.audio
    perturbed = (plan.stg_video_blocks if video else frozenset(), plan.stg_audio_blocks if audio else frozenset())
    first = min(perturbed[0] | perturbed[1], default=None)
    meet = has_video and has_audio
    streams = []
    for name, there, enabled, own in (("video", has_video, video, perturbed[0]), ("audio", has_audio, audio, perturbed[1])):
        if first is None or not (own or meet):
            stg = None
        elif meet:
            stg = (first, Point.TEXT if first in own else Point.CROSS)
        else:
            stg = (min(own), Point.TEXT)
        isolated = (0, Point.CROSS) if meet else None
        # Isolated streams do not see each other: one that nobody reads there is not run.
        mine = tuple(leg for leg in legs if leg is not Leg.ISOLATED or not meet or name in plan.isolated)
        streams.append(StreamSchedule(mine, enabled, name in plan.read, plan.kept, own, stg, isolated) if there and mine else None)
    return Schedule(*streams)
