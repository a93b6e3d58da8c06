"""Does any kernel touch memory that is not its own, or race? Every op's own small cases, under each tool there is.

    python tests/bench/sanitize.py [--only qk_norm_rope na3d ...] [--sanitizer /usr/local/cuda/bin/compute-sanitizer]

One JSON line per op and tool; clean is true, false with what the tool said, or null with the reason why it could not be asked.
Tools: `guard bands` (everywhere; in Triton's interpreter where there is no card), `memcheck` and `racecheck` of NVIDIA's
compute-sanitizer. A sanitizer runs all ops in one process; only where that is not clean, each in a process of its own.
Kernels are compiled before, by the guard bands, and come from Triton's cache.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.tests.bench.program import program  # noqa: E402
from comfyui_ltx25.tests.support.guarded import check, guarded_check, ops, why_not  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOOLS = ("memcheck", "racecheck")
FOUND = 99  # exit code of a sanitizer that found something
PATIENCE = 900  # s a process may take: instrumented kernels are a hundred times slower
TOLD = 12  # lines of a tool's report


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, help="ops")
    parser.add_argument("--sanitizer", default=None, help="path of compute-sanitizer; else it is looked for")
    parser.add_argument("--under", action="store_true", help="run the cases and nothing else: what a sanitizer is given")
    options = parser.parse_args()
    names = sorted(ops()) if options.only is None else options.only
    unknown = set(names) - set(ops())
    if unknown:
        parser.error(f"no such op: {', '.join(sorted(unknown))}; there are {', '.join(sorted(ops()))}")
    if options.under:
        run_cases(names)
        return
    facts = {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "interpreter", "torch": torch.__version__, "revision": query(revision)}
    for line in itertools.chain(guard_bands(names), sanitized(names, options.sanitizer or find_sanitizer())):
        print(json.dumps({"bench": "sanitize", **line, **facts}), flush=True)


def run_cases(names: Sequence[str]) -> None:
    for name in names:
        if why_not(name, DEVICE) is None:
            check(ops()[name][0], DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


def guard_bands(names: Sequence[str]) -> Iterator[dict[str, object]]:
    for name in names:
        line: dict[str, object] = {"op": name, "tool": "guard bands"}
        if reason := why_not(name, DEVICE):
            yield line | {"clean": None, "why": reason}
            continue
        try:
            wrong = guarded_check(*ops()[name], DEVICE)
        except Exception as error:  # whatever a compiler or driver raises, an access it stopped among it
            yield line | {"clean": None, "why": _first_line(str(error) or type(error).__name__)}
            continue
        yield line | {"clean": not wrong, **({"report": wrong[:TOLD]} if wrong else {})}


def find_sanitizer() -> str | None:
    places = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or next(filter(None, (shutil.which(f"{place}/bin/compute-sanitizer") for place in places if place)), None)


def sanitized(names: Sequence[str], sanitizer: str | None) -> Iterator[dict[str, object]]:
    for tool in TOOLS:
        why = "no CUDA device" if DEVICE.type != "cuda" else "compute-sanitizer was not found; --sanitizer names it" if sanitizer is None else None
        verdict: dict[str, object] = {"clean": None, "why": why} if why else _under(sanitizer, tool, names)
        for name in names:
            if not why and (reason := why_not(name, DEVICE)):
                yield {"op": name, "tool": tool, "clean": None, "why": reason}
                continue
            alone = verdict if verdict["clean"] or why or len(names) == 1 else _under(sanitizer, tool, [name])
            yield {"op": name, "tool": tool, **alone}


def _under(sanitizer: str, tool: str, names: Sequence[str]) -> dict[str, object]:
    """What a tool says of these ops, in one process."""
    own = [sys.executable, __file__, "--under", "--only", *names]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only", *own]
    alone = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor an allocation, whose ends the tool knows
    try:
        done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"clean": None, "why": _first_line(str(error))}
    ran = {line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")}
    said = [line.removeprefix("=========").strip() for line in done.stdout.splitlines() if line.startswith("=========")]
    report = [line for line in said if line and line != "COMPUTE-SANITIZER"][:TOLD]
    if done.returncode == 0 and ran == set(names):
        return {"clean": True}
    if done.returncode == FOUND:
        return {"clean": False, "report": report}
    return {"clean": None, "why": f"exit code {done.returncode}, ran {len(ran)} of {len(names)}", "report": report or done.stderr.splitlines()[-TOLD:]}


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


if __name__ == "__main__":
    program(main)
