import os

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_ring_gives_the_file_back_on_a_gpu(header, tensors, monkeypatch):
    monkeypatch.setattr(read, "BUFFER_BYTES", 16)
    got = {name: torch.empty(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype, device="cuda") for name, t in tensors.items()}
    read_tensors(header, got, lambda n: None)
    for name, want in tensors.items():
        assert torch.equal(got[name].cpu(), want.float() if want.is_floating_point() else want), name
