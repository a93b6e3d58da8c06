import re
import time

import pytest
from comfyui_ltx25.kernels import dispatch
from comfyui_ltx25.ltx25.instrument import Forwards, Group, TextSink, Watch
from comfyui_ltx25.ltx25.instrument.units import bytes_text, rate_text


@pytest.fixture
def shown():
    lines = []
    return Watch([TextSink(lines.append)]), lines


def test_one_line_per_group_of_forwards(shown):
    watch, lines = shown
    with watch.phase("sample", total=6, unit="forward") as phase:
        forwards = Forwards(phase, [Group(step, ("cond", "uncond")) for step in (1, 2, 3)], "about 3 s predicted (law of 3 geometries)")
        for _ in range(3):
            forwards.finished(1.0)
    assert lines == [
        "sample: begins, 6 forwards",
        "sample: step 1/3 - forward 1-2/6 (cond+uncond) - about 3 s predicted (law of 3 geometries)",
        "sample: step 1/3 - forward 1-2/6 (cond+uncond) - last 1.00 s",
        "sample: step 2/3 - forward 3-4/6 (cond+uncond) - last 1.00 s - about 1 s left (from 1 step)",
        "sample: step 3/3 - forward 5-6/6 (cond+uncond) - last 1.00 s",
        lines[-1],
    ]
    assert lines[-1].startswith("sample: done in ")


def test_bytes_are_shown_with_their_rate_and_layers_not_all(shown):
    watch, lines = shown
    with watch.phase("load.read", total=3 << 30, unit="byte") as phase:
        time.sleep(0.55)
        phase.tick(1 << 30)
    assert lines[0] == "load.read: begins, 3.0 GiB"
    assert lines[1].startswith("load.read: 1.0 GiB of 3.0 GiB at ") and lines[1].endswith("GB/s")
    lines.clear()
    with watch.phase("text.tower", total=48, unit="layer") as phase:
        for _ in range(48):
            phase.tick()
    assert len(lines) == 2  # begins, done: quick layers need no line each


def test_chunks_get_a_line_each_in_their_own_words(shown):
    watch, lines = shown
    with watch.phase("decode.video", total=2, unit="chunk") as phase:
        phase.tick(text="chunk 1 of 2")
        phase.tick()
    assert lines[1:3] == ["decode.video: chunk 1 of 2", "decode.video: chunk 2/2"]


def test_h2_a_stopped_phase_says_where(shown):
    watch, lines = shown
    with pytest.raises(MemoryError), watch.phase("text.tower", total=48, unit="layer") as phase:
        phase.tick(7)
        raise MemoryError
    assert lines[-1].startswith("text.tower: stopped after ") and lines[-1].endswith("at layer 8/48 (MemoryError)")


def test_silence_is_broken(shown):
    watch, lines = shown
    with watch.phase("mux"):
        time.sleep(1.1)
    assert any(re.fullmatch(r"mux: has run for (0\.9|1\.0)\d s", line) for line in lines)


def test_how_long_a_phase_has_run_is_not_said_of_the_forward_it_is_at(shown):
    watch, lines = shown
    with watch.phase("sample", total=6, unit="forward") as phase:
        Forwards(phase, [Group(step, ("cond", "uncond")) for step in (1, 2, 3)])
        phase.started -= 6.43
        watch.sinks[0].beat(phase)
    assert re.fullmatch(r"sample: step 1/3 - forward 1-2/6 \(cond\+uncond\), sample has run for 6\.4\d s", lines[-2])


def test_a_phase_that_is_silent_while_a_kernel_is_compiled_says_so(shown, monkeypatch):
    watch, lines = shown
    monkeypatch.setattr(dispatch, "_preparing", ["snake"])
    with watch.phase("decode.audio", total=209, unit="layer") as phase:
        watch.sinks[0].beat(phase)
        monkeypatch.undo()
        watch.sinks[0].beat(phase)
    said, unsaid = lines[-3:-1]
    assert said.startswith("decode.audio: layer 1/209, decode.audio has run for") and said.endswith("s, preparing kernel snake, which takes a while the first time")
    assert "kernel" not in unsaid


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (40 << 30, "40.0 GiB"), (3 << 41, "6144.0 GiB"), (None, "-")])
def test_bytes_text(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(("n", "text"), [(55.5e9, "55.5 GB/s"), (52e6, "52 MB/s"), (None, "-")])
def test_rate_text(n, text):
    assert rate_text(n) == text
