"""`ltx25 plan`: what a render would take on this device, before anything is loaded, and the largest that fits."""

from __future__ import annotations

import argparse
import re
import sys

from ..errors import InputError
from ..instrument.history import read_runs
from ..instrument.models import Models, published
from ..instrument.planner import Budget, Plan, Planner
from ..instrument.table import aligned
from ..instrument.units import bytes_text, seconds_text
from ..parts import open_parts
from ..request import Request
from ..shapes import PUBLISHED_COMPRESSION, Compression
from .render import FLAGS, SLOTS, chosen_device, chosen_files
from .runs import runs_folder

LEFT_OUT = ("negative", "width", "height", "frames", "seed")  # flags of a render that cost nothing, or have a form of their own here


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `plan`; the parsed arguments carry the function to call as `run`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict time and memory of a render, and the largest that fits",
        description="Predict phase times and peak memory on this device from its run records (without any: from arithmetic and a "
        "half-second test, and the plan says so). Nothing is loaded. Exit code 1 when the request does not fit.",
    )
    parser.add_argument("--seconds", type=float, help="length of the clip, s (default: --frames)")
    parser.add_argument("--frames", type=int, help="8 n + 1 (default 121)")
    parser.add_argument("--size", default="768x512", metavar="WxH", help="px, multiples of 32 (default 768x512)")
    parser.add_argument("--budget", type=parse_seconds, metavar="TIME", help="time there is: 90s, 10m, 1.5h")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE", help="device memory there is: 24G (default: what is free)")
    parser.add_argument("--host-memory", type=parse_bytes, metavar="SIZE", help="host memory there is (default: what is free)")
    for name, (kind, text) in FLAGS.items():
        if name not in LEFT_OUT:
            parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=name.split("_")[-1].upper(), help=text or None)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument("--legs", choices=("auto", "batched", "sequential"), default="auto")
    models = parser.add_argument_group("model files (all four; none: the published sizes)")
    for slot in SLOTS:
        models.add_argument("--" + slot.replace("_", "-"), metavar="FILE")
    models.add_argument("--tiny", action="store_true", help="the tiny checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ...; default auto")
    parser.add_argument("--runs", metavar="DIR", help="folder of the records (default: LTX25_RUNS, else ltx25_runs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    device = chosen_device(arguments.device)
    named = [getattr(arguments, slot) for slot in SLOTS if getattr(arguments, slot) is not None]
    models = Models.of(open_parts(chosen_files(arguments)[0], device)) if named or arguments.tiny else published(device)
    runs, skipped = read_runs(runs_folder(arguments.runs))
    for line in skipped:
        print(line, file=sys.stderr)
    batched = {"auto": None, "batched": True, "sequential": False}[arguments.legs]
    planner = Planner(models, device, runs, batched)
    free = planner.free()
    budget = Budget(arguments.budget, arguments.memory or free.device, arguments.host_memory or free.host)
    request = _request(arguments, models)
    plan = planner.plan(request, arguments.batch_size)
    print(plan_text(plan, models, budget))
    reasons = plan.beyond(budget)
    if arguments.budget is not None or reasons:
        fits = planner.largest(request, budget, arguments.batch_size)
        print("\n".join(_largest_lines(fits) if fits else _refusal_lines(planner.smallest(request), budget)))
    return 1 if reasons else 0


def plan_text(plan: Plan, models: Models, budget: Budget) -> str:
    """A plan as plain text: what it is of, phases with what each number rests on, peaks, and whether it fits."""
    request = plan.request
    lines = [
        f"plan for {request.width}x{request.height}, {request.frames} frames at {request.frame_rate:g}/s: "
        f"{plan.tokens[0]} + {plan.tokens[1]} tokens, {plan.forwards} forwards, with {models.name}",
        *plan.notes,
        "",
    ]
    rows = [("phase", "predicted", "rests on")]
    rows += [(phase.name, seconds_text(phase.seconds), phase.basis) for phase in plan.phases]
    rows.append(("run", seconds_text(plan.seconds), "extrapolated where said" if any(p.extrapolated for p in plan.phases) else "inside what was measured"))
    lines.append(aligned(rows, left=(0, 2)))
    for name, need, have in (("device", plan.device, budget.device), ("host", plan.host, budget.host)):
        if need is not None:
            lines.append(f"peak {name} memory: {bytes_text(need)}" + (f" of {bytes_text(have)} there" if have is not None else ""))
    reasons = plan.beyond(budget)
    lines.append("it fits" if not reasons else "it does not fit: " + "; ".join(reasons))
    return "\n".join(lines)


def _refusal_lines(smallest: Plan, budget: Budget) -> list[str]:
    r = smallest.request
    why = "; ".join(smallest.beyond(budget)) or "no size of this shape fits"
    return [f"nothing fits, not even {r.width}x{r.height}, {r.frames} frame: {why}", "give more time or memory, fewer steps, or another device"]


def _largest_lines(fits: list[Plan]) -> list[str]:
    lines = ["the largest that fits (pixels and frames trade freely, only tokens count):"]
    for plan in {(p.request.width, p.request.height, p.request.frames): p for p in fits}.values():
        r = plan.request
        memory = f", {bytes_text(plan.device)} device memory" if plan.device is not None else ""
        lines.append(
            f"  {r.width}x{r.height}, {r.frames} frames ({r.frames / r.frame_rate:.1f} s): {sum(plan.tokens)} tokens, "
            f"about {seconds_text(plan.seconds, rough=True)}{memory}, {bytes_text(plan.host)} host memory"
        )
    return lines


def _request(arguments: argparse.Namespace, models: Models) -> Request:
    given = {name: getattr(arguments, name) for name in FLAGS if name not in LEFT_OUT and getattr(arguments, name) is not None}
    width, height = parse_size(arguments.size)
    rate = given.get("frame_rate", 24.0)
    if arguments.seconds is not None and arguments.frames is not None:
        raise InputError("--seconds and --frames say the same thing twice; give one of them.")
    frames = arguments.frames or 121
    if arguments.seconds is not None:
        frames = frames_of(arguments.seconds, rate, models.compression)
    if given.get("video_cfg") == given.get("audio_cfg") == 1.0:
        given["negative"] = None  # nothing would use it
    if "stg_blocks" not in given and models.dit.layers <= 28:
        given["stg_blocks"] = str(models.dit.layers // 2)
    return Request(prompt="plan", width=width, height=height, frames=frames, compression=models.compression, **given)


def frames_of(seconds: float, frame_rate: float, compression: Compression = PUBLISHED_COMPRESSION) -> int:
    """The legal number of frames nearest to `seconds`."""
    if not 0 < seconds < 1e6:
        raise InputError(f"--seconds {seconds:g} is no length of a clip; give s, for example 5.")
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
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write it like 90s, 10m or 1.5h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str) -> int:
    """Bytes out of "24G", "24GiB", "512M"; units are binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])i?b?", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no memory size; write it like 24G")
    return int(float(found[1]) * 1024 ** ("kmgt".index(found[2]) + 1))
