import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from comfyui_ltx25.kernels import dispatch
from comfyui_ltx25.ltx25.cli.finish import recorded
from comfyui_ltx25.ltx25.instrument import Forwards, Group, Watch
from comfyui_ltx25.ltx25.instrument import header as about
from comfyui_ltx25.ltx25.instrument.header import machine, request_facts
from comfyui_ltx25.ltx25.instrument.history import find_run, read_run, read_runs
from comfyui_ltx25.ltx25.instrument.meter import DeviceMeter
from comfyui_ltx25.ltx25.instrument.plot import plot_run
from comfyui_ltx25.ltx25.instrument.record import RunRecord
from comfyui_ltx25.ltx25.instrument.report import record_text
from comfyui_ltx25.ltx25.instrument.unfinished import mark_unfinished
from comfyui_ltx25.tests.support.tiny import tiny_files

FOUR = ("cond", "uncond", "stg", "mod")
PACK = Path(__file__).resolve().parents[3]


def lines(record):
    return [json.loads(line) for line in record.path.read_text().splitlines()]


def denoise(watch, steps=3, stop=None, legs=FOUR):
    groups = [Group(step, legs) for step in range(1, steps + 1)]
    with watch.phase("sample", total=steps * len(legs), unit="forward") as phase:
        forwards = Forwards(phase, groups)
        for group in groups:
            if stop is not None and group.step == 3:
                raise stop
            forwards.finished(0.2)


def test_every_event_is_one_line_of_json_and_on_disk_at_once(tmp_path):
    record = RunRecord(tmp_path, {"device": "toy"})
    with record:
        assert lines(record)[0]["event"] == "run"
        assert lines(record)[0]["device"] == "toy"
        watch = Watch([record])
        with watch.phase("text.tower", total=2, unit="layer") as phase:
            assert lines(record)[-1] | {"t": 0} == {
                "event": "phase", "t": 0, "state": "open", "id": 1, "parent": None,
                "name": "text.tower", "total": 2, "unit": "layer", "facts": {}, "device_memory": None, "host_memory": None,
            }  # fmt: skip
            phase.tick(2)
            assert lines(record)[-1]["event"] == "tick"
        assert lines(record)[-1]["state"] == "closed"
        denoise(watch)
        with watch.phase("decode.video", total=2, unit="chunk") as phase:
            phase.tick()
            assert lines(record)[-1]["event"] == "chunk"
            phase.tick()
    assert lines(record)[-1]["event"] == "end"
    assert lines(record)[-1]["status"] == "done"
    assert record.path.parent == tmp_path


def test_a_beat_says_which_kernel_is_prepared_behind_where_the_phase_is(tmp_path, monkeypatch):
    record = RunRecord(tmp_path, {"device": "toy"})
    watch = Watch([record])
    monkeypatch.setattr(dispatch, "_preparing", ["snake"])
    with record:
        for unit in ("layer", "byte"):
            with watch.phase("decode.audio", total=209, unit=unit) as phase:
                record.beat(phase)
    first, second = (line["at"] for line in lines(record) if line["event"] == "beat")
    assert first == "layer 1/209, preparing kernel snake, which takes a while the first time"
    assert second == "preparing kernel snake, which takes a while the first time"


def test_header_holds_machine_files_geometry_and_settings(tmp_path):
    facts = request_facts(
        width=768, height=448, frames=25, frame_rate=24.0, batch=1, tokens={"video": 1344, "audio": 26, "text": 1024},
        steps=30, legs=FOUR, forwards=120, settings={"seed": 3, "stg_blocks": "28"},
    )  # fmt: skip
    with RunRecord(tmp_path, {**machine(torch.device("cpu")), **facts}) as record:
        pass
    header = read_run(record.path).header
    assert header["torch"] == torch.__version__
    assert {"device", "driver", "triton", "pack", "revision", "python"} <= header.keys()
    assert header["driver"] is None  # a CPU has none: null, not missing
    assert header["pack"] and header["forwards"] == 120 and header["tokens"]["video"] == 1344
    assert header["settings"] == {"seed": 3, "stg_blocks": "28"}


def test_the_header_tells_what_the_process_held_before_it_rendered_and_what_it_holds_now(tmp_path, monkeypatch):
    """What a run adds to a process that rendered before is not what it would add to a new one."""
    monkeypatch.setattr(about, "_AT_RUNS", [])
    told = []
    for now in (None, 100, 300, 70, None, 80):  # a host, or the tests before, give memory back between two runs
        monkeypatch.setattr(about, "host_now", lambda now=now: now)
        with RunRecord(tmp_path, machine(torch.device("cpu"))) as record:
            pass
        told.append(tuple(read_run(record.path).header["process"].values()))
    assert told == [(None, None), (100, 100), (100, 300), (70, 70), (70, None), (70, 80)]


def test_h2_a_failed_run_says_where_it_stopped(tmp_path):
    record = RunRecord(tmp_path, {})
    with pytest.raises(RuntimeError), record:
        denoise(Watch([record]), stop=RuntimeError("out of memory"))
    last = lines(record)[-1]
    assert last["event"] == "end" and last["status"] == "failed"
    assert last["error"] == "RuntimeError: out of memory"
    assert last["phase"] == "sample" and last["at"] == "step 3/3 - forward 9-12/12 (cond+uncond+stg+mod)"
    assert "sample" in record.table() and "(stopped)" in record.table()


def test_h2_a_cancelled_run_is_told_from_a_failed_one(tmp_path):
    class Interrupt(BaseException):
        pass

    record = RunRecord(tmp_path, {})
    with pytest.raises(Interrupt), record:
        denoise(Watch([record]), stop=Interrupt())
    assert lines(record)[-1]["status"] == "cancelled"
    assert lines(record)[-1]["at"].startswith("step 3/3 - forward 9-12/12")


TOY = """
import sys, time
sys.path.insert(0, {tests!r})
import conftest
from pathlib import Path
from comfyui_ltx25.ltx25.instrument import Forwards, Group, Watch
from comfyui_ltx25.ltx25.instrument.record import RunRecord
record = RunRecord(Path({folder!r}), {{}})
groups = [Group(step, ("cond", "uncond", "stg", "mod")) for step in range(1, 9)]
with record:
    with Watch([record]).phase("sample", total=32, unit="forward") as phase:
        forwards = Forwards(phase, groups)
        for group in groups:
            if group.step == 3:
                print("in step 3", flush=True)
                time.sleep(60)
            forwards.finished(0.05)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with the record of a run killed in the middle of step 3."""
    folder = tmp_path_factory.mktemp("runs")
    code = TOY.format(tests=str(PACK / "tests"), folder=str(folder))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "in step 3\n"
    path = next(folder.glob("*.jsonl"))
    before = events_of(path)
    with RunRecord(folder, {}):  # a second run starts while the first one lives
        living = (before, events_of(path))
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    return path, living


def events_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kill_in_the_middle_of_step_3_leaves_a_record_whose_last_line_names_that_forward(killed):
    path, _ = killed
    last = events_of(path)[-1]
    assert last["event"] in ("forward", "beat")
    assert "step 3/8 - forward 9-12/32 (cond+uncond+stg+mod)" in last["at"]
    if last["event"] == "forward":
        assert (last["state"], last["first"], last["last"], last["of"]) == ("running", 9, 12, 32)


def test_a_living_run_is_not_marked_and_two_at_once_write_two_files(killed):
    path, (before, after) = killed
    assert len(list(path.parent.glob("*.jsonl"))) == 2
    assert [e for e in after if e["event"] == "end"] == []
    assert after[: len(before)] == before


def test_the_next_run_marks_a_killed_one(killed, caplog):
    path, _ = killed
    caplog.set_level(logging.INFO)
    with RunRecord(path.parent, {}):
        pass
    end = events_of(path)[-1]
    assert end["event"] == "end" and end["status"] == "killed" and end["phase"] == "sample"
    assert "forward 9-12/32" in end["at"]
    assert len([r for r in caplog.records if "forward 9-12/32" in r.message]) == 1
    caplog.clear()
    with RunRecord(path.parent, {}):
        pass
    assert not caplog.records  # once
    run = next(run for run in read_runs(path.parent)[0] if run.status == "killed")
    assert run.where.startswith("sample: step 3/8 - forward 9-12/32")
    assert run.phases[0]["error"] == "unfinished" and run.phases[0]["name"] == "sample"
    assert [(f["first"], f["last"]) for f in run.forwards] == [(1, 4), (5, 8)]


def test_a_render_killed_in_step_3_leaves_a_record_that_names_the_forward(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(PACK / 'tests')!r}); import conftest; from comfyui_ltx25.ltx25.cli import main; main(sys.argv[1:])"
    render = ["render", "--tiny", "--prompt", "a heron", "--width", "256", "--height", "256", "--steps", "40", "--runs", str(tmp_path), "-o", str(tmp_path / "x.mp4")]
    shutil.copytree(tiny_files().transformer.parents[1], tmp_path / "cache" / "tiny")
    environment = {**os.environ, "LTX25_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code, *render], stderr=subprocess.PIPE, text=True, env=environment) as child:
        for line in child.stderr:
            if "step 2/40 - forward 5-8/160" in line and "last" in line:
                break
        child.send_signal(signal.SIGKILL)
    (path,) = tmp_path.glob("*.jsonl")
    last = json.loads(path.read_text().splitlines()[-1])
    run = read_run(path)
    done = run.forwards[-1]["last"]  # 8, or more where this process was slow to kill
    assert last["event"] in ("forward", "tick", "beat") and last["phase"] == "sample"
    assert f"step {done // 4 + 1}/40 - forward {done + 1}-{done + 4}/160 (cond+uncond+stg+mod)" in last["at"]
    assert run.header["forwards"] == 160 and run.header["tokens"] == {"video": 448, "audio": 51}
    assert {"load.read", "text.tower"} <= {row["name"] for row in run.phases if not row["error"]}
    assert not (tmp_path / "x.mp4").exists()


def test_a_torn_last_line_is_repaired_by_the_mark(tmp_path):
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    text = record.path.read_text().splitlines()
    record.path.write_text("\n".join(text[:-2]) + '\n{"event":"pha')
    with RunRecord(tmp_path, {}):
        pass
    run = read_run(record.path)
    assert run.status == "killed" and run.skipped == 1


def test_a_phase_that_was_killed_counts_what_it_had_done(killed, tmp_path):
    """8 of 32 forwards were done; memory is the largest of what its own lines told."""
    path, _ = killed
    (row,) = read_run(path).phases
    assert (row["done"], row["total"], row["error"]) == (8, 32, "unfinished")
    text = path.read_text().splitlines()
    phase = next(json.loads(line) for line in text if json.loads(line)["event"] == "phase")
    at = text.index(next(line for line in text if '"state":"running"' in line))
    told = [
        {"event": "beat", "t": 1.0, "id": phase["id"], "done": 8, "host_memory": 5 << 30},
        {"event": "beat", "t": 1.1, "id": phase["id"], "done": 8, "host_memory": 3 << 30},
        {"event": "tick", "t": 1.1, "id": phase["id"], "done": 8, "device_memory": 7 << 30, "host_memory": None},
        {"event": "tick", "t": 1.2, "id": phase["id"] + 1, "done": 30, "device_memory": 9 << 30, "host_memory": 9 << 30},
    ]
    copy = tmp_path / path.name
    copy.write_text("\n".join([*text[:at], *map(json.dumps, told), *text[at:]]) + "\n")
    (row,) = read_run(copy).phases
    assert (row["done"], row["peak_device"], row["peak_host"]) == (8, 7 << 30, 5 << 30)
    line = next(line for line in record_text(read_run(copy)).splitlines() if line.startswith("sample"))
    assert "8/32 forwards (stopped)" in line and line.endswith("7.0 GiB    5.0 GiB")


@pytest.mark.parametrize("kind", ["file in the way", "read only"])
def test_a_folder_that_cannot_be_written_costs_the_record_not_the_render(tmp_path, kind, caplog):
    folder = tmp_path / "ltx25_runs"
    if kind == "read only":
        if not hasattr(os, "geteuid") or os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        folder.mkdir()
        folder.chmod(0o500)
    else:
        folder.write_text("not a folder")
    with RunRecord(folder, {}) as record:
        denoise(Watch([record]))
    assert record.path is None
    assert [row["name"] for row in record.phases] == ["sample"] and "sample" in record.table()
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("full", ["first line", "middle", "last line", "next part"])
def test_a_disk_that_fills_up_costs_the_record_with_one_warning_and_leaves_no_piece_of_it(tmp_path, caplog, capsys, full):
    """No file may grow for a while: a write fails as on a full disk. What is left would be called killed by the next run."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    record = RunRecord(tmp_path, {})

    def fill(now):
        if now == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (record.path.stat().st_size if record.path else 0, hard))

    def work(watch):
        with watch.phase("decode.video", total=10, unit="chunk") as phase:
            for n in range(10):
                if n == 5:
                    fill("middle")
                phase.tick()
        fill("last line")
        return ["a clip"]

    try:
        fill("first line")
        assert recorded(record, torch.device("cpu"), True, work) == 0
        fill("next part")
        with record, Watch([record]).phase("mux"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch("a clip\n" + ("record: .*\n" if full == "next part" else ""), capsys.readouterr().out) and len(record.phases) == 2
    assert [told.getMessage() for told in caplog.records] == [f"The run record in {tmp_path} is lost (File too large); the render goes on without one."]
    assert record.path is None and not list(tmp_path.iterdir())
    assert mark_unfinished(tmp_path) == []


def test_a_clock_that_is_set_back_makes_no_negative_duration(tmp_path, monkeypatch):
    wall = iter(range(10**9, 0, -10_000))
    monkeypatch.setattr(time, "time", lambda: float(next(wall)))
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    run = read_run(record.path)
    times = [e["t"] for e in run.events]
    assert times == sorted(times) and times[0] >= 0
    assert all(row["wall"] >= 0 for row in run.phases) and run.wall >= 0


PROMPT = "a lighthouse in a storm, seen from the sea"


@pytest.mark.parametrize("keep", [False, True])
def test_prompt_text_is_kept_only_when_asked_for(tmp_path, keep):
    long = "waves and waves, " * 100 + "\nand gulls"
    record = RunRecord(tmp_path, {}, {"prompt": PROMPT}, record_prompts=keep)
    with pytest.raises(ValueError), record:
        with Watch([record]).phase("text.tokenize") as phase:
            phase.within(f"cutting '{PROMPT}'")
        record.describe({"negative": PROMPT + " at night"})
        record.describe({"long": long})
        assert record.prompts == 3
        raise ValueError(f"cannot encode {PROMPT} and {PROMPT} at night: {long}")
    text = record.path.read_text()
    assert all((words in text) == keep for words in (PROMPT, "at night", "waves"))
    assert read_run(record.path).header["prompts"]["negative"]["characters"] == len(PROMPT) + 9


def test_nested_phases_and_several_parts_make_one_record(tmp_path):
    record = RunRecord(tmp_path, {})
    with record, Watch([record]).phase("text.tower") as phase:
        phase.moved(h2d=5)
    assert read_run(record.path).status == "done"
    time.sleep(0.3)  # another node of the graph: not this run's time
    with record:
        record.describe(steps=3)
        watch = Watch([record])
        with watch.phase("sample"), watch.phase("load.stage"):
            time.sleep(0.05)
    run = read_run(record.path)
    assert len(list(tmp_path.iterdir())) == 1
    assert [(row["name"], row["parent"]) for row in run.phases] == [("text.tower", None), ("load.stage", 2), ("sample", None)]
    assert run.header["steps"] == 3
    assert run.phases[0]["h2d"] == 5 and run.phases[1]["h2d"] is None
    assert run.wall < 0.25
    assert [e["status"] for e in run.of("end")] == ["done", "done"]


def test_the_phase_table_accounts_for_the_wall(tmp_path):
    with RunRecord(tmp_path, {}) as record:
        watch = Watch([record], DeviceMeter(torch.device("cpu")))
        for name in ("text.tower", "sample", "decode.video"):
            with watch.phase(name):
                time.sleep(0.3)
        watch.finish()
    end = read_run(record.path).end
    assert end["accounted"] > 0.99
    table = record.table().splitlines()
    assert table[0].startswith("phase") and table[-1].startswith("run")
    assert [line.split()[0] for line in table[1:4]] == ["text.tower", "sample", "decode.video"]


def test_values_json_does_not_know_are_written_or_null(tmp_path):
    record = RunRecord(tmp_path, {"legs": frozenset(["b", "a"])})
    with record, Watch([record]).phase("sample", total=1, unit="chunk") as phase:
        phase.tick(ratio=float("nan"), path=Path("x"), nested={"y": float("inf")})
    run = read_run(record.path)
    assert run.header["legs"] == ["a", "b"]
    assert run.of("chunk")[0]["facts"] == {"ratio": None, "path": "x", "nested": {"y": None}}


def test_a_hundred_thousand_lines_load_in_a_second(tmp_path):
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record], DeviceMeter(torch.device("cpu"))))
    text = record.path.read_text().splitlines()
    first = next(i for i, line in enumerate(text) if '"state":"done"' in line)
    record.path.write_text("\n".join([*text[:first], *text[first : first + 2] * 50_000, *text[first + 2 :]]) + "\n")
    for _ in range(3):  # the machine may be busy with something else: this process's own seconds, and three attempts
        begin = time.process_time()
        run = read_run(record.path)
        seconds = time.process_time() - begin
        if seconds < 1.0:
            break
    assert len(run.forwards) == 50_002 and run.skipped == 0
    assert seconds < 1.0


def test_foreign_and_corrupt_files_are_skipped_with_one_line_each(tmp_path):
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "other.jsonl").write_text('{"event": "train", "loss": 1}\n')
    (tmp_path / "array.jsonl").write_text("[1, 2]\n")
    (tmp_path / "newer.jsonl").write_text('{"event": "run", "format": 99}\n')
    (tmp_path / "odd.jsonl").write_text('{"event": "run", "format": 1}\n{"event": "phase", "state": "closed", "id": 1}\n')
    runs, skipped = read_runs(tmp_path)
    assert [run.path for run in runs] == [record.path]
    assert len(skipped) == 7 and all("\n" not in line for line in skipped)
    assert "update the pack" in next(line for line in skipped if "newer" in line)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p != record.path}
    with RunRecord(tmp_path, {}):
        pass
    assert {name: (tmp_path / name).read_bytes() for name in before if name != "odd.jsonl"}.items() <= before.items()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_what_is_no_file_is_never_opened(tmp_path):
    """Opening a pipe that nobody writes to waits for ever, and every render looks at the folder first."""
    with RunRecord(tmp_path, {}) as first:
        pass
    os.mkfifo(tmp_path / "zz.jsonl")
    (tmp_path / "zzz.jsonl").mkdir()
    found = []

    def look():
        found.append(mark_unfinished(tmp_path))
        found.append(find_run(tmp_path, "last").path)
        found.append([run.path for run in read_runs(tmp_path)[0]])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [[], first.path, [first.path]]


@pytest.mark.parametrize("torn", [b"", b'{"event":"tick","text":"' + b"x" * 300_000])
def test_a_killed_run_is_marked_however_long_its_lines_are(tmp_path, torn):
    header = {"event": "run", "t": 0.0, "format": 1, "started": "2026-01-01T00:00:00+0000", "prompts": {"prompt": {"text": "word " * 20_000}}}
    last = {"event": "phase", "t": 1.5, "id": 1, "state": "open", "name": "text.tower", "facts": {"loras": ["x" * 1000] * 150}}
    (tmp_path / "killed.jsonl").write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in (header, last)) + torn)
    assert mark_unfinished(tmp_path) == ["An earlier run ended without a word in text.tower:  (killed.jsonl)"]
    run = find_run(tmp_path, "last")
    assert (run.status, run.end["t"], run.where, run.skipped) == ("killed", 1.5, "text.tower", len(torn) > 0)
    assert mark_unfinished(tmp_path) == []


def test_a_line_of_endless_brackets_costs_no_render(tmp_path):
    deep = b"[" * 15_000
    (tmp_path / "deep.jsonl").write_bytes(deep + b"\n")
    (tmp_path / "inside.jsonl").write_bytes(b'{"event":"run","format":1,"t":0.0,"started":"2026-01-01T00:00:00+0000"}\n' + deep + b"\n")
    with RunRecord(tmp_path, {}):
        pass
    runs, skipped = read_runs(tmp_path)
    assert [run.status for run in runs] == ["killed", "done"] and runs[0].skipped == 1
    assert len(skipped) == 1 and "deep.jsonl is not a run record" in skipped[0]


HEAD = '{"event":"run","t":0.0,"format":1}\n'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"event":"run","t":"x","format":1}', "t of a run line"),
        ('{"event":"run","format":1}', "t of a run line"),
        ('{"event":"run","t":0,"format":1,"geometry":{"width":768}}', "geometry of a run line"),
        ('{"event":"run","t":0,"format":1,"files":[1]}', "files of a run line"),
        (HEAD + '{"event":"about","t":0,"legs":[1,2]}', "legs of a about line"),
        (HEAD + '{"event":"end","t":1,"status":"done","wall":"long"}', "wall of a end line"),
        (HEAD + '{"event":"end","t":1,"status":["done"],"wall":1}', "status of a end line"),
        (HEAD + '{"event":"phase","t":1,"state":"open","id":[1],"name":"sample"}', "id of a phase line"),
        (HEAD + '{"event":"phase","t":1,"state":"closed","id":1,"name":"sample","wall":null}', "wall of a phase line"),
        (HEAD + '{"event":"phase","t":1,"state":"closed","id":1,"parent":1,"name":"sample","wall":1}', "parent of a phase line"),
        (HEAD + '{"event":"phase","t":1,"state":"closed","id":1,"name":"sample","wall":1,"facts":{"work":[{}]}}', "facts of a phase line"),
        (HEAD + '{"event":"forward","t":1,"state":"done","id":1,"seconds":[]}', "seconds of a forward line"),
        (HEAD + '{"event":"forward","t":1,"state":"done","id":1}', "seconds of a forward line"),
        (HEAD + '{"event":"beat","t":1}\n{"event":"beat","t":"1"}', "t of a beat line"),
        (HEAD + '{"event":"noise","t":1,"state":[]}', "state of a noise line"),
        (HEAD + '{"event":"profile","t":1,"group":{}}', "group of a profile line"),
    ],
)
def test_one_record_with_a_wrong_field_hides_no_other(tmp_path, text, field):
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    (tmp_path / "zz-wrong.jsonl").write_text(text + "\n")
    runs, skipped = read_runs(tmp_path)
    assert [run.path for run in runs] == [record.path]
    assert skipped == [f"skipped: zz-wrong.jsonl has no usable {field}; delete it or choose another record."]


def test_a_phase_that_no_record_saw_open_is_drawn(tmp_path):
    """Another listener may cancel while a phase opens: the record is told of its end alone."""
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    text = record.path.read_text().splitlines()
    lone = {"event": "phase", "t": 0.0, "state": "closed", "id": None, "parent": None, "name": "decode.video", "wall": 0.0}
    record.path.write_text("\n".join([*text[:-1], json.dumps(lone), text[-1]]) + "\n")
    run = read_run(record.path)
    assert [row["name"] for row in run.phases] == ["sample", "decode.video"]
    assert plot_run(run).width == 1280 and "decode.video" in record_text(run)


def test_a_damaged_line_costs_itself_only(tmp_path):
    with RunRecord(tmp_path, {}) as record:
        denoise(Watch([record]))
    text = record.path.read_text().splitlines()
    text[2] = text[2][:20]
    text[3:3] = ['{"event":"beat","t":NaN}', '{"event":"beat","t":1e999}']
    record.path.write_text("\n".join(text) + "\n")
    run = read_run(record.path)
    assert run.skipped == 3 and run.status == "done" and len(run.phases) == 1


def test_instrument_costs_less_than_one_percent_of_a_10_ms_forward(tmp_path):
    """Per group: two lines written and flushed, text, estimate, memory sample, heartbeat bookkeeping."""
    groups = [Group(step, FOUR) for step in range(1, 501)]
    with RunRecord(tmp_path, {}) as record:
        watch = Watch([record], DeviceMeter(torch.device("cpu")))
        with watch.phase("sample", total=2000, unit="forward") as phase:
            forwards = Forwards(phase, groups)
            costs = []
            for _ in groups:
                begin = time.perf_counter()
                forwards.finished(0.01)
                costs.append(time.perf_counter() - begin)
    typical = sorted(costs)[len(costs) // 2]
    assert typical < 1e-4, f"{typical * 1e6:.0f} us of a 10 ms forward"


def test_a_failure_between_the_parts_ends_the_run_as_failed_and_keeps_the_prompt_out(tmp_path):
    record = RunRecord(tmp_path, {"device": "toy"}, {"prompt": "a secret heron"})
    with record, Watch([record]).phase("text.tower"):
        pass
    record.fail("Guider", ValueError("block 99 of a secret heron is none; use 0 to 3."))
    assert record.status == "failed"
    run = read_run(record.path)
    assert (run.status, run.where) == ("failed", "Guider")
    assert run.end["error"] == "ValueError: block 99 of [prompt] is none; use 0 to 3."
    assert [phase["name"] for phase in run.phases] == ["text.tower"] and run.wall == pytest.approx(record.wall)
