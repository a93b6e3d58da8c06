"""All modulation of a schedule, made before the loop: one small product per producer for many steps together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .adaln import Producer, StepTables, StreamTables, sinusoid
from .geometry import Geometry, timestep_of_levels

if TYPE_CHECKING:
    from .model import DiT

_ROWS_KEPT = 2048  # distinct timesteps of both streams over all steps: 0.5 GB at the published widths in bf16
_ROWS_AT_ONCE = 128  # of one product: a cancel acts between two, and the usual schedules need no more


class ScheduleTables(Sequence[StepTables]):
    """The tables of every step: all made here, or one when asked for where there would be too many rows to keep.

    told: called with the number of steps that are made, every so many of them; may raise to cancel.
    """

    def __init__(self, dit: DiT, geometry: Geometry, sigmas: Sequence[tuple[float, float]], told: Callable[[int], None]) -> None:
        self._dit, self._geometry, self._sigmas = dit, geometry, list(sigmas)
        levels = sum(len(stream.levels) for stream in (geometry.video, geometry.audio) if stream is not None)
        self._made: list[StepTables] | None = None
        if levels * len(self._sigmas) <= _ROWS_KEPT:
            self._made, together = [], max(1, _ROWS_AT_ONCE // levels)
            for first in range(0, len(self._sigmas), together):
                self._made += step_tables(dit, geometry, self._sigmas[first : first + together])
                told(len(self._made))

    def __len__(self) -> int:
        return len(self._sigmas)

    def __getitem__(self, step: int) -> StepTables:
        if self._made is not None:
            return self._made[step]
        with torch.no_grad():
            return step_tables(self._dit, self._geometry, [self._sigmas[step]])[0]


def step_tables(dit: DiT, geometry: Geometry, sigmas: Sequence[tuple[float, float]]) -> list[StepTables]:
    """Tables of steps with the given (video, audio) sigmas in [0, 1]. Timesteps and their sinusoids are float32 on the CPU."""
    if not sigmas:
        return []
    video, audio, config = geometry.video, geometry.audio, dit.config
    scale = config.timestep_scale
    scalars = [  # each stream's scalar sigma per step, (S,)
        None if stream is None else torch.tensor([stream.sigma(pair[side]) for pair in sigmas], dtype=torch.float32)
        for side, stream in enumerate((video, audio))
    ]
    streams = []
    for side, (stream, names) in enumerate(((video, _VIDEO), (audio, _AUDIO))):
        if stream is None:
            streams.append([None] * len(sigmas))
            continue
        levels = torch.stack([timestep_of_levels(stream, pair[side]) for pair in sigmas])  # (S, K)
        rows, embedded = _produce(getattr(dit, names[0]), levels, scale)
        prompt = _one_by_one(getattr(dit, names[1]), scalars[side], scale) if config.prompt_adaln else [None] * len(sigmas)
        other = scalars[1 - side]
        if other is None:
            cross = gate = [None] * len(sigmas)
        else:
            cross = _produce(getattr(dit, names[2]), levels, scale)[0]
            gate = _produce(getattr(dit, names[3]), other[:, None], scale, config.cross_timestep_scale / scale)[0]
        streams.append([StreamTables(*parts) for parts in zip(rows, embedded, prompt, cross, gate, strict=True)])
    return [StepTables(v, a) for v, a in zip(*streams, strict=True)]


# Producers of a stream: block rows, prompt rows, rows between the streams, and the gate of what the stream receives,
# which is made from the other stream's sigma.
_VIDEO = ("adaln_single", "prompt_adaln_single", "av_ca_video_scale_shift_adaln_single", "av_ca_a2v_gate_adaln_single")
_AUDIO = ("audio_adaln_single", "audio_prompt_adaln_single", "av_ca_audio_scale_shift_adaln_single", "av_ca_v2a_gate_adaln_single")


def _one_by_one(producer: Producer, t: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """t (S,) in [0, 1]: rows (1, rows, D) of every step. Each is a product of its own, so that its bits, and those of the
    keys and values made with it, are the same in whatever schedule a sigma stands."""
    made = {float(level): producer(sinusoid(level * scale))[0] for level in t.unique().split(1)}
    return [made[float(level)] for level in t]


def _produce(producer: Producer, t: torch.Tensor, scale: float, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """t (S, K) in [0, 1]: rows (S, K, rows, D) and embedding (S, K, D)."""
    rows, embedded = producer(sinusoid((t * scale * factor).flatten()))
    return rows.unflatten(0, t.shape), embedded.unflatten(0, t.shape)
