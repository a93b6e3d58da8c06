"""What the fields of a record hold. Whoever reads records computes with them: a file that breaks this is refused as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Check = Callable[[Any], bool]


def wrong_field(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The first field, as "t of a run line", that is missing or of another type than the writer's; None where all are right.

    A record may have a hundred thousand lines, nearly all of a few shapes: fields whose type says all are looked at once per shape.
    """
    open_questions: dict[tuple[Any, ...], tuple[tuple[str, Check], ...]] = {}
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
            questions = open_questions[shape] = tuple((name, checks[name]) for name in known if name in checks and isinstance(known[name], (dict, list)))
        for name, check in questions:
            if not check(entry[name]):
                return f"{name} of a {event} line"
        if event == "phase" and None not in (entry.get("parent"), entry.get("id")) and not entry["parent"] < entry["id"]:
            return "parent of a phase line"  # phases are numbered as they open: who follows parents comes to an end
    return None


def number(value: Any) -> bool:
    return isinstance(value, (int, float))


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


def _clip(value: Any) -> bool:
    """The geometry; with a width, all of a clip's sizes are there."""
    sizes = dict.fromkeys(("width", "height", "frames", "frame_rate"), number)
    return having(sizes if isinstance(value, dict) and value.get("width") else {}, **sizes, batch=number)(value)


def _scalar(value: Any) -> bool:
    return not isinstance(value, (dict, list))


_WORK = having({"legs": text, "kind": text, "linear": number, "attention": number})
_SAMPLED = having({}, text=number, batch=number, tokens=each(number), precision=_scalar, residency=_scalar, batched=_scalar, graphs=_scalar, kernels=_scalar)
_ESTIMATE = having({"first": having({"error": number}), "half": having({"error": number})})
_FACTS = having({}, legs=listed(text), steps=number, work=listed(_WORK), estimate=_ESTIMATE, tokens=lambda value: number(value) or each(number)(value))


def _facts(value: Any) -> bool:
    return _FACTS(value) and (value.get("work") is None or _SAMPLED(value))


ANY: Mapping[str, Check] = {
    **dict.fromkeys(("t", "id", "device_memory", "host_memory"), number),
    **dict.fromkeys(("state", "phase", "name", "at", "text"), text),
}
_HEADER = {
    "t": number,
    "revision": text,
    "device_type": text,
    "files": each(having({}, bytes=number)),
    "geometry": _clip,
    "legs": listed(text),
    "settings": having({}),
    "process": having({}, first=number, now=number),
}
_MEASURED = dict.fromkeys(("wall", "device_span", "device_busy"), number)
_PHASE = {
    **ANY,
    **_MEASURED,
    **dict.fromkeys(("parent", "done", "total", "h2d", "d2h", "peak_device", "peak_host", "peak_sum"), number),
    "unit": text,
    "facts": _facts,
    "error": text,
}
CHECKS: Mapping[str, Mapping[str, Check]] = {
    "run": _HEADER,
    "about": _HEADER,
    "phase": _PHASE,
    "span": {**ANY, **_MEASURED},
    "forward": {**ANY, **dict.fromkeys(("seconds", "first", "last", "of", "step"), number), "legs": text, "kind": text},
    **dict.fromkeys(("tick", "chunk", "beat"), {**ANY, "done": number}),
    "profile": {**ANY, **_MEASURED, "group": number, "begin": number, "graphs": _scalar, "shares": each(number)},
    "end": {**ANY, "wall": number, "accounted": number, "status": text, "error": text},
}
ALWAYS = ("t",)
NEEDED: Mapping[tuple[str, Any], tuple[str, ...]] = {
    ("phase", "open"): ("t", "id", "name"),
    ("phase", "closed"): ("t", "name", "wall"),  # a phase that was cancelled as it opened has no id
    ("forward", "done"): ("t", "seconds"),
}
