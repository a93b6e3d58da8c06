"""Peak memory as planned from records of some clips against the peaks that other clips' own records tell.

    python tests/bench/plan_memory.py [--seen 128x96x25 256x160x49 384x256x97] [--unseen 320x192x73 512x320x97] [--one-process]
        [--transformer FILE --text-encoder FILE --video-vae FILE --audio-vae FILE]

Every clip is rendered by `ltx25 render` in a process of its own; with --one-process all in one, on one engine, as a host's
process does. One JSON line per unseen clip: bytes predicted from the records of the seen ones, by arithmetic alone and
measured, of device (null on a CPU) and host. The tiny checkpoint unless files are named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.cli import main as ltx25  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.cli.render import SLOTS, chosen_device, chosen_files, flag  # noqa: E402
from comfyui_ltx25.ltx25.engine import Engine  # noqa: E402
from comfyui_ltx25.ltx25.errors import InputError  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import machine  # noqa: E402
from comfyui_ltx25.ltx25.instrument.history import Run, read_runs  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import host_now  # noqa: E402
from comfyui_ltx25.ltx25.instrument.models import Models  # noqa: E402
from comfyui_ltx25.ltx25.instrument.plan import Plan  # noqa: E402
from comfyui_ltx25.ltx25.instrument.plan_text import usual_stg_blocks  # noqa: E402
from comfyui_ltx25.ltx25.instrument.planner import Planner  # noqa: E402
from comfyui_ltx25.ltx25.parts import open_parts  # noqa: E402
from comfyui_ltx25.ltx25.request import Request  # noqa: E402
from comfyui_ltx25.tests.bench.program import program  # noqa: E402

STEPS = 3


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--seen", nargs="+", type=clip_of, default=["128x96x25", "256x160x49", "384x256x97"], metavar="WxHxF")
    parser.add_argument("--unseen", nargs="+", type=clip_of, default=["320x192x73", "512x320x97"], metavar="WxHxF")
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--device", default="auto")
    for slot in SLOTS:
        parser.add_argument(flag(slot), type=Path)
    options = parser.parse_args()
    options.tiny = False
    opened = functools.cache(Engine.open)
    if options.one_process:
        Engine.open = staticmethod(opened)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        for clip in options.seen:
            render(clip, runs, options)
        seen = read_runs(runs)[0]
        for clip in options.unseen:
            plans = [plan(clip, records, options) for records in (seen, [])]
            print(json.dumps(told(clip, *plans, render(clip, runs, options)) | {"one_process": options.one_process, **machine(chosen_device(options.device))}), flush=True)


def clip_of(text: str) -> str:
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no clip; write width, height and frames like 128x96x25.")
    return text


def render(clip: str, runs: Path, options: argparse.Namespace) -> Run:
    width, height, frames = clip.split("x")
    files = [word for slot in SLOTS if getattr(options, slot) for word in (flag(slot), str(getattr(options, slot)))]
    words = ["render", "--prompt", "a red fox in snow", "-o", str(runs.parent / "clip.mp4"), "--width", width, "--height", height, "--frames", frames]
    words += ["--steps", str(STEPS), "--runs", str(runs), "--device", options.device, "--quiet", *files]
    if options.one_process:
        with contextlib.redirect_stdout(sys.stderr):
            code = ltx25(words)
    else:
        script = "import sys; sys.path.insert(0, sys.argv.pop(1)); import conftest; from comfyui_ltx25.ltx25.cli import main; sys.exit(main(sys.argv[1:]))"
        code = subprocess.run([sys.executable, "-c", script, str(Path(__file__).resolve().parents[1]), *words], stdout=sys.stderr, env=os.environ).returncode
    if code:
        raise InputError(f"the render of {clip} ended with code {code}, as it says above.")
    return read_runs(runs)[0][-1]


def plan(clip: str, records: list[Run], options: argparse.Namespace) -> Plan:
    width, height, frames = map(int, clip.split("x"))
    device = chosen_device(options.device)
    parts = open_parts(chosen_files(options)[0], device)
    models = Models.of(parts)
    outside = max(0, (host_now() or 0) - sum(models.held.values()) * (device.type == "cpu")) if options.one_process else None
    planner = Planner(models, device, records, outside=outside)
    return planner.plan(Request(prompt="plan", width=width, height=height, frames=frames, steps=STEPS, stg_blocks=usual_stg_blocks(models.dit.layers), compression=models.compression))


def told(clip: str, planned: Plan, arithmetic: Plan, run: Run) -> dict[str, object]:
    line: dict[str, object] = {"bench": "plan_memory", "clip": clip}
    for place in ("device", "host"):
        measured = max((row[f"peak_{place}"] or 0 for row in run.phases), default=0) or None
        predicted, bare = getattr(planned, place), getattr(arithmetic, place)
        off = None if None in (predicted, measured) else round(predicted / measured - 1, 3)
        line[f"{place}_peak"] = {"predicted": predicted, "by_arithmetic": bare, "measured": measured, "off": off}
    return line


if __name__ == "__main__":
    program(main)
