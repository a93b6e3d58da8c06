import os
import threading
import time

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read, read_bytes, read_header, read_tensors
from comfyui_ltx25.ltx25.errors import FileError
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
    assert sum(counted) == header.tensor_bytes
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
    assert sum(size for _, size, _ in released) == (0 if reread else header.tensor_bytes)
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
