"""Numbers out of range in a record: whoever computes with records skips that one, or shows what it says, and never fails."""

import copy
import json

import pytest
import torch
from comfyui_ltx25.ltx25.cli import main
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.ltx25.instrument.compare import compare, differences
from comfyui_ltx25.ltx25.instrument.costs import law_of, measured_series, phase_rates
from comfyui_ltx25.ltx25.instrument.forecast import Forecast
from comfyui_ltx25.ltx25.instrument.header import device_name
from comfyui_ltx25.ltx25.instrument.history import read_run
from comfyui_ltx25.ltx25.instrument.models import published
from comfyui_ltx25.ltx25.instrument.plan import Budget
from comfyui_ltx25.ltx25.instrument.planner import Planner
from comfyui_ltx25.ltx25.instrument.plot import plot_run
from comfyui_ltx25.ltx25.instrument.report import clip_text, law_lines, record_text, steps_text
from comfyui_ltx25.ltx25.instrument.selftest import Speed
from comfyui_ltx25.ltx25.request import Request
from comfyui_ltx25.tests.support.records import Clock, render

CARD = torch.device("cuda")  # only its name is asked for
REQUEST = Request(prompt="plan", width=1280, height=704, frames=121)
MORE = (
    {"event": "profile", "t": 1.0, "group": 1, "begin": 0.5, "wall": 0.2, "device_span": 0.2, "device_busy": 0.1, "shares": {"copies": 0.1}},
    {"event": "beat", "t": 1.0, "id": 1, "phase": "load.read", "done": 1, "device_memory": 1, "host_memory": 1, "elapsed": 1.0},
    {"event": "resume", "t": 1.0},
)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """(two good records, the lines of a third of another size)."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        good = [render(folder, clock, *size, steps=3, device=device_name(CARD)) for size in ((768, 448, 25), (1024, 576, 49))]
        third = render(folder, clock, 1024, 576, 97, steps=3, device=device_name(CARD))
    lines = [json.loads(line) for line in third.path.read_text().splitlines()]
    third.path.unlink()
    lines[0]["files"] = {"transformer": {"name": "a", "bytes": 7}}
    return [read_run(record.path) for record in good], [*lines[:-1], *MORE, lines[-1]]


def numbers(value, at=()):
    """The paths of all numbers inside."""
    if isinstance(value, dict):
        return [path for name, item in value.items() for path in numbers(item, (*at, name))]
    if isinstance(value, list):
        return [path for n, item in enumerate(value) for path in numbers(item, (*at, n))]
    return [at] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def fields(lines):
    """(line, path) of every number, those of alike lines once."""
    found = {}
    for n, line in enumerate(lines):
        for path in numbers(line):
            phase = line.get("name") if path[0] in ("wall", "done", "facts") else None  # what is computed from these goes by the phase
            found.setdefault((line["event"], line.get("state"), phase, path), (n, path))
    return [field for (*_, path), field in found.items() if path != ("format",)]  # of what is read at all


def with_value(lines, n, path, value):
    changed = copy.deepcopy(lines)
    inside = changed[n]
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return changed


def look_at_everything(good, run):
    """All that commands and a render's forecast make of records."""
    runs = [*good, run]
    for series, measured in measured_series(runs).items():
        law_lines(law_of(measured), measured)
        str(series)
    phase_rates(runs, device_name(CARD))
    Planner(published(CARD), CARD, runs, True, Speed("bfloat16", 700e12, 4e12, 5e10)).plan(REQUEST, budget=Budget(None, None, None))
    facts = next(event["facts"] for event in good[0].of("phase") if event["name"] == "sample")
    assert "predicted" in Forecast(runs, device_name(CARD), facts["model"]).sentence(facts, lambda: 1e14)
    for a, b in ((good[0], run), (run, good[0])):
        _ = [change.verdict for change in compare(a, b, runs)], differences(a, b)
    assert record_text(run) and clip_text(run) and steps_text(run)


@pytest.mark.parametrize("value", [0, -1, 1, 1e300, 1e-300, 10**300, "NaN", None], ids=["0", "-1", "1", "1e300", "1e-300", "10^300", "a text", "null"])
def test_no_number_of_a_record_fails_who_computes_with_it(records, tmp_path, value):
    good, lines = records
    refused, read, path = set(), {}, tmp_path / "changed.jsonl"
    for n, field in fields(lines):
        path.write_text("\n".join(map(json.dumps, with_value(lines, n, field, value))))
        try:
            run = read_run(path)
        except FileError as error:
            assert str(error).startswith(f"changed.jsonl has no usable {field[0]} of a {lines[n]['event']} line") and "\n" not in str(error)
            refused.add((lines[n]["event"], field[0], field[-1]))
        else:
            look_at_everything(good, run)
            read[(lines[n]["event"], field[0])] = run
    for run in read.values():
        assert plot_run(run).width == 1280
    assert refused if value not in (0, 1, None) else read


MUST_REFUSE = [
    ("forward", ("seconds",), -1), ("forward", ("seconds",), 1e300), ("forward", ("seconds",), 1e-300), ("phase", ("wall",), -1), ("phase", ("wall",), 1e-300),
    ("forward", ("t",), 1e23), ("phase", ("done",), 1e300), ("phase", ("facts", "tokens", "video"), 1e300), ("phase", ("facts", "work", 0, "linear"), 0),
    *(("run", ("geometry", name), value) for name in ("width", "height", "frames", "batch") for value in (0, 1e300, 8.5)), ("run", ("geometry", "frame_rate"), 1e-300),
    ("end", ("wall",), True), ("phase", ("facts", "tokens"), {"video": 0, "audio": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("event", "path", "value"), MUST_REFUSE)
def test_a_number_out_of_range_is_refused_and_named(records, tmp_path, event, path, value):
    lines = records[1]
    n = next(n for n, line in enumerate(lines) if line["event"] == event and (event, path[0]) != ("phase", "facts") or line.get("facts", {}).get("work"))
    n = next(m for m in range(n, len(lines)) if lines[m]["event"] == event and path[0] in lines[m])
    (tmp_path / "changed.jsonl").write_text("\n".join(map(json.dumps, with_value(lines, n, path, value))))
    with pytest.raises(FileError, match=f"changed.jsonl has no usable {path[0]} of a {event} line"):
        read_run(tmp_path / "changed.jsonl")


def test_the_command_line_skips_a_record_out_of_range_with_one_line(records, tmp_path, capsys):
    good, lines = records
    for run in good:
        (tmp_path / run.path.name).write_bytes(run.path.read_bytes())
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, with_value(lines, 0, ("geometry", "frames"), 0))))
    said = "skipped: a.jsonl has no usable geometry of a run line; delete it or choose another record.\n"
    for command, code in ((["show"], 0), (["fit"], 1)):
        assert (main(["runs", "--runs", str(tmp_path), *command]), capsys.readouterr().err) == (code, said)
    for command in (["compare", "last", "last-1"], ["plot", "last"]):
        assert main(["runs", "--runs", str(tmp_path), *command]) == 0
    assert main(["runs", "--runs", str(tmp_path), "show", "a"]) == 2
