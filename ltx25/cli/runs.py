"""`ltx25 runs show | plot | compare | fit`: look at run records, and learn from them what this device costs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from PIL.PngImagePlugin import PngInfo

from ..errors import FileError, InputError
from ..instrument.compare import Change, compare, differences, same_request, stopped_in
from ..instrument.costs import Measured, Rate, Series, law_of, measured_series, phase_rates
from ..instrument.history import Run, find_run, read_run, read_runs
from ..instrument.law import Law
from ..instrument.plot import plot_run
from ..instrument.report import clip_text, law_lines, record_text, steps_text
from ..instrument.table import aligned
from ..instrument.units import counted, path_text, rate_text, seconds_text
from .arguments import path_of

DEFAULT_RUNS = "ltx25_runs"


def runs_folder(argument: Path | None) -> Path:
    """Where records are: --runs, else LTX25_RUNS, else ltx25_runs in the current folder."""
    return Path(argument or os.path.expanduser(os.environ.get("LTX25_RUNS") or DEFAULT_RUNS))


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `runs`; the parsed arguments carry the function to call as `run`."""
    parser = subparsers.add_parser("runs", help="show, plot and compare run records, and fit the cost law of this device")
    where = {"type": path_of, "metavar": "DIR", "help": f"folder of the records (default: LTX25_RUNS, else {DEFAULT_RUNS})"}
    parser.add_argument("--runs", **where)
    commands = parser.add_subparsers(dest="runs_command", required=True, metavar="{show,plot,compare,fit}")
    which = "file, part of a name, 'last' or 'last-1'"
    show = commands.add_parser("show", help="list all records, or one record's phase table")
    show.add_argument("record", nargs="?", help=which)
    show.set_defaults(run=_show)
    plot = commands.add_parser("plot", help="draw one record's timeline as a PNG")
    plot.add_argument("record", nargs="?", default="last", help=which)
    plot.add_argument("-o", "--output", metavar="PNG", help="default: the record's name with .png, beside it")
    plot.set_defaults(run=_plot)
    pair = commands.add_parser("compare", help="which phase changed between two records, by how much, beyond the spread")
    pair.add_argument("a", help=which)
    pair.add_argument("b", help=which)
    pair.set_defaults(run=_compare)
    fit = commands.add_parser("fit", help="fit seconds per forward from tokens, and the fixed costs beside it")
    fit.add_argument("--device", help="only records of devices whose name contains this")
    fit.set_defaults(run=_fit)
    for command in (show, plot, pair, fit):  # after the command, too; left out there, it must not undo what stood before
        command.add_argument("--runs", default=argparse.SUPPRESS, **where)


def _show(arguments: argparse.Namespace) -> int:
    folder = runs_folder(arguments.runs)
    if arguments.record is not None:
        print(record_text(_find(folder, arguments.record)))
        return 0
    runs = _read(folder)
    if not runs:
        print(f"no run records in {folder}; every render writes one")
        return 0
    rows = [("record", "started", "status", "clip", "steps", "wall", "stopped in")]
    for run in runs:
        rows.append((run.path.stem, str(run.header.get("started", "-"))[:19], run.status, clip_text(run), steps_text(run), seconds_text(run.wall), run.where))
    print(aligned(rows, left=(0, 1, 2, 3, 4, 6)))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    run = _find(runs_folder(arguments.runs), arguments.record)
    target = Path(arguments.output) if arguments.output else run.path.with_suffix(".png")
    named = PngInfo()
    named.add_itxt("record", path_text(run.path))
    picture = plot_run(run)
    try:
        picture.save(target, pnginfo=named if target.suffix.lower() == ".png" else None)
    except (OSError, ValueError, KeyError) as error:  # the latter two: a suffix Pillow has no writer for
        raise FileError(f"the plot cannot be written to {target} ({_reason(target, error)}); name a .png file in a folder that can be written with -o.") from None
    print(target)
    return 0


def _reason(target: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    if "\0" in str(target):
        return "its name cannot be a file's"
    return f"no picture format of this size and colour is named '{target.suffix}'" if target.suffix else "its name has no suffix"


def _compare(arguments: argparse.Namespace) -> int:
    folder = runs_folder(arguments.runs)
    a, b = _find(folder, arguments.a), _find(folder, arguments.b)
    changes = compare(a, b, read_runs(folder)[0])
    print(f"A {a.name}: {clip_text(a)}, {steps_text(a)}, {a.header.get('device')}")
    print(f"B {b.name}: {clip_text(b)}, {steps_text(b)}, {b.header.get('device')}")
    for name, run in (("A", a), ("B", b)):
        if run.status != "done":
            print(f"{name} did not come to its end ({run.status} in {run.where}): only what it completed is compared")
    for name, before, after in differences(a, b):
        print(f"differs: {name} {before} -> {after}")
    rows = [("", "A", "B", "change", "spread", "verdict"), *(_change(change) for change in changes)]
    rows.append(_change(Change("run", a.wall, b.wall, None, same_request(a, b), stopped_in(a, b, lambda run: run.status != "done"))))
    print(aligned(rows, left=(0, 5)))
    return 0


def _change(change: Change) -> tuple[str, ...]:
    relative = "-" if change.relative is None else f"{100 * change.relative:+.1f} %"
    spread = "-" if change.spread is None else f"{100 * change.spread:.1f} %"
    return (change.name, seconds_text(change.before), seconds_text(change.after), relative, spread, change.verdict)


def _fit(arguments: argparse.Namespace) -> int:
    """Exit status 1 when no series has a law: scripts can tell."""
    runs = [run for run in _read(runs_folder(arguments.runs)) if (arguments.device or "") in str(run.header.get("device"))]
    series = measured_series(runs)
    if not series:
        raise InputError("no record here has timed forwards; render something with this version first.")
    found = False
    for key, measured in series.items():
        law = law_of(measured)
        found = found or isinstance(law, Law)
        print("\n".join([str(key), *law_lines(law, measured), ""]))
    for device in sorted({key.device for key in series}):
        print("\n".join(_fixed_lines(device, phase_rates(runs, device), series)))
    return 0 if found else 1


def _fixed_lines(device: str, rates: dict[str, Rate], series: dict[Series, Measured]) -> list[str]:
    rows = [("  phase", "fixed", "variable", "from")]
    for name, rate in sorted(rates.items()):
        fixed = seconds_text(rate.fixed) if rate.off is not None else "not told apart"
        note = "" if rate.off is not None or rate.unit == "run" else ", too few or too similar sizes: not a law"
        if rate.unit == "run":
            fixed, variable = seconds_text(rate.per_unit), "-"
        elif rate.unit == "byte":
            variable = rate_text(1 / rate.per_unit) if rate.per_unit else "-"
        elif rate.unit == "pixel":
            variable = f"{_small(1e6 * rate.per_unit)} per megapixel"
        else:
            variable = f"{_small(rate.per_unit)} per {rate.unit}"
        rows.append((f"  {name}", fixed, variable, f"{counted(rate.samples, 'phase')}, {counted(rate.sizes, 'size')}{note}"))
    return [f"around the forwards on {device}:", *aligned(rows, left=(0, 3)).splitlines()]


def _small(seconds: float) -> str:
    """As seconds_text, with the digits that what one unit takes needs: 2.1e-6 -> "2.1 us"."""
    return f"{1e6 * seconds:.3g} us" if 0 < seconds < 1e-3 else seconds_text(seconds)


def _find(folder: Path, name: str) -> Run:
    """A record by its path anywhere, else by what `find_run` takes: who has a shell may open any file."""
    return read_run(Path(name)) if Path(name).is_file() else find_run(folder, name)


def _read(folder: Path) -> list[Run]:
    if not folder.is_dir():
        raise FileError(f"{folder} does not exist; renders write their records there, or name another folder with --runs.")
    runs, skipped = read_runs(folder)
    for line in skipped:
        print(line, file=sys.stderr)
    return runs
