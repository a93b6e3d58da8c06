import gc
import time
import weakref

import pytest
import torch
from comfyui_ltx25.ltx25.instrument import DeviceMeter, RunRecord, Sink, Watch, memory, meter
from comfyui_ltx25.ltx25.instrument.history import read_run

CPU = torch.device("cpu")


class FakeEvent:
    """An event of a device that is `lag` s behind the host. Waiting on it is an error."""

    lag = 0.0

    def __init__(self):
        self.at = time.monotonic()

    def query(self):
        return time.monotonic() >= self.at + self.lag

    def elapsed_time(self, later):
        assert self.query() and later.query(), "asked before it was complete"
        return 1000 * (later.at - self.at)

    def synchronize(self):
        raise AssertionError("the instrument waited for the device")


@pytest.fixture
def card(monkeypatch):
    """A CUDA device as far as the meter can tell."""

    def refuse(*_):
        raise AssertionError("the instrument waited for the device")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "stream")
    monkeypatch.setattr(meter, "_recorded", lambda stream: FakeEvent())
    monkeypatch.setattr(FakeEvent, "lag", 0.0)
    return torch.device("cuda")


class Late(Sink):
    def __init__(self):
        self.closed_with, self.late = {}, {}

    def closed(self, phase):
        self.closed_with[phase.name] = phase.device_span

    def measured(self, phase):
        self.late[phase.name] = phase.device_span


def test_device_span_is_between_events_and_known_at_close_when_the_device_is_done(card):
    sink = Late()
    with Watch([sink], DeviceMeter(card)).phase("sample"):
        time.sleep(0.02)
    assert sink.closed_with["sample"] == pytest.approx(0.02, abs=0.015) and not sink.late


def test_a_device_that_lags_is_not_waited_for_and_its_span_arrives_later(card, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeEvent, "lag", 0.15)
    with RunRecord(tmp_path, {}) as record:
        sink = Late()
        watch = Watch([sink, record], DeviceMeter(card))
        begin = time.monotonic()
        with watch.phase("text.tower"):
            time.sleep(0.02)
        assert time.monotonic() - begin < 0.1 and sink.closed_with["text.tower"] is None
        time.sleep(0.2)
        with watch.phase("sample"):
            pass
        watch.finish()
    assert sink.late["text.tower"] == pytest.approx(0.02, abs=0.015)
    rows = {row["name"]: row for row in read_run(record.path).phases}
    assert rows["text.tower"]["device_span"] == pytest.approx(sink.late["text.tower"])
    assert rows["sample"]["device_span"] is not None


def test_a_device_that_never_answers_costs_a_second_at_the_end_and_a_null(card, monkeypatch):
    monkeypatch.setattr(FakeEvent, "lag", 1e9)
    watch = Watch([], DeviceMeter(card))
    with watch.phase("sample") as phase:
        pass
    begin = time.monotonic()
    watch.finish()
    assert time.monotonic() - begin < 1.5 and phase.device_span is None


def test_every_stream_of_the_engine_ends_the_span(card, monkeypatch):
    ends = []
    monkeypatch.setattr(meter, "_recorded", lambda stream: ends.append(stream) or FakeEvent())
    with Watch([], DeviceMeter(card, ["copies"])).phase("load.stage"):
        pass
    assert ends == ["stream", "stream", "copies"]


def test_no_event_is_recorded_while_a_stream_is_captured(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(meter, "_recorded", lambda stream: pytest.fail("recorded during capture"))
    with Watch([], DeviceMeter(card)).phase("sample") as phase:
        pass
    assert phase.device_span is None


def test_without_cuda_the_device_is_null_and_the_host_is_measured():
    held = []
    with Watch([], DeviceMeter(CPU)).phase("decode.video") as phase:
        held.append(torch.ones(64 << 20, dtype=torch.uint8))
        phase.within("filled")
    assert phase.device_span is None and phase.peak_device is None and phase.peak_sum is None
    if memory.host_now() is not None:
        assert phase.peak_host >= 64 << 20


def test_peaks_belong_to_the_phases_that_were_open(monkeypatch):
    """Peaks of a device whose counter reads as scripted: each stretch counts for every phase open in it."""
    script = iter([5, 9, 4, 7])
    monkeypatch.setattr(meter, "device_peak", lambda device: next(script))
    monkeypatch.setattr(meter, "device_now", lambda device: 1)
    watch = Watch([], DeviceMeter(CPU))
    with watch.phase("outer") as outer:  # nothing open before: the counter is not read
        with watch.phase("first") as first:  # 5 in outer alone
            pass  # 9 in both
        with watch.phase("second") as second:  # 4 in outer alone
            pass  # 7 in both
        monkeypatch.setattr(meter, "device_peak", lambda device: 2)
    assert (first.peak_device, second.peak_device, outer.peak_device) == (9, 7, 9)


def test_one_missing_value_costs_no_other(monkeypatch):
    def broken(*_):
        raise RuntimeError("driver says no")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", broken)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", broken)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "current_stream", broken)
    with Watch([], DeviceMeter(torch.device("cuda"))).phase("sample") as phase:
        pass
    assert phase.device_span is None and phase.peak_device == 77
    assert phase.peak_host is None or phase.peak_host > 0


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize(("share", "free"), [(1.0, 60 + 10 - 7), (0.5, 40 + 10 - 7)])
def test_m2_what_a_card_has_left_is_asked_by_number_and_held_to_the_process_share(monkeypatch, name, share, free):
    """Some of torch's questions refuse a device without a number; a missing answer would read as endless memory."""
    answers = {"mem_get_info": (60, 100), "memory_reserved": 10, "memory_allocated": 7, "get_per_process_memory_fraction": share, "current_device": 0}
    for question, answer in answers.items():
        monkeypatch.setattr(torch.cuda, question, lambda *index, answer=answer: answer if index in ((), (0,)) else 1 / 0, raising=False)
    assert memory.device_free(torch.device(name)) == free


def test_shared_memory_devices_report_the_sum(monkeypatch):
    monkeypatch.setattr(meter, "is_unified", lambda device: True)
    monkeypatch.setattr(meter, "device_now", lambda device: 100)
    monkeypatch.setattr(meter, "host_now", lambda: 30)
    monkeypatch.setattr(meter, "host_peak", lambda: None)
    with Watch([], DeviceMeter(CPU)).phase("sample") as phase:
        pass
    assert phase.peak_sum == 130


def test_h6_a_failed_run_keeps_nothing_of_what_it_worked_on(tmp_path):
    class Tensor:
        pass

    def work(watch):
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        with watch.phase("sample"):
            raise RuntimeError("no memory")

    alive = []
    record, meters = RunRecord(tmp_path, {}), DeviceMeter(CPU)
    watch = Watch([record], meters)
    with pytest.raises(RuntimeError), record:
        work(watch)
    gc.collect()
    assert alive[0]() is None
    assert record.phases[0]["error"] == "RuntimeError: no memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_span_and_peak_of_real_work_on_the_gpu():
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    watch = Watch([], DeviceMeter(device))
    begin = time.perf_counter()
    with watch.phase("sample") as phase:
        for _ in range(50):
            b = a @ a
    returned = time.perf_counter() - begin
    watch.finish()
    assert phase.device_span > 50 * 2 * 8192**3 / 2e15  # no card does 2 PFLOP/s of dense bf16
    assert phase.device_span > 0.5 * returned
    assert phase.peak_device >= a.nbytes + b.nbytes
