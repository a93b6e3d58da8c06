import json
import os
import struct

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import GOLDEN, fixture, fixture_names, tensor_bytes, write_published, write_raw
from safetensors.torch import load_file, save_file


def refusal(path):
    with pytest.raises(FileError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert message.endswith(".") and "\n" not in message
    return message


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("name", fixture_names())
def test_published_headers_are_read_whole(name, tmp_path):
    published = fixture(name)
    header = read_header(write_published(name, tmp_path))
    assert header.metadata == published["__metadata__"]
    assert {n: list(t.shape) for n, t in header.tensors.items()} == {n: t["shape"] for n, t in published["tensors"].items()}
    assert list(header.tensors) == list(published["tensors"])  # file order
    assert tensor_bytes(header) == sum(t.end - t.begin for t in header.tensors.values())
    if "config" in header.metadata:
        assert isinstance(header.metadata_json("config"), dict)


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_header_agrees_with_the_safetensors_library(path):
    header, tensors = read_header(path), load_file(path)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {n: (t.dtype, t.shape) for n, t in header.tensors.items()}


def test_every_dtype_of_the_format_that_torch_has_is_read(tmp_path):
    names = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool"]
    names += ["uint16", "uint32", "uint64", "float8_e8m0fnu"]
    tensors = {name: torch.zeros(3, 2).to(getattr(torch, name)) for name in names}
    save_file(tensors, tmp_path / "all.safetensors")
    header = read_header(tmp_path / "all.safetensors")
    assert {name: t.dtype for name, t in header.tensors.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(t.numel == 6 for t in header.tensors.values())


def test_scalars_and_empty_tensors_are_legal(tmp_path):
    save_file({"scalar": torch.tensor(2.0), "none": torch.zeros(0, 4)}, tmp_path / "odd.safetensors")
    header = read_header(tmp_path / "odd.safetensors")
    assert header.tensors["scalar"].shape == () and header.tensors["none"].shape == (0, 4)


def test_digest_follows_the_header_and_mtime_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(2)}, path, metadata={"k": "1"})
    before = read_header(path)
    save_file({"x": torch.ones(2)}, path, metadata={"k": "1"})
    os.utime(path, ns=(1, before.mtime_ns + 1))
    after = read_header(path)
    assert after.digest == before.digest and after.mtime_ns != before.mtime_ns
    save_file({"x": torch.ones(2)}, path, metadata={"k": "2"})
    assert read_header(path).digest != before.digest


def test_missing_file(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere.safetensors")


def test_l10_missing_file_names_its_path_and_nothing_is_downloaded(tmp_path):
    path = tmp_path / "vae" / "ltx-2.5-video-vae-conv-bf16.safetensors"
    assert str(path) in refusal(path)


def test_folder_instead_of_a_file(tmp_path):
    (tmp_path / "x.safetensors").mkdir()
    assert "is a folder" in refusal(tmp_path / "x.safetensors")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_file_without_read_permission(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", "{}", 0)
    path.chmod(0)
    assert "cannot be read" in refusal(path)


def test_empty_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.touch()
    assert "is empty" in refusal(path)


def test_l11_lfs_pointer(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 42018190584\n")
    assert f"Git-LFS pointer of {path.stat().st_size} bytes" in refusal(path)


def test_l3_gguf_is_refused_by_its_first_bytes_with_the_format_that_works(tmp_path):
    path = tmp_path / "gemma4.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"general.architecture=gemma4".ljust(1024, b"\0"))
    message = refusal(path)
    assert "GGUF" in message and ".safetensors" in message


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04" + b"\0" * 2000,  # a zip: torch.save
        b"\x80\x02}q\x00." + b"\0" * 100,  # a bare pickle
        b"<!DOCTYPE html><html>Access to model Lightricks/LTX-2.5 is restricted</html>",
        bytes(range(256)) * 4,
        struct.pack("<Q", 16) + b"[1, 2, 3]       ",
    ],
    ids=["zip", "pickle", "web page", "noise", "JSON array"],
)
def test_other_formats(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert "neither a safetensors nor a GGUF file" in refusal(path)


@pytest.mark.parametrize("length", [1, 7, 8])
def test_shorter_than_any_safetensors_file(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 100)[:length])
    assert f"only {length} bytes" in refusal(path)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    return path


def test_cut_off_inside_the_header(good):
    os.truncate(good, 40)
    assert "ends inside its header (40 bytes" in refusal(good)


@pytest.mark.parametrize("missing", [1, 8, 31])
def test_cut_off_inside_the_tensors(good, missing):
    size = good.stat().st_size
    os.truncate(good, size - missing)
    assert f"is cut off ({size - missing} bytes of {size})" in refusal(good)


def test_bytes_behind_the_last_tensor(good):
    with good.open("ab") as file:
        file.write(b"x" * 5)
    assert "5 bytes after its last tensor" in refusal(good)


@pytest.mark.parametrize(
    ("text", "data", "words"),
    [
        ('{"a": {"dtype": "F32", ', 0, "broken header"),
        ("{'a': 1}", 0, "broken header"),
        ('{"a": 1}', 0, "broken header"),
        ('{"a": {"dtype": "F32", "shape": [1]}}', 0, "broken header"),
        ('{"__metadata__": 3}', 0, "broken header"),
        ("{" + '"a":{' * 100_000, 0, "broken header"),
        (json.dumps({"a": entry(0, 4, [2])}), 4, "a of shape [2] does not fit its bytes 0 to 4"),
        (json.dumps({"a": entry(0, 8, [-2])}), 8, "does not fit"),
        (json.dumps({"a": entry(-8, 0, [2])}), 0, "does not fit"),
        (json.dumps({"a": entry(8, 0, [2])}), 8, "does not fit"),
        (json.dumps({"a": entry(0, 8, [2.0])}), 8, "does not fit"),
        (json.dumps({"a": entry(0, 4, [True])}), 4, "does not fit"),
        (json.dumps({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}), 12, "a and b share bytes"),
        (json.dumps({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}), 8, "a and b share bytes"),
        (f'{{"a": {json.dumps(entry(0, 8, [2]))}, "a": {json.dumps(entry(8, 16, [2]))}}}', 16, "'a' stands in it twice"),
        (json.dumps({"a": entry(0, 4, [2], "F4")}), 4, "stores tensors as F4"),
    ],
)
def test_broken_headers(tmp_path, text, data, words):
    assert words in refusal(write_raw(tmp_path / "x.safetensors", text, data))


def test_non_utf8_header(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 8) + b'{"\xff\xfe": }'[:8])
    assert "broken header" in refusal(path)


def test_metadata_json(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"config": '{"x": 1}', "license": "text, not JSON"})
    header = read_header(path)
    assert header.metadata_json("config") == {"x": 1}
    with pytest.raises(FileError, match="'license' is not JSON"):
        header.metadata_json("license")
    with pytest.raises(FileError, match="no metadata key 'gemma_config'"):
        header.metadata_json("gemma_config")
