import threading
import time

import pytest
from comfyui_ltx25.ltx25.instrument import Sink, Watch, watch


class Log(Sink):
    """Remembers (seconds since the start, what, phase, thread)."""

    def __init__(self):
        self.start = time.monotonic()
        self.events = []

    def _add(self, what, phase):
        self.events.append((time.monotonic() - self.start, what, phase.name, threading.current_thread()))

    def opened(self, phase):
        self._add("opened", phase)

    def ticked(self, phase):
        self._add("ticked", phase)

    def closed(self, phase):
        self._add("closed", phase)

    def beat(self, phase):
        self._add("beat", phase)


@pytest.fixture
def impatient(monkeypatch):
    """Heartbeats come after this many seconds of silence, for tests of what is in them."""
    monkeypatch.setattr(watch, "SILENCE", 0.5)
    return watch.SILENCE


def test_no_second_passes_without_an_event():
    log = Log()
    with Watch([log]).phase("decode.audio"):
        time.sleep(2.2)
    times = [t for t, *_ in log.events]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) < 1.0
    assert [what for _, what, *_ in log.events].count("beat") == 2


def test_a_phase_that_ticks_gets_no_heartbeat():
    log = Log()
    with Watch([log]).phase("text.tower", total=30, unit="layer") as phase:
        for _ in range(22):
            time.sleep(0.05)
            phase.tick()
    assert "beat" not in [what for _, what, *_ in log.events]


def test_heartbeat_names_the_innermost_phase_and_comes_from_its_own_thread(impatient):
    log = Log()
    watch = Watch([log])
    with watch.phase("load.read"), watch.phase("load.stage"):
        time.sleep(impatient + 0.2)
    beats = [(name, thread) for _, what, name, thread in log.events if what == "beat"]
    assert [name for name, _ in beats] == ["load.stage"]
    assert beats[0][1] is not threading.current_thread()


def test_heartbeat_never_asks_for_a_cancel(impatient):
    asked = []

    class Host(Log):
        def check(self):
            asked.append(threading.current_thread())

    log = Host()
    with Watch([log]).phase("text.tower"):
        time.sleep(impatient + 0.2)
    assert set(asked) == {threading.current_thread()} and "beat" in [what for _, what, *_ in log.events]


def test_the_heart_stops_with_the_last_phase():
    with Watch([Log()]).phase("mux"):
        assert "ltx25-heartbeat" in [t.name for t in threading.enumerate()]
    time.sleep(0.05)
    assert "ltx25-heartbeat" not in [t.name for t in threading.enumerate()]


def test_a_sink_that_cannot_beat_costs_only_its_own_heartbeat(impatient, caplog):
    class Broken(Sink):
        def beat(self, phase):
            raise RuntimeError("no screen")

    log = Log()
    with Watch([Broken(), log]).phase("mux"):
        time.sleep(2 * impatient + 0.2)
    assert [what for _, what, *_ in log.events].count("beat") == 2
    assert len([r for r in caplog.records if "no screen" in r.message]) == 1


def test_a_cancel_closes_every_phase_with_its_error():
    class Cancelled(BaseException):
        pass

    class Host(Log):
        def __init__(self):
            super().__init__()
            self.closes = []

        def check(self):
            if len(self.events) > 3:
                raise Cancelled

        def closed(self, phase):
            super().closed(phase)
            self.closes.append((phase.name, type(phase.error)))

    host = Host()
    watch = Watch([host])
    with pytest.raises(Cancelled), watch.phase("sample", 8, "forward"), watch.phase("text.tower") as phase:
        for _ in range(8):
            phase.tick()
    assert host.closes == [("text.tower", Cancelled), ("sample", Cancelled)]
    assert watch.current is None


def test_bytes_moved_count_in_every_open_phase():
    watch = Watch()
    with watch.phase("load.read") as outer:
        with watch.phase("load.stage") as inner:
            inner.moved(h2d=10)
            inner.moved(d2h=3)
        assert (outer.h2d, outer.d2h) == (10, 3)
        assert (inner.h2d, inner.d2h) == (10, 3)
    with watch.phase("mux") as nothing:
        pass
    assert nothing.h2d is None and nothing.d2h is None  # nobody counted: not known, not zero


def test_position_is_the_unit_that_runs():
    with Watch().phase("text.tower", total=48, unit="layer") as phase:
        assert phase.position == "layer 1/48"
        phase.tick()
        assert phase.position == "layer 2/48"
