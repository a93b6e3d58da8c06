"""Seconds of the forwards to come, from the records of a device: what a plan and a render's first line say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError
from .costs import Measured, law_of, measured_series
from .header import device_name
from .history import Run, read_run
from .law import Law
from .memory import query
from .selftest import quick_product
from .units import between_text, seconds_text
from .work import TERA

NEWEST = 40  # records a render looks at before it starts: some hundredths of a second
WIDE = 1.5  # how far apart the ends of a prediction are for both to be shown
SHARE = 0.6  # of the measured rate of matrix products that forwards reach, where no record tells
NEAR = 0.05  # relative distance in arithmetic up to which a geometry counts as one seen


@dataclass(frozen=True)
class Guess:
    """s of one group, s the first one takes more, what that rests on, whether it goes beyond what was measured.

    between: least and most s of one group that what was measured allows; None: not known.
    """

    seconds: float
    warm_up: float
    basis: str
    extrapolated: bool
    between: tuple[float, float] | None


class Forecast:
    """What the forwards of one model cost on one device, both by the names the records give them."""

    def __init__(self, runs: Iterable[Run], device: str, model: str) -> None:
        self.series = {key: found for key, found in measured_series(runs).items() if (key.device, key.model) == (device, model)}
        self._laws = {key: law_of(found) for key, found in self.series.items()}

    def group(
        self, legs: str, kind: str, linear: float, attention: float, tokens: int, batched: bool | None, precision: str | None = None
    ) -> Guess | None:
        """One group of so many TFLOP and tokens; None without any record. Records of other legs, or of weights in another
        precision, serve where these have none.
        """
        found = [key for key in self.series if precision in (None, dict(key.how).get("precision", precision))]
        foreign = "" if found else " in another precision"
        for exact in (True, False):
            choices = [key for key in found or self.series if not exact or (key.legs, key.kind) == (legs, kind)]
            choices.sort(key=lambda key: (batched in (None, dict(key.how).get("batched")), len(self.series[key].seconds)), reverse=True)
            other = ("" if exact else " of other legs") + foreign
            for key in choices:
                law = self._laws[key]
                if isinstance(law, Law):
                    outside = law.is_extrapolation(tokens)
                    mark = f", extrapolated from {law.tokens[0]} to {law.tokens[1]} tokens" if outside else ""
                    basis = f"law of {len(law.points)} geometries{other}, {law.within}{mark}"
                    seconds = law.seconds(linear, attention)
                    between = max(0.0, seconds * (1 - law.error)), seconds * (1 + law.error)
                    return Guess(seconds, self.series[key].warm_up or 0.0, basis, outside or bool(other), between)
            if choices:
                return _in_proportion(self.series[choices[0]], linear + attention, other)
        return None

    def sentence(self, facts: Mapping[str, Any], flops: Callable[[], float | None]) -> str:
        """What a sample phase with these facts (engine.facts) shows before its first forward.

        flops: measures the device's FLOP/s in matrix products, for want of a record; where that finds none either, "".
        """
        tokens = sum((facts.get("tokens") or {}).values())
        seconds, least, most, bases = 0.0, 0.0, 0.0, []
        for work in facts.get("work") or ():
            guess = self.group(work["legs"], work["kind"], work["linear"], work["attention"], tokens, facts.get("batched"), facts.get("precision"))
            if guess is None:
                rate = flops()
                if rate is None:
                    return ""
                guess = by_arithmetic(work["linear"] + work["attention"], rate)
            seconds += work["groups"] * guess.seconds + guess.warm_up
            low, high = guess.between or (guess.seconds, guess.seconds)
            least, most = least + work["groups"] * low + guess.warm_up, most + work["groups"] * high + guess.warm_up
            bases.append(guess.basis)
        span = f", {between_text(least, most)} possible" if most > WIDE * least else ""
        return f"about {seconds_text(seconds, rough=True)} predicted{span} ({'; '.join(dict.fromkeys(bases))})" if bases else ""


def forecaster(folder: Path, device: torch.device) -> Callable[[Mapping[str, Any]], str]:
    """For Engine.forecast: facts of a sample phase -> the sentence, from the newest records in `folder`."""

    def forecast(facts: Mapping[str, Any]) -> str:
        runs = []
        for path in sorted(folder.glob("*.jsonl"))[-NEWEST:]:
            try:
                runs.append(read_run(path))
            except FileError:
                continue  # `ltx25 runs` names it; a render has other things to say
        return Forecast(runs, device_name(device), str(facts.get("model"))).sentence(facts, lambda: query(lambda: quick_product(device)))

    return forecast


def by_arithmetic(tflop: float, flops: float) -> Guess:
    """One group of so many TFLOP on a device that does `flops` FLOP/s in matrix products: no record, no range."""
    basis = f"guess: {100 * SHARE:.0f} % of {flops / TERA:.3g} TFLOP/s, no record of this device"
    return Guess(tflop * TERA / (SHARE * flops), 0.0, basis, True, None)


def _in_proportion(found: Measured, tflop: float, other: str) -> Guess:
    """Too few geometries for a law: the arithmetic of the FLOP model at the rate the nearest one was measured at.

    What one or two geometries cannot tell is how much of their seconds is launching and does not grow: between none of it,
    at any of the rates measured, and all of it.
    """
    tokens = min(found.seconds, key=lambda tokens: abs(math.log(sum(found.terms[tokens]) / tflop)))
    groups = {seen: sorted(seconds for run in runs for seconds in run) for seen, runs in found.seconds.items()}
    each, known, n = statistics.median(groups[tokens]), sum(found.terms[tokens]), len(groups)
    expected = each * tflop / known
    if abs(tflop / known - 1) <= NEAR and not other:
        ends = groups[tokens][0] * tflop / known, groups[tokens][-1] * tflop / known
        between = ends if len(groups[tokens]) > 1 else None  # one group has no spread
        return Guess(expected, found.warm_up or 0.0, "this geometry, measured", False, between)
    ends = [each, *(statistics.median(seconds) * tflop / sum(found.terms[seen]) for seen, seconds in groups.items())]
    basis = f"{n} geometr{'y' if n == 1 else 'ies'}{other} in proportion, not a law"
    return Guess(expected, found.warm_up or 0.0, basis, True, (min(ends), max(ends)))

