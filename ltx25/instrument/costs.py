"""What runs of one device cost, taken from their records: fixed parts and the law of the forwards, apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError
from ..shapes import AudioLatentShape
from .history import Run
from .law import LEAST, Law, fit_law, least_squares, pooled


@dataclass(frozen=True)
class Series:
    """Groups that one law can describe: equal in everything but the geometry."""

    device: str
    model: str
    legs: str
    kind: str
    text: int
    batch: int
    how: tuple[tuple[str, Any], ...]  # what of HOW the record says

    def __str__(self) -> str:
        how = ", ".join(f"{name} {value}" for name, value in self.how if value is not None)
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.legs}{kind} on {self.device} - {self.model}, {self.text} text tokens, batch {self.batch}" + (f", {how}" if how else "")


@dataclass
class Measured:
    """One series: (video, audio) tokens -> seconds per group, one list per run, the first group of each run apart."""

    seconds: dict[tuple[int, int], list[list[float]]] = field(default_factory=dict)
    first: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    terms: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # TFLOP linear, attention

    def law(self) -> Law:
        """Raises InputError for fewer than three geometries."""
        return fit_law(pooled(self.seconds, lambda video, audio: self.terms[video, audio]))

    @property
    def warm_up(self) -> float | None:
        """Median s that the first group of a run takes more than its others: allocation, kernel choice, capture."""
        extra = [
            first - statistics.median(group for run in self.seconds[tokens] for group in run)
            for tokens, firsts in self.first.items()
            for first in firsts
            if any(self.seconds.get(tokens, ()))
        ]
        return max(0.0, statistics.median(extra)) if extra else None


APART = 2.0  # how many times the smallest size the largest must be for a fixed part to show
HOW = ("precision", "residency", "batched", "graphs", "kernels", "adapted", "masked")


def measured_series(runs: Iterable[Run]) -> dict[Series, Measured]:
    """Every series the runs hold. Killed and cancelled runs count with the groups they completed."""
    found: dict[Series, Measured] = {}
    for run in runs:
        facts = {event.get("id"): event.get("facts") or {} for event in run.of("phase") if event.get("state") == "open"}
        seen: set[tuple[Any, Series]] = set()
        lists: dict[tuple[Any, Series], list[float]] = {}
        for forward in run.untraced:
            told = facts.get(forward.get("id"), {})
            work = next((w for w in (told.get("work") or ()) if (w["legs"], w["kind"]) == (forward.get("legs"), forward.get("kind"))), None)
            if work is None or not forward.get("seconds"):
                continue
            series = Series(
                str(run.header.get("device")),
                str(told.get("model")),
                work["legs"],
                work["kind"],
                told.get("text") or 0,
                told.get("batch") or 1,
                tuple((name, told.get(name)) for name in HOW if name in told),
            )
            tokens = (told["tokens"].get("video", 0), told["tokens"].get("audio", 0))
            measured = found.setdefault(series, Measured())
            measured.terms[tokens] = (work["linear"], work["attention"])
            key = (forward.get("id"), series)
            if key not in seen:
                seen.add(key)
                lists[key] = []
                measured.first.setdefault(tokens, []).append(forward["seconds"])
                measured.seconds.setdefault(tokens, []).append(lists[key])
            else:
                lists[key].append(forward["seconds"])
    for measured in found.values():  # a run of a single group has no second one: its first is all there is
        for tokens, firsts in measured.first.items():
            if not any(measured.seconds[tokens]):
                measured.seconds[tokens] = [[first] for first in firsts]
    return found


def model_of(run: Run) -> str | None:
    """The model a run sampled with, as `sample_work` wrote it; None for a run without a sample phase."""
    return next((event["facts"].get("model") for event in run.of("phase") if event.get("name") == "sample" and event.get("facts")), None)


@dataclass(frozen=True)
class Rate:
    """s = fixed + per_unit * units; `unit` says of what. `samples` phases, `sizes` different sizes among them, of `least` to
    `most` units. off: the largest relative residual; None where fixed and growing parts could not be told apart.
    """

    fixed: float
    per_unit: float
    unit: str
    samples: int
    sizes: int
    least: float
    most: float
    off: float | None
    seen: Mapping[float, Sequence[float]]

    def seconds(self, units: float) -> float:
        return statistics.median(self.seen[units]) if units in self.seen else self.fixed + self.per_unit * units

    def between(self, units: float) -> tuple[float, float] | None:
        """s, least and most: what the residuals leave open, or the repeats of this size; None where there is neither."""
        if self.off is not None:
            expected = self.seconds(units)
            return max(0.0, expected * (1 - self.off)), expected * (1 + self.off)
        repeats = self.seen.get(units, ())
        return (min(repeats), max(repeats)) if len(repeats) > 1 else None


def phase_rates(runs: Sequence[Run], device: str) -> dict[str, Rate]:
    """Fixed and per-unit cost of the phases around the forwards, by phase name, from finished phases on `device`.

    Units: bytes for load.*, prompt tokens for text.tower and text.project, frame pixels for upscale (of what comes out), encode.video, decode.video and
    mux, s of sound for encode.audio and decode.audio, a prompt for the rest. Too few or too similar sizes have no fixed part to tell apart.
    """
    samples: dict[str, list[tuple[float, float]]] = {}
    units: dict[str, str] = {}
    for run in runs:
        if run.header.get("device") != device:
            continue
        for row in run.phases:
            if row["error"] or row["name"] == "sample":
                continue
            unit, size = phase_units(row, run.header)
            if size:
                units[row["name"]] = unit
                samples.setdefault(row["name"], []).append((size, row["wall"]))
    return {name: rate_of(pairs, units[name]) for name, pairs in samples.items()}


def phase_units(row: dict[str, Any], header: dict[str, Any]) -> tuple[str, float]:
    """What a phase's time grows with, and how much of it there was (0: not known).

    A run may have clips of several sizes, so a phase says its own. Records of before have but the header's.
    """
    name, facts, clip = row["name"], row.get("facts") or {}, header.get("geometry") or {}
    if name.startswith("load."):
        return "byte", row["done"]
    if name in ("text.tower", "text.project"):
        return "token", facts["tokens"] if isinstance(facts.get("tokens"), int) else 0
    if name in ("encode.video", "decode.video", "upscale", "mux"):
        sizes = facts if facts.get("frames") or name == "encode.video" else clip
        clips = (sizes.get("batch") or 1) if name != "mux" else 1  # every clip is written by itself
        return "pixel", (sizes.get("width") or 0) * (sizes.get("height") or 0) * (sizes.get("frames") or 0) * clips
    if name in ("encode.audio", "decode.audio"):
        sound = sound_of(facts, clip if name == "decode.audio" else {})
        return "s of sound", 0 if sound is None else sound.seconds * ((facts if facts.get("latent_frames") else clip).get("batch") or 1)
    return "run", 1


def sound_of(facts: Mapping[str, Any], clip: Mapping[str, Any]) -> AudioLatentShape | None:
    """The sound that a phase says it works on; where it does not, that of the clip. None: not known, or none of this model's."""
    if facts.get("latent_frames"):
        return AudioLatentShape.of_latents(facts["latent_frames"])
    if not (clip.get("width") and clip.get("frames") and clip.get("frame_rate")):
        return None
    try:
        return AudioLatentShape.of_clip(clip["frames"], clip["frame_rate"])
    except InputError:
        return None


def rate_of(pairs: Sequence[tuple[float, float]], unit: str) -> Rate:
    """Least squares of relative residuals with neither part negative.

    Sizes that are too few or too much alike to tell a fixed part from a growing one give the rate at the largest of them:
    a line through two near points may run anywhere.
    """
    seen = {size: [seconds for other, seconds in pairs if other == size] for size, _ in pairs}
    sizes, span = len(seen), (min(seen), max(seen))
    if sizes < LEAST or span[1] < APART * span[0]:
        rate = statistics.median(seen[span[1]]) / span[1]
        return Rate(0.0, rate, unit, len(pairs), sizes, *span, None, seen)
    rows = np.array([[1.0, size / span[1]] for size, _ in pairs]) / np.array([[max(seconds, 1e-9)] for _, seconds in pairs])
    fixed, largest = least_squares(rows, np.ones(len(pairs)))
    slope = largest / span[1]
    off = max(abs((fixed + slope * size) / max(seconds, 1e-9) - 1) for size, seconds in pairs)
    return Rate(fixed, slope, unit, len(pairs), sizes, *span, off, {})


def law_of(series: Measured) -> Law | str:
    """The law, or the sentence that says why there is none."""
    try:
        return series.law()
    except InputError as error:
        return str(error)
