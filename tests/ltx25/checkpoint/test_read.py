import math
import os
import threading
import time

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read, read_bytes, read_header, read_tensors
from comfyui_ltx25.ltx25.checkpoint.finite import first_without, numbers
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import tensor_bytes
from safetensors.torch import save_file


class Stop(BaseException):
    """Stands for the host's cancel, which is not an Exception either."""


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": torch.randn(37, 11, generator=generator).bfloat16(),
        "table": torch.randn(5, 3, generator=generator),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "signed": torch.randint(-128, 128, (9, 2), generator=generator, dtype=torch.int8),
        "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def header(tensors, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    return read_header(tmp_path / "x.safetensors")


def empty_like(tensors):
    return {name: torch.full_like(t.float(), float("nan")).to(t.dtype) if t.is_floating_point() else torch.ones_like(t) for name, t in tensors.items()}


@pytest.mark.parametrize("buffer", [8, 24, 1 << 20])
def test_pieces_of_any_size_give_the_file_back_bit_for_bit(header, tensors, monkeypatch, buffer):
    monkeypatch.setattr(read, "BUFFER_BYTES", buffer)
    got, counted = empty_like(tensors), []
    read_tensors(header, got, counted.append)
    for name, want in tensors.items():
        assert got[name].dtype == want.dtype
        assert torch.equal(got[name].view(torch.uint8) if want.dim() else got[name], want.view(torch.uint8) if want.dim() else want), name
    assert sum(counted) == tensor_bytes(header)
    assert max(counted) <= buffer


def test_dtype_is_widened_exactly(header, tensors, monkeypatch):
    monkeypatch.setattr(read, "BUFFER_BYTES", 16)
    got = {name: torch.empty(tensors[name].shape, dtype=torch.float64) for name in ("wide", "table", "fp8")}
    read_tensors(header, got, lambda n: None)
    for name, tensor in got.items():
        assert torch.equal(tensor, tensors[name].double())


def test_only_what_is_asked_for_is_read(header):
    counted = []
    read_tensors(header, {"table": torch.empty(5, 3)}, counted.append)
    assert sum(counted) == 5 * 3 * 4


def test_a_slice_of_a_larger_tensor_is_a_destination(header, tensors):
    whole = torch.zeros(8, 3)
    read_tensors(header, {"table": whole.narrow(0, 2, 5)}, lambda n: None)
    assert torch.equal(whole[2:7], tensors["table"]) and whole[:2].eq(0).all() and whole[7:].eq(0).all()


def test_reading_stops_where_read_raises(header, tensors, monkeypatch):
    monkeypatch.setattr(read, "BUFFER_BYTES", 16)
    calls = []

    def cancel(n):
        calls.append(n)
        if len(calls) == 3:
            raise Stop

    with pytest.raises(Stop):
        read_tensors(header, empty_like(tensors), cancel)
    assert len(calls) == 3


def test_i3_a_cancel_acts_while_the_disk_is_slow(header, tensors, monkeypatch):
    """Nothing has arrived yet: the wait itself looks for the cancel, and the threads end before the call does."""
    slow, started = read._Readers._read, []

    def crawl(self, piece):
        started.append(piece)
        while not self._stopped:
            time.sleep(0.01)
        slow(self, piece)

    monkeypatch.setattr(read._Readers, "_read", crawl)
    monkeypatch.setattr(read, "CHECK", 0.02)
    calls = []

    def cancel(n):
        calls.append(n)
        if len(calls) == 2:
            raise Stop

    threads = threading.active_count()
    with pytest.raises(Stop):
        read_tensors(header, empty_like(tensors), cancel)
    assert calls == [0, 0] and started
    assert threading.active_count() == threads


def test_small_neighbours_are_read_together_and_at_most_a_ring_of_buffers_exists(tmp_path, monkeypatch):
    made, threads = [], read.ThreadPoolExecutor
    monkeypatch.setattr(read, "BUFFER_BYTES", 64)
    monkeypatch.setattr(read, "ThreadPoolExecutor", lambda n, **how: made.append(n) or threads(n, **how))
    tensors = {f"t{i:02}": torch.arange(i, i + 4, dtype=torch.bfloat16) for i in range(64)}
    save_file(tensors, tmp_path / "x.safetensors")
    counted, got = [], {name: torch.empty(4) for name in tensors}
    read_tensors(read_header(tmp_path / "x.safetensors"), got, counted.append)
    assert counted == [64] * 8, "eight tensors of eight bytes share a read"
    assert all(torch.equal(got[name], tensors[name].float()) for name in tensors)
    assert made == [read.READERS] and read.BUFFERS * (32 << 20) <= 384 << 20


def test_wrong_shape_is_refused_before_anything_is_read(header):
    calls = []
    with pytest.raises(FileError, match=r"table has shape \(5, 3\), wanted \(3, 5\)"):
        read_tensors(header, {"wide": torch.empty(37, 11), "table": torch.empty(3, 5)}, calls.append)
    assert not calls


def test_strided_destination_is_refused(header):
    with pytest.raises(ValueError, match="table is not contiguous"):
        read_tensors(header, {"table": torch.empty(3, 5).t()}, lambda n: None)


def test_bytes_of_one_tensor(header):
    assert read_bytes(header, "bytes") == bytes(range(200))


@pytest.mark.parametrize("read_one", [lambda h: read_bytes(h, "bytes"), lambda h: read_tensors(h, {"table": torch.empty(5, 3)}, lambda n: None)])
def test_file_that_changed_vanished_or_shrank_after_its_header_was_read(header, read_one):
    content = header.path.read_bytes()
    os.truncate(header.path, header.size - 10)
    with pytest.raises(FileError, match="changed on disk"):
        read_one(header)
    header.path.write_bytes(content)
    os.utime(header.path, ns=(0, header.mtime_ns + 1_000_000))
    with pytest.raises(FileError, match="changed on disk"):
        read_one(header)
    header.path.unlink()
    with pytest.raises(FileError, match="cannot be read any more"):
        read_one(header)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_m2_host_memory_stays_within_one_buffer_of_what_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "BUFFER_BYTES", 4 << 20)
    size = 48 << 20
    save_file({f"t{i}": torch.zeros(size // 4, dtype=torch.uint8) for i in range(4)}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    destinations = {name: torch.zeros(info.shape, dtype=torch.uint8) for name, info in header.tensors.items()}
    for tensor in destinations.values():
        tensor.fill_(1)  # resident before measuring
    peak = [resident()]
    read_tensors(header, destinations, lambda n: peak.append(resident()))
    assert max(peak) - peak[0] < 3 * (4 << 20)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="pages are given back where the system lets us")
@pytest.mark.parametrize("reread", [False, True])
def test_m9_pages_of_the_file_are_given_back_unless_it_is_read_again_soon(header, tensors, monkeypatch, reread):
    released = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, begin, size, advice: released.append((begin, size, advice)))
    read_tensors(header, empty_like(tensors), lambda n: None, reread)
    assert sum(size for _, size, _ in released) == (0 if reread else tensor_bytes(header))
    assert all(advice == os.POSIX_FADV_DONTNEED for _, _, advice in released)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_m9_one_copy_per_weight_and_a_second_load_adds_nothing(tmp_path, monkeypatch):
    """bf16 widened to float32, as on a CPU: beside the weights there is the ring, and the bf16 copy never exists whole."""
    monkeypatch.setattr(read, "BUFFER_BYTES", 1 << 20)
    size = 32 << 20
    save_file({f"t{i}": torch.zeros(size // 8, dtype=torch.bfloat16) for i in range(4)}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    destinations = {name: torch.ones(info.shape) for name, info in header.tensors.items()}
    read_tensors(header, destinations, lambda n: None)
    peak = [resident()]
    for _ in range(3):
        read_tensors(header, destinations, lambda n: peak.append(resident()))
    assert max(peak) - peak[0] < read.BUFFERS * (1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_ring_gives_the_file_back_on_a_gpu(header, tensors, monkeypatch):
    monkeypatch.setattr(read, "BUFFER_BYTES", 16)
    got = {name: torch.empty(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype, device="cuda") for name, t in tensors.items()}
    read_tensors(header, got, lambda n: None)
    for name, want in tensors.items():
        assert torch.equal(got[name].cpu(), want.float() if want.is_floating_point() else want), name


# Numbers that are none


EVERY = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 8, torch.float8_e5m2: 8}


@pytest.mark.parametrize("dtype", [*EVERY, torch.float32, torch.float64], ids=str)
def test_every_value_of_a_dtype_is_told_from_nan_and_infinity(dtype):
    if dtype in EVERY:
        values = torch.arange(1 << EVERY[dtype], dtype=torch.int32).to({8: torch.uint8, 16: torch.uint16}[EVERY[dtype]]).view(dtype)
    else:
        tiny, largest = torch.finfo(dtype).tiny, torch.finfo(torch.float32).max
        edge = 2.0**128 - 2.0**103  # rounds to infinity in float32, and what is below it does not
        ends = torch.tensor([largest, edge, math.nextafter(edge, 0), torch.finfo(dtype).max], dtype=dtype)
        values = torch.tensor([0.0, -0.0, tiny, -tiny, *ends, *-ends, float("inf"), -float("inf"), float("nan"), -float("nan")], dtype=dtype)
    wanted = values.float().isfinite()  # what weights are used in, at most
    raw = memoryview(values.view(torch.uint8).numpy())
    size = dtype.itemsize
    assert [numbers(raw[i * size : (i + 1) * size], dtype) for i in range(len(values))] == wanted.tolist()  # bit patterns, every one
    assert numbers(memoryview(values[wanted].clone().view(torch.uint8).numpy()), dtype)
    none = values[~wanted]
    for bad in none[:: max(1, len(none) // 16)].split(1):
        assert first_without({"good": values[wanted], "bad": torch.cat([values[wanted], bad])}) == "bad"
    assert first_without({"good": values[wanted], "none": values[:0], "integers": torch.full((3,), -1)}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*EVERY, torch.float32], ids=str)
def test_what_is_read_onto_a_card_is_looked_at_there(dtype, tmp_path):
    good = {f"t{i}": torch.ones(100, 1000).to(dtype) for i in range(50)}
    for number, bad in enumerate((float("nan"), -float("nan"), *(() if dtype is torch.float8_e4m3fn else (float("inf"), -float("inf"))))):
        tensors = {name: tensor.clone() for name, tensor in good.items()}
        tensors["t37"].view(-1)[number * 33333] = bad
        save_file(tensors, tmp_path / f"{number}.safetensors")
        header = read_header(tmp_path / f"{number}.safetensors")
        with pytest.raises(FileError, match="t37 holds NaN or infinity"):
            read_tensors(header, {name: tensor.cuda() for name, tensor in good.items()}, lambda n: None, finite=True)
    save_file(good, tmp_path / "good.safetensors")
    read_tensors(read_header(tmp_path / "good.safetensors"), {name: tensor.cuda() for name, tensor in good.items()}, lambda n: None, finite=True)


@pytest.mark.parametrize("buffer", [24, 1 << 20])
@pytest.mark.parametrize("looked", [5, 1 << 20])
@pytest.mark.parametrize("wide", [False, True], ids=["as stored", "widened"])
def test_a_number_that_is_none_is_found_wherever_pieces_end_and_only_where_it_is_asked_for(tensors, tmp_path, monkeypatch, buffer, looked, wide):
    monkeypatch.setattr(read, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(read, "LOOKED_BYTES", looked)
    for name, place in (("wide", 0), ("wide", 406), ("table", 7), ("scalar", 0), ("fp8", 15)):
        bad = {**tensors, name: tensors[name].float().clone()}
        bad[name].view(-1)[place] = float("nan")
        bad[name] = bad[name].to(tensors[name].dtype)
        path = tmp_path / f"{name}{place}.safetensors"
        save_file(bad, path)
        room = {key: torch.empty(t.shape, dtype=torch.float64 if wide and t.is_floating_point() else t.dtype) for key, t in tensors.items()}
        read_tensors(read_header(path), room, lambda n: None)
        with pytest.raises(FileError, match=f"^{path.name}: {name} holds NaN or infinity, wanted finite numbers; download the file again.$"):
            read_tensors(read_header(path), room, lambda n: None, finite=True)
        del room[name]
        read_tensors(read_header(path), room, lambda n: None, finite=True)
