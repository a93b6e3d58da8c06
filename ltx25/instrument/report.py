"""A run record and a cost law as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .costs import Measured
from .history import Run
from .law import Law
from .table import aligned, phase_table
from .units import bytes_text, counted, seconds_text


def record_text(run: Run) -> str:
    """Everything one record tells, as plain text."""
    header = run.header
    lines = [
        f"{run.name}: {run.status}" + (f" in {run.where}" if run.where else ""),
        f"{header.get('device', '-')}, torch {header.get('torch', '-')}, triton {header.get('triton') or '-'}, driver {header.get('driver') or '-'}, "
        f"pack {header.get('pack') or '-'} at {(header.get('revision') or '-')[:12]}",
        *(f"{slot}: {file.get('name')} ({bytes_text(file.get('bytes'))}, header {str(file.get('header'))[:12]})" for slot, file in (header.get("files") or {}).items()),
        f"{clip_text(run)}, {steps_text(run)}",
        "",
        phase_table(run.phases, run.wall),
    ]
    accounted = run.end.get("accounted")
    if accounted is not None:
        lines.append(f"phases account for {100 * accounted:.2f} % of the wall time")
    lines += [event["text"] for event in run.of("choice") if event.get("text")]
    lines += _forward_lines(run) + [profile_text(event) for event in run.of("profile")]
    if run.end.get("error"):
        lines.append(f"error: {run.end['error']}")
    if run.skipped:
        lines.append(f"{counted(run.skipped, 'damaged line')} skipped")
    return "\n".join(lines)


def profile_text(event: dict[str, Any]) -> str:
    """One traced step, and with it the verdict on CUDA graphs: how much of the wall the device was busy."""
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in (event.get("shares") or {}).items())
    graphs = {True: "graphs on", False: "graphs off"}.get(event.get("graphs"), "graphs not said")
    busy = event.get("device_busy")
    return f"profile ({graphs}): device busy {seconds_text(busy)} of {seconds_text(event.get('wall'))}; {shares}"


def law_lines(law: Law | str, measured: Measured) -> list[str]:
    """A law as text: formula, residuals per geometry, what to expect of others, and the range it may be trusted in."""
    if isinstance(law, str):
        return [f"  no law: {law}"]
    lines = [
        f"  seconds per group = {law.constant:.4f} + {1e3 * law.linear:.4f} ms/TFLOP x matrix products + {1e3 * law.attention:.4f} ms/TFLOP x attention",
        f"  power law beside it = {law.scale:.3g} x tokens^{law.power:.3f}",
    ]
    rows = [("  tokens", "TFLOP", "measured", "spread", "groups", "law", "left out", "power", "left out")]
    for point, *errors in zip(law.points, law.residuals, law.left_out, law.power_residuals, law.power_left_out, strict=True):
        rows.append(
            (
                f"  {point.video}+{point.audio}",
                f"{point.linear + point.attention:.4g}",
                seconds_text(point.seconds),
                f"{100 * point.spread:.1f} %",
                f"{point.groups} in {counted(point.runs, 'run')}",
                *(f"{100 * error:+.1f} %" for error in errors),
            )
        )
    lines += aligned(rows, left=(0,)).splitlines()
    fewest, most = law.tokens
    lines.append(f"  a geometry not seen: {law.within} (the largest error of predicting one of these from the others), from {fewest} to {most} tokens; outside it is an extrapolation")
    if measured.warm_up is not None:
        lines.append(f"  fixed per run: the first group takes {seconds_text(measured.warm_up)} longer (allocation, kernel choice, capture)")
    return lines


MOST_SAMPLINGS = 3  # told one by one


def clip_text(run: Run) -> str:
    """The clip's size, length and rate in one phrase; of a graph that decoded clips of several sizes, the sizes."""
    clip = run.header.get("geometry") or {}
    decoded = [row.get("facts") or {} for row in run.phases if row["name"] == "decode.video"]
    shown = [facts for facts in decoded if all(facts.get(name) for name in ("width", "height", "frames"))]
    sizes = list(dict.fromkeys(f"{one['width']}x{one['height']}, {counted(one['frames'], 'frame')}" for one in shown))
    if len(sizes) > 1 or (sizes and not clip.get("width")):
        return " + ".join(sizes) if len(sizes) <= MOST_SAMPLINGS else f"{sizes[0]} and {len(sizes) - 1} more clips"
    if not clip.get("width"):
        return "no clip size" if not clip.get("frame_rate") else "sound only"
    batch = f" x {clip['batch']}" if (clip.get("batch") or 1) > 1 else ""
    return f"{clip['width']}x{clip['height']}, {counted(clip['frames'], 'frame')} at {clip['frame_rate']:g}/s{batch}"


def steps_text(run: Run) -> str:
    """Steps and legs in one phrase, of each sampling: a render may have two stages."""
    begun = [event.get("facts") or {} for event in run.of("phase") if event.get("name") == "sample" and event.get("state") == "open"]
    texts = [text for text in (_sampling_text({**run.header, **{name: fact for name, fact in facts.items() if fact is not None}}) for facts in begun or [{}]) if text]
    if len(texts) > MOST_SAMPLINGS:
        return f"{texts[0]} and {len(texts) - 1} more samplings"
    return " + ".join(texts) or "no steps"


def _sampling_text(facts: Mapping[str, Any]) -> str:
    """"30 steps of cond+uncond"; where steps differ, how many groups of forwards have which legs. A step may have several groups, or none."""
    steps, groups = facts.get("steps"), Counter()
    for work in facts.get("work") or ():
        groups[work["legs"] + (f" ({work['kind']})" if work.get("kind") else "")] += work.get("groups") or 0
    legs = next(iter(groups), "+".join(facts.get("legs") or ()))
    if not steps or not legs:
        return ""
    total = "" if not groups or groups.total() == steps else f", {counted(groups.total(), 'group')}"
    if len(groups) < 2:
        return f"{counted(steps, 'step')}{total} of {legs}"
    return f"{counted(steps, 'step')}{total}: {', '.join(f'{count} of {legs}' for legs, count in groups.items())}"


def _forward_lines(run: Run) -> list[str]:
    lines = []
    for row in run.phases:
        error = (row.get("facts") or {}).get("estimate")
        if error:
            first, half = error["first"], error["half"]
            lines.append(
                f"estimate of the time left: {100 * first['error']:+.0f} % when first shown (step 2), {100 * half['error']:+.0f} % at half time"
            )
    return lines
