"""The cost law of one device: seconds per group of forwards from its arithmetic, fitted to what runs measured.

    seconds = constant + linear TFLOP * a + attention TFLOP * b        a, b in s/TFLOP, none negative

The two TFLOP columns come from the FLOP model, so the form is constant + linear + quadratic in tokens with the ratio
inside each term fixed by the model. Beside it stands the power law c * tokens^p. Residuals are relative: a fit serves
the 85 ms forward as well as the 16 s one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError

LEAST = 3  # geometries: two points lie on every law

# Where points do not tell the two rates apart, a TFLOP of attention is taken to cost what a TFLOP of matrix products
# does. Worth this much of a relative residual, so that it decides only what the points leave open.
PRIOR = 0.4
MOST_EXPONENT = 300.0


@dataclass(frozen=True)
class Point:
    """One geometry's measured group: `linear` and `attention` in TFLOP, `seconds` the median over `groups` of `runs`."""

    video: int  # tokens
    audio: int
    linear: float
    attention: float
    seconds: float
    groups: int
    runs: int
    spread: float  # half the distance between quartiles, relative

    @property
    def tokens(self) -> int:
        return self.video + self.audio


@dataclass(frozen=True)
class Law:
    """`constant` s, `linear` and `attention` s/TFLOP; e^`offset` s x tokens^`power` is the power law beside it.

    `residuals` and `power_residuals`: predicted / measured - 1 per point. `left_out`: the same for each point predicted
    from all others; `power_left_out` likewise. Tokens count both streams.
    """

    points: tuple[Point, ...]
    constant: float
    linear: float
    attention: float
    offset: float
    power: float
    residuals: tuple[float, ...]
    left_out: tuple[float, ...]
    power_residuals: tuple[float, ...]
    power_left_out: tuple[float, ...]

    @property
    def tokens(self) -> tuple[int, int]:
        """Fewest and most tokens seen: outside, a prediction is an extrapolation."""
        return min(p.tokens for p in self.points), max(p.tokens for p in self.points)

    @property
    def scale(self) -> float:
        """s of the power law at one token."""
        return _exponential(self.offset)

    @property
    def error(self) -> float:
        """Largest of the left-out errors, relative: what a geometry not seen was off by at most."""
        return max(map(abs, self.left_out))

    @property
    def within(self) -> str:
        """The error in words, rounded up: all left-out errors are within it."""
        return f"within {math.ceil(100 * self.error)} %"

    def seconds(self, linear: float, attention: float) -> float:
        """Of a group with so many TFLOP."""
        return self.constant + self.linear * linear + self.attention * attention

    def is_extrapolation(self, tokens: int) -> bool:
        fewest, most = self.tokens
        return not fewest <= tokens <= most


def fit_law(points: Sequence[Point]) -> Law:
    """Least squares of relative residuals, no coefficient negative. Raises InputError for fewer than three geometries."""
    points = tuple(sorted(points, key=lambda point: (point.tokens, point.video)))
    if len({(point.video, point.audio) for point in points}) < LEAST or len({point.tokens for point in points}) < LEAST:
        sizes = ", ".join(str(point.tokens) for point in points) or "none"
        raise InputError(
            f"{len(points)} geometr{'y' if len(points) == 1 else 'ies'} (tokens: {sizes}) are no law, "
            f"three different ones at least are; render another size on this device."
        )
    physical, power = _physical(points), _power(points)
    return Law(
        points,
        *physical,
        *power,
        residuals=tuple(_at(physical, p) / p.seconds - 1 for p in points),
        left_out=_left_out(points, _physical, _at),
        power_residuals=tuple(_at_power(power, p) / p.seconds - 1 for p in points),
        power_left_out=_left_out(points, _power, _at_power),
    )


def pooled(measured: Mapping[tuple[int, int], Sequence[Sequence[float]]], terms: Callable[[int, int], tuple[float, float]]) -> list[Point]:
    """Points from seconds per group: (video, audio) tokens -> one sequence per run; `terms` gives their two TFLOP."""
    points = []
    for (video, audio), runs in measured.items():
        seconds = sorted(itertools.chain(*runs))
        if not seconds:
            continue
        low, middle, high = np.percentile(seconds, (25, 50, 75))
        points.append(Point(video, audio, *terms(video, audio), float(middle), len(seconds), len(runs), float((high - low) / 2 / middle)))
    return points


def _at(law: tuple[float, float, float], point: Point) -> float:
    return law[0] + law[1] * point.linear + law[2] * point.attention


def _at_power(law: tuple[float, float], point: Point) -> float:
    return _exponential(law[0] + law[1] * math.log(point.tokens))


def _physical(points: Sequence[Point]) -> tuple[float, float, float]:
    rows = np.array([[1.0, p.linear, p.attention] for p in points]) / np.array([[p.seconds] for p in points])
    weight = PRIOR * statistics.median(p.attention / p.seconds for p in points)  # per s/TFLOP of difference, in relative residual
    rows = np.vstack([rows, weight * np.array([0.0, 1.0, -1.0])])
    wanted = np.append(np.ones(len(points)), 0.0)
    return tuple(least_squares(rows, wanted))


def least_squares(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Least squares with no coefficient below zero: the best of all choices of which ones are zero."""
    best, least = [0.0] * rows.shape[1], math.inf
    for size in range(1, rows.shape[1] + 1):
        for kept in itertools.combinations(range(rows.shape[1]), size):
            found, *_ = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)
            error = float(np.sum((rows[:, kept] @ found - wanted) ** 2))
            if (found >= 0).all() and error < least - 1e-15:
                least = error
                best = [0.0] * rows.shape[1]
                for column, value in zip(kept, found, strict=True):
                    best[column] = float(value)
    return best


def _power(points: Sequence[Point]) -> tuple[float, float]:
    """ln s at one token, and the power. Through sizes that are nearly one it may be any: neither e^offset nor tokens^power need be a float."""
    slope, offset = np.polyfit([math.log(p.tokens) for p in points], [math.log(p.seconds) for p in points], 1)
    return float(offset), float(slope)


def _exponential(x: float) -> float:
    """e^x, within what can be computed with afterwards."""
    return math.exp(min(max(x, -MOST_EXPONENT), MOST_EXPONENT))


def _left_out(points: Sequence[Point], fit: Callable, at: Callable) -> tuple[float, ...]:
    errors = []
    for i, point in enumerate(points):
        others = [*points[:i], *points[i + 1 :]]
        errors.append(at(fit(others), point) / point.seconds - 1)
    return tuple(errors)
