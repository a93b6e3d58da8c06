import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header, write_file
from safetensors.torch import load_file


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "b.bytes": torch.arange(7, dtype=torch.uint8),
        "b.table": torch.randn(2, 3, generator=generator),
        "a.weight": torch.randn(4, 3, generator=generator).bfloat16().t(),  # not contiguous
        "a.scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "fp8": torch.randn(3, 2, generator=generator).to(torch.float8_e4m3fn),
    }


def test_the_library_and_we_read_back_what_was_written(tensors, tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, tensors, {"config": '{"ü": 1}'})
    loaded, header = load_file(path), read_header(path)
    assert header.metadata == {"config": '{"ü": 1}'}
    assert set(loaded) == set(header.tensors) == set(tensors)
    for name, want in tensors.items():
        assert loaded[name].dtype == want.dtype and torch.equal(loaded[name].float(), want.float()), name
    assert list(header.tensors)[:2] == ["a.scalar", "b.table"]  # widest first, then by name


def test_equal_content_gives_equal_bytes_whatever_the_order(tensors, tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_file(a, tensors, {"x": "1", "y": "2"})
    write_file(b, dict(reversed(tensors.items())), {"x": "1", "y": "2"})
    assert a.read_bytes() == b.read_bytes()


def test_a_failed_write_leaves_the_older_file(tensors, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_file(path, tensors, {})
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, {"x": torch.zeros(3)}, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
