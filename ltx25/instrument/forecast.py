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
from .costs import Measured, Series, law_of, measured_series
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

# What forwards may differ in from those of a record, what changes their time most first; and the words for such a record.
ORDER = ("residency", "kernels", "precision", "adapted", "graphs", "masked", "legs", "batched")
WORDS = {
    ("residency", "stream"): "streamed",
    ("residency", "resident"): "not streamed",
    ("adapted", True): "with a LoRA",
    ("adapted", False): "without a LoRA",
    ("graphs", True): "with graphs",
    ("graphs", False): "without graphs",
    ("masked", True): "with attention masks",
    ("masked", False): "without attention masks",
    ("batched", True): "with legs side by side",
    ("batched", False): "with one leg at a time",
}


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

    def group(self, legs: str, kind: str, linear: float, attention: float, tokens: int, how: Mapping[str, Any]) -> Guess | None:
        """One group of so many TFLOP and tokens; None without any record. how: as `sample_work` writes it, what is not known left out.

        The records most like it serve. Where they differ the basis says in what, and nothing is said of how far off that may be.
        """
        differing = {key: _differing(key, {**_PLAIN, **how, "legs": f"{legs} {kind}"}) for key in self.series}
        if not differing:
            return None
        least = min(map(_weight, differing.values()))
        alike = [key for key, names in differing.items() if _weight(names) == least]
        key = max(alike, key=lambda key: (isinstance(self._laws[key], Law), len(self.series[key].seconds)))
        law, measured, other = self._laws[key], self.series[key], "".join(f", {words}" for words in differing[key].values())
        if not isinstance(law, Law):
            return _in_proportion(measured, linear + attention, other)
        outside, seconds = law.is_extrapolation(tokens), law.seconds(linear, attention)
        mark = f", extrapolated from {law.tokens[0]} to {law.tokens[1]} tokens" if outside else ""
        basis = f"law of {len(law.points)} geometries" + (other or f", {law.within}") + mark
        between = None if other else (max(0.0, seconds * (1 - law.error)), seconds * (1 + law.error))
        return Guess(seconds, measured.warm_up or 0.0, basis, outside or bool(other), between)

    def sentence(self, facts: Mapping[str, Any], flops: Callable[[], float | None]) -> str:
        """What a sample phase with these facts (engine.facts) shows before its first forward.

        flops: measures the device's FLOP/s in matrix products, for want of a record; where that finds none either, "".
        """
        tokens = sum((facts.get("tokens") or {}).values())
        seconds, least, most, bases = 0.0, 0.0, 0.0, []
        for work in facts.get("work") or ():
            guess = self.group(work["legs"], work["kind"], work["linear"], work["attention"], tokens, facts)
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


_PLAIN = {"adapted": False, "masked": False}  # what is not said of these is not so; what is not said of others is not known


def _differing(key: Series, asked: Mapping[str, Any]) -> dict[str, str]:
    """What the records of a series differ in from forwards as `asked`: name -> words."""
    told = {**_PLAIN, **dict(key.how), "legs": f"{key.legs} {key.kind}"}
    names = [name for name in ORDER if None not in (told.get(name), asked.get(name)) and told[name] != asked[name]]
    if "residency" in names and "graphs" in names:  # blocks that take turns have none
        names.remove("graphs")
    if "batched" in names and "+" not in key.legs:
        names.remove("batched")  # one leg has none at its side
    return {name: WORDS.get((name, told[name]), "in another precision" if name == "precision" else f"of other {name}") for name in names}


def _weight(differing: Mapping[str, str]) -> tuple[bool, ...]:
    """What it costs a prediction: the less the better."""
    return tuple(name in differing for name in ORDER)


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
    basis = f"{n} geometr{'y' if n == 1 else 'ies'}{other}{',' if other else ''} in proportion, not a law"
    return Guess(expected, found.warm_up or 0.0, basis, True, None if other else (min(ends), max(ends)))

