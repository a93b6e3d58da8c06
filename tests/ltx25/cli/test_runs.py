import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from comfyui_ltx25.ltx25.cli import main
from comfyui_ltx25.ltx25.cli.runs import _fixed_lines, add_parser
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.instrument import RunRecord
from comfyui_ltx25.ltx25.instrument.compare import compare
from comfyui_ltx25.ltx25.instrument.costs import law_of, measured_series, rate_of
from comfyui_ltx25.ltx25.instrument.history import find_run, read_run, read_runs
from comfyui_ltx25.ltx25.instrument.plot import plot_run
from comfyui_ltx25.tests.support.records import Clock, render
from PIL import Image

PACK = Path(__file__).resolve().parents[3]


@pytest.fixture
def ltx25(tmp_path, capsys):
    """Run `ltx25 runs ...` on the folder `tmp_path / "runs"`: (exit status, printed)."""

    def command(*arguments):
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        folder = [] if arguments[0] == "--runs" else ["--runs", str(tmp_path / "runs")]
        parsed = parser.parse_args(["runs", *folder, *arguments])
        capsys.readouterr()
        status = parsed.run(parsed)
        return status, capsys.readouterr().out

    return command


@pytest.fixture
def records(tmp_path, monkeypatch):
    folder, clock = tmp_path / "runs", Clock(monkeypatch)
    made = [render(folder, clock, *size, noise=0.01, seed=n) for n, size in enumerate(((768, 448, 25), (1024, 576, 49), (1024, 576, 97)))]
    with pytest.raises(RuntimeError):
        render(folder, clock, 768, 448, 25, stop=2)
    return made


def test_show_lists_every_record_with_status_clip_and_where_it_stopped(ltx25, records, tmp_path):
    (tmp_path / "runs" / "notes.jsonl").write_text("hello\n")
    status, text = ltx25("show")
    rows = text.splitlines()
    assert status == 0 and len(rows) == 5
    assert "1024x576, 97 frames at 24/s" in rows[3] and "6 steps of cond+uncond+stg+mod" in rows[3]
    assert "failed" in rows[4] and "sample: step 3/6 - forward 9-12/24" in rows[4]


def test_show_of_one_record_is_its_phase_table(ltx25, records):
    _, text = ltx25("show", records[2].path.stem)
    lines = text.splitlines()
    assert "Toy card" in text and "phases account for 100.00 % of the wall time" in text
    assert [line.split()[0] for line in lines if line.startswith(("load", "text", "sample", "decode"))] == [
        "load.read", "text.tower", "sample", "decode.video", "decode.audio",
    ]  # fmt: skip
    assert "10.7 GB/s" in text and "24 forwards" in text
    assert "estimate of the time left: " in text


def test_show_of_a_failed_record_names_the_error(ltx25, records):
    _, text = ltx25("show", "last")
    assert "RuntimeError: device gone" in text and "(stopped)" in text


def test_fit_prints_law_residuals_range_and_fixed_costs(ltx25, records):
    status, text = ltx25("fit")
    assert status == 0
    assert "ms/TFLOP x matrix products" in text and "x tokens^" in text
    assert "left out" in text and "from 1370 to 7589 tokens; outside it is an extrapolation" in text
    assert "the first group takes 2.0" in text
    assert "10.7 GB/s" in text and "per megapixel" in text and "not a law" in text


def test_what_one_unit_takes_is_told_with_digits_however_little_it_is():
    rates = {"text.project": rate_of([(200.0, 2.4e-4)], "token"), "decode.video": rate_of([(1e6, 1e-4)], "pixel"), "decode.audio": rate_of([(1.0, 0.5)], "s of sound")}
    text = "\n".join(_fixed_lines("Toy card", rates, {}))
    assert "1.2 us per token" in text and "100 us per megapixel" in text and "0.50 s per s of sound" in text


def test_fit_refuses_to_call_two_geometries_a_law(ltx25, records):
    records[2].path.unlink()
    status, text = ltx25("fit")
    assert status == 1
    assert "no law: 2 geometries" in text and "three different ones" in text


def test_fit_without_timed_forwards_is_one_sentence(ltx25, tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match="render something"):
        ltx25("fit")


def test_missing_folder_and_names_are_told_with_the_way_out(ltx25, records, tmp_path):
    with pytest.raises(FileError, match="ltx25 runs show"):
        ltx25("show", "nothing-like-it")
    with pytest.raises(FileError, match="write more of the name"):
        ltx25("show", "_")
    with pytest.raises(FileError, match="--runs"):
        ltx25("--runs", str(tmp_path / "elsewhere"), "show")


@pytest.mark.parametrize("command", [["show"], ["plot"], ["compare", "last", "last-1"], ["fit"]])
def test_the_folder_is_told_before_or_after_the_command(records, tmp_path, capsys, command):
    """The folder beside it has no records: who reads that one ends in a sentence."""
    (tmp_path / "empty").mkdir()
    folder, empty = ["--runs", str(tmp_path / "runs")], ["--runs", str(tmp_path / "empty")]
    printed = []
    for line in (["runs", *folder, *command], ["runs", *command, *folder], ["runs", *empty, *command, *folder]):
        assert main(line) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2] != ""


def test_a_reader_that_closes_the_pipe_ends_the_command_without_a_word(records, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(PACK / 'tests')!r}); import conftest; from comfyui_ltx25.ltx25.cli import main; sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.close(reading)  # nobody will ever read
    command = [sys.executable, "-c", code, "runs", "--runs", str(tmp_path / "runs"), "show"]
    # Lines that wait for the end of the process fail later than those that do not. Both at once, as starting takes longest.
    environments = [{**os.environ, "PYTHONUNBUFFERED": unbuffered} for unbuffered in ("", "1")]
    running = [subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment) for environment in environments]
    os.close(writing)
    assert [(child.communicate()[1], child.returncode) for child in running] == [("", 141)] * 2


def test_last_counts_back_by_age(ltx25, records, tmp_path):
    assert find_run(tmp_path / "runs", "last-1").path == records[2].path
    assert find_run(tmp_path / "runs", "last").status == "failed"
    assert ltx25("show", "") == ltx25("show", "last") and find_run(tmp_path / "runs", " ").status == "failed"


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="a system whose time zone a test cannot set")
def test_last_is_the_last_one_begun_whatever_zone_and_clock_its_file_is_named_by(tmp_path, monkeypatch):
    names, clock = [], time.time()
    for step, zone in enumerate(("UTC+11", "UTC-13", "UTC+11", "UTC")):  # of POSIX: 11 hours behind, 13 ahead
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        monkeypatch.setattr(time, "time", lambda now=clock - 3600 + step: now)
        with RunRecord(tmp_path, {}) as record:
            names.append(record.path.name)
    monkeypatch.setattr(time, "time", lambda: clock)
    assert names == sorted(names)
    # named and dated as before, in local time; copied later than it was made; of a clock that ran ahead, and put right in its header alone; of one nobody put right
    old = {"a": "2020-01-01T09:00:00-1100", "z": "2020-01-01T09:00:00+1300", "copied": "2021-01-01T00:00:00.500+00:00", "ahead": "2099-01-01T00:00:00+0000", "lost": "2099-01-01T00:00:00+0000"}
    for name, started in old.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"event": "run", "t": 0.0, "format": 1, "started": started}) + "\n")
    os.utime(tmp_path / "ahead.jsonl", (clock - 7200, clock - 7200))
    os.utime(tmp_path / "lost.jsonl", (clock + 10**9, clock + 10**9))
    os.utime(tmp_path / names[0], (clock, clock))  # a mark at its end
    order = ["lost.jsonl", "z.jsonl", "a.jsonl", "copied.jsonl", "ahead.jsonl", *names]
    assert [run.name for run in read_runs(tmp_path)[0]] == order
    assert [find_run(tmp_path, f"last-{back}").name for back in range(len(order))] == order[::-1]
    monkeypatch.undo()
    time.tzset()


def test_last_passes_over_files_that_are_no_records(ltx25, records, tmp_path, caplog):
    (tmp_path / "runs" / "zz-notes.jsonl").write_text("hello\n")  # the newest by its own time
    assert find_run(tmp_path / "runs", "last").status == "failed"
    (told,) = caplog.records
    assert "zz-notes.jsonl is not a run record" in told.getMessage()
    assert find_run(tmp_path / "runs", "last-1").path == records[2].path
    assert "RuntimeError: device gone" in ltx25("show", "last")[1]
    assert ltx25("plot")[0] == 0


def test_last_of_a_folder_without_records_is_one_sentence(ltx25, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.jsonl").write_text("hello\n")
    with pytest.raises(FileError, match="no run record named 'last'"):
        ltx25("show", "last")


def test_a_path_is_for_the_command_line_alone(ltx25, records, tmp_path):
    """The node takes a name from whoever reaches the server: it must not tell which files are there."""
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(records[0].path.read_bytes())
    told = []
    for name in (str(outside), str(tmp_path / "missing.jsonl"), "../outside.jsonl"):
        with pytest.raises(FileError, match="no run record named") as error:
            find_run(tmp_path / "runs", name)
        told.append(str(error.value).replace(name, "NAME"))
    assert len(set(told)) == 1
    assert ltx25("show", str(outside))[1].startswith("outside.jsonl: done")


def test_compare_finds_the_phase_that_changed_beyond_the_spread(ltx25, tmp_path, monkeypatch):
    folder, clock = tmp_path / "runs", Clock(monkeypatch)
    a = render(folder, clock, 768, 448, 25, noise=0.02, seed=1)
    render(folder, clock, 768, 448, 25, noise=0.02, seed=2)
    b = render(folder, clock, 768, 448, 25, noise=0.02, slower=1.3, seed=3)
    status, text = ltx25("compare", a.path.name, b.path.name)
    verdicts = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert status == 0
    assert verdicts["sample"].endswith("slower") and "+" in verdicts["sample"]
    assert verdicts["forward cond+uncond+stg+mod"].endswith("slower") and 25 < change_of(verdicts["forward cond+uncond+stg+mod"]) < 35
    assert verdicts["decode.video"].endswith("same")


def change_of(line):
    """The change in percent out of a printed row."""
    return float(next(part for part in line.split() if part.startswith(("+", "-")) and len(part) > 1))


def rewritten(path, **facts):
    """The record with other header facts."""
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | facts), *rest]) + "\n")


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        ({"steps": 8}, "differs: steps 6 -> 8"),
        ({"legs": ["cond"]}, "differs: legs ['cond', 'uncond', 'stg', 'mod'] -> ['cond']"),
        ({"settings": {"seed": 2, "eta": 1.0}}, "differs: settings.eta None -> 1.0"),
        ({"geometry": {"width": 768, "height": 448, "frames": 49, "frame_rate": 24.0, "batch": 1}}, "differs: geometry.frames 25 -> 49"),
    ],
)
def test_compare_gives_no_verdict_on_different_requests(ltx25, tmp_path, monkeypatch, fact, told):
    folder, clock = tmp_path / "runs", Clock(monkeypatch)
    a, _, b = (render(folder, clock, 768, 448, 25, noise=0.02, seed=seed) for seed in (1, 2, 3))
    rewritten(b.path, **fact)
    _, text = ltx25("compare", a.path.name, b.path.name)
    assert [line for line in text.splitlines() if line.startswith("differs")] == [told]
    rows = text.splitlines()[4:]
    assert len(rows) == 7 and all(row.endswith("different request") for row in rows)


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        ({"files": {"transformer": {"name": "other", "bytes": 1}}}, "differs: files None -> {'transformer': {'name': 'other', 'bytes': 1}}"),
        ({"torch": "2.14"}, "differs: torch 2.13 -> 2.14"),
        ({"device": "Another card"}, "differs: device Toy card -> Another card"),
        ({"options": {"graphs": False}}, "differs: options None -> {'graphs': False}"),
    ],
)
def test_compare_judges_what_another_file_version_or_device_changed(ltx25, tmp_path, monkeypatch, fact, told):
    folder, clock = tmp_path / "runs", Clock(monkeypatch)
    a, _, b = (render(folder, clock, 768, 448, 25, noise=0.02, slower=slower, seed=seed) for seed, slower in ((1, 1.0), (2, 1.0), (3, 1.5)))
    rewritten(b.path, **fact)
    _, text = ltx25("compare", a.path.name, b.path.name)
    assert [line for line in text.splitlines() if line.startswith("differs")] == [told]
    assert next(line for line in text.splitlines() if line.startswith("sample")).endswith("slower")


def test_compare_names_a_profiler_and_no_seed(ltx25, tmp_path, monkeypatch):
    folder, clock = tmp_path / "runs", Clock(monkeypatch)
    a, b = (render(folder, clock, 768, 448, 25, seed=seed) for seed in (1, 2))
    b.path.write_text(b.path.read_text() + json.dumps({"event": "profile", "t": 0.0, "group": 2}) + "\n")
    _, text = ltx25("compare", a.path.name, b.path.name)
    assert [line for line in text.splitlines() if line.startswith("differs")] == ["differs: steps under a profiler 0 -> 1"]
    assert "different request" not in text


def test_compare_does_not_call_noise_a_change(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    a, b, c = (read_run(render(tmp_path, clock, 768, 448, 25, noise=0.1, seed=seed, steps=12).path) for seed in (1, 2, 3))
    change = next(change for change in compare(a, b, [a, b, c]) if change.name.startswith("forward"))
    assert change.verdict == "same" and change.spread > 0.01


def test_compare_says_when_it_knows_no_spread(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    a, b = (read_run(render(tmp_path, clock, 768, 448, 25, seed=seed).path) for seed in (1, 2))
    assert {change.name: change.verdict for change in compare(a, b)}["load.read"] == "spread unknown"


def test_compare_says_which_run_did_not_come_to_its_end(ltx25, records):
    done, failed = records[0].path.name, find_run(records[0].path.parent, "last").name
    for a, b, letter in ((done, failed, "B"), (failed, done, "A"), (failed, failed, "A and B")):
        _, text = ltx25("compare", a, b)
        rows = {line.split("  ")[0]: line for line in text.splitlines()}
        said = [line for line in text.splitlines() if line.endswith("(failed in sample: step 3/6 - forward 9-12/24 (cond+uncond+stg+mod)): only what it completed is compared")]
        assert [line[0] for line in said] == letter.split(" and ")
        for name in ("sample", "run"):
            assert rows[name].endswith(f"stopped in {letter}") and not re.search(r"[+-]\d", rows[name])
        assert "stopped" not in rows["load.read"]
    assert "stopped" not in ltx25("compare", done, records[1].path.name)[1]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("missing/x.png", "No such file or directory"),
        ("folder.png", "Is a directory"),
        ("x.mp4", "no picture format of this size and colour is named '.mp4'"),
        ("x.xbm", "no picture format of this size and colour is named '.xbm'"),  # two colours only
        ("x", "its name has no suffix"),
        ("a\0b.png", "its name cannot be a file's"),
    ],
)
def test_a_plot_that_cannot_be_written_is_one_sentence(records, tmp_path, capsys, output, reason):
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    assert main(["runs", "--runs", str(tmp_path / "runs"), "plot", "last", "-o", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ltx25 runs: the plot cannot be written to ") and f"({reason})" in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_too_full_for_a_plot_is_one_sentence_and_leaves_no_piece_of_it(records, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # a write beyond fails, as on a full disk
    try:
        assert main(["runs", "--runs", str(tmp_path / "runs"), "plot", "last", "-o", str(tmp_path / "x.png")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "(File too large)" in capsys.readouterr().err and not (tmp_path / "x.png").exists()


def test_h5_second_pass_runs_at_the_speed_its_tokens_predict(tmp_path, monkeypatch):
    """A pass that got slower for another reason than its size stands out against the law of the others."""
    clock = Clock(monkeypatch)
    runs = [read_run(render(tmp_path, clock, *size).path) for size in ((768, 448, 25), (1024, 576, 49), (1024, 576, 97))]
    law = law_of(next(iter(measured_series(runs).values())))
    good, slow = (read_run(render(tmp_path, clock, 1280, 704, 49, slower=slower).path) for slower in (1.0, 15.0))
    for run, factor in ((good, 1.0), (slow, 15.0)):
        (measured,) = measured_series([run]).values()
        (tokens,) = measured.seconds
        expected = law.seconds(*measured.terms[tokens])
        assert measured.seconds[tokens][0][0] / expected == pytest.approx(factor, rel=0.1)


def test_plot_is_a_readable_picture_of_1280_px(ltx25, records, tmp_path):
    target = tmp_path / "picture.png"
    status, text = ltx25("plot", records[2].path.stem, "-o", str(target))
    assert status == 0 and text.strip() == str(target)
    image = Image.open(target)
    assert image.width == 1280 and image.height > 300 and image.mode == "RGB"
    assert image.info["record"] == str(records[2].path)
    pixels = np.asarray(image).reshape(-1, 3)
    for colour in ((222, 148, 60), (126, 140, 158), (112, 96, 176), (178, 62, 38)):  # sample, load, decode, device memory
        assert (pixels == colour).all(1).sum() > 50


def test_what_the_device_has_is_not_drawn_as_what_is_used(records):
    run = read_run(records[2].path)
    before = plot_run(run).tobytes()
    run.events[0]["device_memory"] = 1 << 50
    assert plot_run(run).tobytes() == before


def test_steps_under_a_profiler_are_not_compared(ltx25, records):
    path = records[2].path
    lines = path.read_text().splitlines()
    third = [n for n, line in enumerate(lines) if json.loads(line)["event"] == "forward" and json.loads(line)["state"] == "done"][2]
    slow = json.dumps(json.loads(lines[third]) | {"seconds": 1e4})
    lines[third : third + 1] = [json.dumps({"event": "profile", "t": 0.0, "group": 2}), slow]
    path.write_text("\n".join(lines) + "\n")
    status, text = ltx25("compare", path.stem, path.stem)
    spread = next(line for line in text.splitlines() if line.startswith("forward "))
    assert status == 0 and float(re.search(r"([\d.]+) %  same", spread)[1]) < 100


def test_a_plot_among_the_records_is_no_broken_record(ltx25, records, tmp_path):
    assert ltx25("plot", "last-1")[0] == 0
    (tmp_path / "runs" / "foreign.txt").write_text("not a record")
    assert list((tmp_path / "runs").glob("*.png"))
    _, skipped = read_runs(tmp_path / "runs")
    assert len(skipped) == 1 and "foreign.txt" in skipped[0]


def test_runs_of_other_files_are_no_measure_of_the_spread(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    a, b, other = (read_run(render(tmp_path, clock, 768, 448, 25, slower=slower).path) for slower in (1.0, 1.0, 9.0))
    other.header["files"] = {"video_vae": {"header": "another"}}
    assert all((change.spread or 0) < 1 for change in compare(a, b, [other]) if change.name.startswith("forward"))
    other.header.pop("files")
    assert any((change.spread or 0) > 1 for change in compare(a, b, [other]) if change.name.startswith("forward"))


def test_plot_of_a_failed_or_empty_run_is_a_picture_too(records, tmp_path):
    failed = plot_run(find_run(tmp_path / "runs", "last"))
    assert (np.asarray(failed).reshape(-1, 3) == (196, 40, 40)).all(1).sum() > 50  # says that it stopped
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"event": "run", "format": 1, "t": 0.0}) + "\n")
    assert plot_run(read_run(bare)).width == 1280
