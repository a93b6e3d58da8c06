"""What the fields of a record hold, type and range. Whoever reads records divides by them and takes their logarithm: a file that breaks this is refused as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`, or 0 where `zero`; whole: one without a fraction."""

    least: float
    most: float
    zero: bool
    whole: bool

    def is_of(self, kind: type) -> bool:
        return kind is int or (kind is float and not self.whole)  # true and false are neither

    def __call__(self, value: Any) -> bool:
        return self.is_of(type(value)) and (self.least <= value <= self.most or (self.zero and value == 0))


def wrong_field(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The first field, as "t of a run line", that is missing, of another type than the writer's or out of its range; None where all are right.

    A record may have a hundred thousand lines, nearly all of a few shapes: types are looked at once per shape, and of every line
    only the ranges of its numbers and what lies inside its lists and objects.
    """
    open_questions: dict[tuple[Any, ...], tuple[list[tuple[str, float, float, bool]], list[tuple[str, Check]]]] = {}
    for entry in events:
        event, state = entry["event"], entry.get("state")
        shape = (event, state if type(state) is str else None, *entry, *map(type, entry.values()))
        questions = open_questions.get(shape)
        if questions is None:
            checks = CHECKS.get(event, ANY)
            known = {name: value for name, value in entry.items() if value is not None}
            wrong = [name for name, check in checks.items() if name in known and not check(known[name])]
            wrong += [name for name in NEEDED.get(shape[:2], ALWAYS) if name not in known]
            if wrong:
                return f"{wrong[0]} of a {event} line"
            asked = {name: checks[name] for name in known if name in checks}
            ranges = [(name, check.least, check.most, check.zero) for name, check in asked.items() if isinstance(check, Number)]
            inside = [(name, check) for name, check in asked.items() if isinstance(known[name], (dict, list))]
            questions = open_questions[shape] = ranges, inside
        for name, least, most, zero in questions[0]:
            value = entry[name]
            if not (least <= value <= most or (zero and value == 0)):
                return f"{name} of a {event} line"
        for name, check in questions[1]:
            if not check(entry[name]):
                return f"{name} of a {event} line"
        if event == "phase" and None not in (entry.get("parent"), entry.get("id")) and not entry["parent"] < entry["id"]:
            return "parent of a phase line"  # phases are numbered as they open: who follows parents comes to an end
    return None


def text(value: Any) -> bool:
    return isinstance(value, str)


def listed(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def each(check: Check) -> Check:
    """An object of any names whose values all fit."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def having(needed: Mapping[str, Check], **known: Check) -> Check:
    """An object with the fields `needed`; those of `known` may be missing or null."""

    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(name in value and check(value[name]) for name, check in needed.items())
            and all(value.get(name) is None or check(value[name]) for name, check in known.items())
        )

    return check


SECONDS = Number(1e-12, 1e9, zero=True, whole=False)  # no clock tells less, no run takes more
COUNT = Number(1, 1 << 60, zero=True, whole=True)  # bytes, units done
ORDINAL = Number(1, 1 << 60, zero=False, whole=True)
TOKENS = Number(1, 1 << 40, zero=True, whole=True)
SIZE = Number(1, 1 << 20, zero=False, whole=True)  # px, frames, clips: more than any release makes
FRAME_RATE = Number(1e-3, 1e6, zero=False, whole=False)  # frames/s
TFLOP = Number(1e-12, 1e12, zero=False, whole=False)
SHARE = Number(-1e18, 1e18, zero=True, whole=False)  # of a whole, or an error relative to it


def _clip(value: Any) -> bool:
    """The geometry; with a width, all of a clip's sizes are there."""
    sizes = {**dict.fromkeys(("width", "height", "frames"), SIZE), "frame_rate": FRAME_RATE}
    return having(sizes if isinstance(value, dict) and value.get("width") is not None else {}, **sizes, batch=SIZE)(value)


def _scalar(value: Any) -> bool:
    return not isinstance(value, (dict, list))


def _streams(value: Any) -> bool:
    """Tokens by stream: one may have none, not both."""
    return each(TOKENS)(value) and value.get("video", 0) + value.get("audio", 0) > 0


_ATTENTION = Number(TFLOP.least, TFLOP.most, zero=True, whole=False)
_WORK = having({"legs": text, "kind": text, "linear": TFLOP, "attention": _ATTENTION}, groups=ORDINAL)
_SAMPLED = having({"tokens": _streams}, text=TOKENS, batch=SIZE, precision=_scalar, residency=_scalar, batched=_scalar, graphs=_scalar, kernels=_scalar, adapted=_scalar, masked=_scalar)
_ESTIMATE = having({"first": having({"error": SHARE}), "half": having({"error": SHARE})})
_SIZES = {**dict.fromkeys(("width", "height", "frames", "batch"), SIZE), "latent_frames": ORDINAL, "frame_rate": FRAME_RATE}
_FACTS = having({}, **_SIZES, legs=listed(text), steps=ORDINAL, work=listed(_WORK), estimate=_ESTIMATE, tokens=lambda value: TOKENS(value) or each(TOKENS)(value))


def _facts(value: Any) -> bool:
    return _FACTS(value) and (not value.get("work") or _SAMPLED(value))


ANY: Mapping[str, Check] = {
    "t": SECONDS,
    "id": ORDINAL,
    **dict.fromkeys(("device_memory", "host_memory"), COUNT),
    **dict.fromkeys(("state", "phase", "name", "at", "text"), text),
}
_HEADER = {
    "t": SECONDS,
    "revision": text,
    "device_type": text,
    "files": each(having({}, bytes=COUNT)),
    "geometry": _clip,
    "legs": listed(text),
    "steps": ORDINAL,
    "settings": having({}),
    "process": having({}, first=COUNT, now=COUNT),
}
_MEASURED = dict.fromkeys(("wall", "device_span", "device_busy"), SECONDS)
_PHASE = {
    **ANY,
    **_MEASURED,
    "parent": ORDINAL,
    **dict.fromkeys(("done", "total", "h2d", "d2h", "peak_device", "peak_host", "peak_sum"), COUNT),
    "unit": text,
    "facts": _facts,
    "error": text,
}
CHECKS: Mapping[str, Mapping[str, Check]] = {
    "run": _HEADER,
    "about": _HEADER,
    "phase": _PHASE,
    "span": {**ANY, **_MEASURED},
    "forward": {**ANY, "seconds": SECONDS, **dict.fromkeys(("first", "last", "of", "step"), ORDINAL), "legs": text, "kind": text},
    **dict.fromkeys(("tick", "chunk", "beat"), {**ANY, "done": COUNT}),
    "profile": {**ANY, **_MEASURED, "group": COUNT, "begin": SECONDS, "graphs": _scalar, "shares": each(SHARE)},
    "end": {**ANY, "wall": SECONDS, "accounted": SHARE, "status": text, "error": text},
}
ALWAYS = ("t",)
NEEDED: Mapping[tuple[str, Any], tuple[str, ...]] = {
    ("phase", "open"): ("t", "id", "name"),
    ("phase", "closed"): ("t", "name", "wall"),  # a phase that was cancelled as it opened has no id
    ("forward", "done"): ("t", "seconds"),
}
