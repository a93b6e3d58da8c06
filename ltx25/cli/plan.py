"""`ltx25 plan`: what a render would take on this device, before anything is loaded, and the largest that fits."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..dit import check_fp8
from ..errors import InputError
from ..instrument import TextSink, Watch
from ..instrument.history import NEWEST, read_newest
from ..instrument.models import PUBLISHED_UPSCALER, Enlarging, Models, published
from ..instrument.plan_text import (
    frames_of,
    largest_text,
    parse_bytes,
    parse_seconds,
    parse_size,
    plan_text,
    usual_stg_blocks,
)
from ..instrument.planner import Planner
from ..optional import open_upscaler
from ..parts import open_parts
from ..request import Request
from .arguments import parsed, path_of
from .finish import tell
from .render import (
    DEFAULTS,
    FLAGS,
    OPTIONS,
    SLOTS,
    TINY_DEFAULTS,
    chosen_device,
    chosen_files,
    flag,
    flag_takes,
    reads_negative,
)
from .runs import runs_folder

PUBLISHED = Path("published")  # --upscaler without a file
LEFT_OUT = ("negative", "width", "height", "frames", "seed")  # flags of a render that cost nothing, or have a form of their own here


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `plan`; the parsed arguments carry the function to call as `run`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict time and memory of a render, and the largest that fits",
        description=f"Predict phase times and peak memory on this device from its run records, of the newest {NEWEST} (without any: from arithmetic and a "
        "half-second test, and the plan says so). Nothing is loaded. Exit code 1 when the request does not fit.",
    )
    parser.add_argument("--seconds", type=float, help="length of the clip, s (default: --frames)")
    parser.add_argument("--frames", type=int, help=f"8 n + 1 (default {DEFAULTS['frames']} [{TINY_DEFAULTS['frames']}])")
    size = f"{DEFAULTS['width']}x{DEFAULTS['height']} [{TINY_DEFAULTS['width']}x{TINY_DEFAULTS['height']}]"
    parser.add_argument("--size", metavar="WxH", help=f"px, multiples of 32 (default {size})")
    parser.add_argument("--budget", type=parsed(parse_seconds), metavar="TIME", help="time there is: 90s, 10m, 1.5h")
    parser.add_argument("--memory", type=parsed(parse_bytes), metavar="SIZE", help="device memory there is: 24G (default: what is free); on a CPU it is the host's")
    parser.add_argument("--host-memory", type=parsed(parse_bytes), metavar="SIZE", help="host memory there is (default: what is free)")
    for name, (kind, text) in FLAGS.items():
        if name not in LEFT_OUT:
            parser.add_argument(flag(name), help=text or None, **flag_takes(name, kind))
    parser.add_argument(
        "--upscaler", nargs="?", type=path_of, const=PUBLISHED, metavar="FILE", help="in two stages, as a render with it; without FILE: by the published spatial upscaler"
    )
    parser.add_argument("--soundtrack", action="store_true", help="the sound is given, as by a render's --audio: no forward guides it. Reading it in is not counted")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    for name in ("precision", "legs"):
        parser.add_argument(flag(name), choices=OPTIONS[name], default="auto", help="default auto")
    models = parser.add_argument_group("model files (all four; none: the published sizes)")
    for slot in SLOTS:
        models.add_argument(flag(slot), type=path_of, metavar="FILE")
    models.add_argument("--tiny", action="store_true", help="the tiny checkpoint, with the defaults a render with it has (in brackets)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ...; default auto")
    parser.add_argument("--runs", type=path_of, metavar="DIR", help="folder of the records (default: LTX25_RUNS, else ltx25_runs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    device = chosen_device(arguments.device)
    named = [getattr(arguments, slot) for slot in SLOTS if getattr(arguments, slot) is not None]
    if arguments.precision == "fp8":
        check_fp8(device)
    if named or arguments.tiny:
        models = Models.of(open_parts(chosen_files(arguments)[0], device, arguments.precision))
    else:
        models = published(device, arguments.precision == "fp8")
    runs, skipped = read_newest(runs_folder(arguments.runs), Watch([TextSink(tell)]))
    for line in skipped:
        tell(line)
    batched = {"auto": None, "batched": True, "sequential": False}[arguments.legs]
    planner = Planner(models, device, runs, batched, enlarging=_enlarging(arguments.upscaler), frozen=frozenset({"audio"} if arguments.soundtrack else ()))
    budget = planner.budget(arguments.budget, arguments.memory, arguments.host_memory)
    request = _request(arguments, models)
    if arguments.batch_size < 1:
        raise InputError(f"batch_size {arguments.batch_size} makes nothing; the least is 1.")
    plan = planner.plan(request, arguments.batch_size, budget)
    print(plan_text(plan, models, budget))
    reasons = plan.beyond(budget)
    if arguments.budget is not None or reasons:
        print(largest_text(planner, request, budget, arguments.batch_size))
    return 1 if reasons else 0


def _enlarging(upscaler: Path | None) -> Enlarging | None:
    if upscaler is None:
        return None
    if upscaler is PUBLISHED:
        return PUBLISHED_UPSCALER
    return Enlarging.of(*open_upscaler(upscaler))


def _request(arguments: argparse.Namespace, models: Models) -> Request:
    given = dict(TINY_DEFAULTS) if arguments.tiny else {}
    given |= {name: getattr(arguments, name) for name in FLAGS if name not in LEFT_OUT and getattr(arguments, name) is not None}
    if arguments.size is not None:
        given["width"], given["height"] = parse_size(arguments.size)
    if arguments.seconds is not None and arguments.frames is not None:
        raise InputError("--seconds and --frames say the same thing twice; give one of them.")
    if arguments.frames is not None:
        given["frames"] = arguments.frames
    elif arguments.seconds is not None:
        given["frames"] = frames_of(arguments.seconds, given.get("frame_rate", DEFAULTS["frame_rate"]), models.compression)
    if not reads_negative(given):
        given["negative"] = None
    given.setdefault("stg_blocks", usual_stg_blocks(models.dit.layers))
    return Request(prompt="plan", compression=models.compression, **given)
