"""Plans as plain text, and the few words people write budgets and sizes in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import InputError
from ..request import Request
from ..shapes import PUBLISHED_COMPRESSION, Compression, check_frame_rate
from .models import Models
from .plan import Budget, Plan
from .planner import Planner
from .table import aligned
from .units import bytes_text, counted, seconds_text

PUBLISHED_STG = "28"


def plan_text(plan: Plan, models: Models, budget: Budget) -> str:
    """A plan as plain text: what it is of, phases with what each number rests on, peaks, and whether it fits."""
    request = plan.request
    stages = "" if plan.first is None else f" in two stages, the first at {plan.first[0]}x{plan.first[1]}"
    lines = [
        f"plan for {request.width}x{request.height}, {counted(request.frames, 'frame')} at {request.frame_rate:g}/s: "
        f"{plan.tokens[0]} + {plan.tokens[1]} tokens, {counted(plan.forwards, 'forward')}{stages}, with {models.name}",
        *plan.notes,
        "",
    ]
    rows = [("phase", "predicted", "between", "rests on")]
    rows += [(phase.name, seconds_text(phase.seconds), _between(phase.between), phase.basis) for phase in plan.phases]
    where = "extrapolated where said" if any(p.extrapolated for p in plan.phases) else "inside what was measured"
    rows.append(("run", seconds_text(plan.seconds), _between(plan.between), where))
    lines.append(aligned(rows, left=(0, 3)))
    for name, peak, have in (("device", plan.on_device, budget.device), ("host", plan.on_host, budget.host)):
        if peak is not None:
            there = f", of {bytes_text(have)} there" if have is not None else ""
            safe = f", {bytes_text(peak.need)} to be safe" if peak.need > peak.bytes else ""
            sure = f", up to {bytes_text(peak.need)}" if peak.known else safe
            lines.append(f"peak {name} memory: {bytes_text(peak.bytes)}{sure}{there} ({peak.basis})")
    reasons = plan.beyond(budget)
    lines.append(_fits(plan) if not reasons else "it does not fit: " + "; ".join(reasons))
    return "\n".join(lines)


def largest_text(planner: Planner, request: Request, budget: Budget, batch: int) -> str:
    """The largest clips that fit, or why none does."""
    fits = planner.largest(request, budget, batch)
    return "\n".join(_largest_lines(fits) if fits else _refusal_lines(planner.smallest(request, budget, batch), budget, batch))


def usual_stg_blocks(layers: int) -> str:
    """The published model's perturbed block, or the middle one of a model that has fewer."""
    return PUBLISHED_STG if layers > int(PUBLISHED_STG) else str(layers // 2)


def frames_of(seconds: float, frame_rate: float, compression: Compression = PUBLISHED_COMPRESSION) -> int:
    """The legal number of frames nearest to `seconds`. Raises InputError for a length or a rate that no clip has."""
    check_frame_rate(frame_rate)
    if not 0 < seconds < 1e6:
        raise InputError(f"seconds {seconds:g} is no length of a clip; give s, for example 5.")
    return max(0, round((seconds * frame_rate - 1) / compression.frames)) * compression.frames + 1


def parse_size(text: str) -> tuple[int, int]:
    """Width and height out of "1280x704". Raises InputError for anything else."""
    found = re.fullmatch(r"(\d+)\s*[xX×*]\s*(\d+)", text.strip())
    if not found:
        raise InputError(f"size '{text}' is not width x height in px; write it like 1280x704.")
    return int(found[1]), int(found[2])


def parse_seconds(text: str) -> float:
    """Seconds out of "90", "90s", "10m", "1.5h"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise InputError(f"'{text}' is no time; write it like 90s, 10m or 1.5h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str) -> int:
    """Bytes out of "24G", "24GiB", "512M"; units are binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b?", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise InputError(f"'{text}' is no memory size; write it like 24G.")
    return int(float(found[1]) * 1024 ** ("kmgt".index(found[2]) + 1))


def _fits(plan: Plan) -> str:
    known = all(peak.known for peak in (plan.on_device, plan.on_host) if peak is not None)
    return "it fits" if known else "it fits by these numbers; how far off the memory may be is not known"


def _between(ends: tuple[float, float] | None) -> str:
    return "not known" if ends is None else " to ".join(map(seconds_text, ends))


def _largest_lines(fits: list[Plan]) -> list[str]:
    lines = ["the largest that fits (pixels and frames trade freely, only tokens count):"]
    for plan in {(p.request.width, p.request.height, p.request.frames): p for p in fits}.values():
        r = plan.request
        memory = f", {bytes_text(plan.device)} device memory" if plan.device is not None else ""
        lines.append(
            f"  {r.width}x{r.height}, {counted(r.frames, 'frame')} ({r.frames / r.frame_rate:.1f} s): {sum(plan.tokens)} tokens, "
            f"about {seconds_text(plan.seconds, rough=True)}{memory}, {bytes_text(plan.host)} host memory"
        )
    return lines


def _refusal_lines(smallest: Sequence[Plan], budget: Budget, batch: int) -> list[str]:
    """Why nothing fits: by the first of the smallest clips that is too large still."""
    plan = next((plan for plan in smallest if plan.beyond(budget)), smallest[-1])
    r, clips = plan.request, "" if batch == 1 else f", {batch} clips together"
    way = "give more time or memory, fewer steps, or another device"
    return [
        f"nothing fits, not even {r.width}x{r.height}, {counted(r.frames, 'frame')}{clips}: {'; '.join(plan.beyond(budget))}",
        way if batch == 1 else f"make fewer clips together, {way}",
    ]
