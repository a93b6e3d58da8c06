"""Guidance that changes with the noise level, as users write it."""

from __future__ import annotations

import math
from dataclasses import replace

from .errors import InputError
from .guidance import OFF, Bins, Guidance
from .schedule import float32s

FIELDS = ("cfg", "stg", "modality", "rescale")
MOST = 100  # of cfg, stg and modality, as in the widgets and flags
EXAMPLE = "0.9: video_cfg=2; 0.5: video_cfg=1, video_stg=0"


def by_sigma(base: Guidance, stream: str, bins: str, start: float, end: float) -> Bins:
    """`base` for the stream of that name, with the values that `bins` names from their noise levels on down.

    bins: "level: name=value, name=value; level: ..." as EXAMPLE; what a bin does not name stays as in the one above it.
    start, end: sigma from and to which there is guidance, 1 and 0 for all. Raises InputError for what cannot be read.
    """
    if not 0.0 <= end < start <= 1.0:
        raise InputError(f"guidance from sigma {start:g} down to {end:g} is an empty window; guidance_start must be above guidance_end, for example 1 and 0.2.")
    start, end = float32s((start, end))  # a step at a written level is at that level, whichever way float32 rounds it
    levels = {start: base}
    current = base
    for written, values in sorted(parse_bins(bins).items(), reverse=True):
        (level,) = float32s((written,))
        current = replace(current, **{name.removeprefix(f"{stream}_"): value for name, value in values.items() if name.startswith(f"{stream}_")})
        if end < level < start:
            levels[level] = current
        elif level >= start:
            levels[start] = current
    if levels == {1.0: base} and end == 0.0:
        return Bins.constant(base)
    outside = {**({} if start == 1.0 else {math.inf: OFF}), **({} if end == 0.0 else {end: OFF})}
    return Bins.of({**levels, **outside})


def parse_bins(text: str) -> dict[float, dict[str, float]]:
    """Level -> name -> value of a `bins` text. Raises InputError with what cannot be read and an example."""
    found: dict[float, dict[str, float]] = {}
    for part in (part.strip() for part in text.split(";")):
        if not part:
            continue
        level_text, colon, values_text = part.partition(":")
        level = _number(level_text, text)
        if not colon or not 0.0 < level <= 1.0:
            raise _unreadable(text, f"'{part}' does not begin with a noise level above 0 and at most 1")
        if level in found:
            raise _unreadable(text, f"the level {level:g} is there twice")
        found[level] = {}
        for pair in values_text.split(","):
            name, _, value = (piece.strip() for piece in pair.partition("="))
            if name not in [f"{stream}_{field}" for stream in ("video", "audio") for field in FIELDS]:
                raise _unreadable(text, f"'{pair.strip()}' names none of video_cfg, video_stg, video_modality, video_rescale and the same of audio")
            if name in found[level]:
                raise _unreadable(text, f"{name} is there twice at {level:g}")
            number, most = _number(value, text), 1 if name.endswith("_rescale") else MOST
            if not 0.0 <= number <= most:
                raise _unreadable(text, f"{name} is {number:g}, wanted 0 to {most}")
            found[level][name] = number
    return found


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _unreadable(whole, f"'{text.strip()}' is no number") from None
    if not math.isfinite(value):
        raise _unreadable(whole, f"{value} is not finite")
    return value


def _unreadable(text: str, why: str) -> InputError:
    return InputError(f"bins '{text}' cannot be read: {why}; write them like {EXAMPLE}.")
