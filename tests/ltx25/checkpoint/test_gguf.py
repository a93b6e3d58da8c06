import math
import struct
import time

import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import Kind, identify, open_file, read_tensors, require_kind
from comfyui_ltx25.ltx25.errors import FileError


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write(path, keys=(), tensors=(), version=3, data=None):
    """keys: (name, type, packed value); tensors: (name, sizes innermost first, type, offset)."""
    raw = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for name, kind, value in keys:
        raw += string(name) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        raw += string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    raw += bytes(-len(raw) % 32)
    path.write_bytes(raw + (bytes(_ends(tensors)) if data is None else data))
    return path


def _ends(tensors):
    """Where the last tensor of test files ends, padded: F32 numbers, or blocks of Q8_0."""
    sizes = (offset + math.prod(sizes) * 4 if kind == 0 else offset + math.prod(sizes) // 32 * 34 for _, sizes, kind, offset in tensors)
    return -(-max(sizes, default=0) // 32) * 32


def test_tensors_keys_and_shapes_are_the_packages_own(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "ltxv")
    writer.add_string("config", '{"transformer": {}}')
    writer.add_array("comfy.gguf.orig_shape.flat", [2, 3, 4])
    writer.add_custom_alignment(64)
    plain, quantised = np.arange(24, dtype=np.float32).reshape(6, 4), np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    packed = gguf.quantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", plain)
    writer.add_tensor("flat", plain.reshape(-1))
    writer.add_tensor("some.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = open_file(tmp_path / "x.gguf")
    assert header.metadata["config"] == '{"transformer": {}}' and header.metadata["general.architecture"] == "ltxv"
    assert {name: info.shape for name, info in header.tensors.items()} == {"plain": (6, 4), "flat": (2, 3, 4), "some.weight": (3, 64)}
    assert header.formats == ("GGUF Q8_0",) and header.bytes_of("some.weight") == packed.nbytes
    got = torch.empty(6, 4)
    read_tensors(header, {"plain": got}, lambda n: None)
    assert torch.equal(got, torch.from_numpy(plain))
    raw = torch.empty(packed.shape, dtype=torch.uint8)
    read_tensors(header.raw, {"some.weight": raw}, lambda n: None)
    dense = header.stored["some.weight"].format.decode({"weight": raw}, torch.float32)
    assert torch.equal(dense, torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))


def test_l3_a_language_model_in_llama_cpps_layout_is_refused_at_once(tmp_path):
    path = write(tmp_path / "gemma.gguf", [("general.architecture", 8, string("gemma4"))], [("token_embd.weight", (32, 4), 0, 0)])
    started = time.monotonic()
    with pytest.raises(FileError) as caught:
        open_file(path)
    assert time.monotonic() - started < 1
    message = str(caught.value)
    assert "gemma.gguf" in message and "'gemma4'" in message and "gemma4-12b-with-proj-ltx-2.5" in message


def test_l3_another_models_gguf_is_refused_in_its_slot(tmp_path):
    path = write(tmp_path / "flux.gguf", [("general.architecture", 8, string("flux"))], [("double_blocks.0.img_attn.qkv.weight", (32, 4), 0, 0)])
    header = open_file(path)
    assert identify(header) is Kind.UNKNOWN
    with pytest.raises(FileError, match="transformer: flux.gguf is something this pack does not know"):
        require_kind(header, "transformer", (Kind.TRANSFORMER,))


GOOD = [("a.weight", (32, 4), 8, 0)]
SHAPE = "comfy.gguf.orig_shape.a.weight"


def array(kind, code, *values):
    return struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)


BROKEN = {
    "shape of floats": (dict(keys=[(SHAPE, 9, array(6, "f", 4.0, 32.0))], tensors=GOOD), "orig_shape.a.weight is [4.0, 32.0]"),
    "shape of strings": (dict(keys=[(SHAPE, 9, struct.pack("<IQ", 8, 2) + string("a") + string("b"))], tensors=GOOD), "['a', 'b']"),
    "shape of flags": (dict(keys=[(SHAPE, 9, array(7, "?", True, True))], tensors=GOOD), "[True, True]"),
    "negative shape": (dict(keys=[(SHAPE, 9, array(5, "i", -4, -32))], tensors=GOOD), "[-4, -32]"),
    "shape of other elements": (dict(keys=[(SHAPE, 9, array(5, "i", 4, 33))], tensors=GOOD), "with the 128 elements"),
    "shape that is no list": (dict(keys=[(SHAPE, 4, struct.pack("<I", 128))], tensors=GOOD), "is 128, wanted a list"),
    "empty shape": (dict(keys=[(SHAPE, 9, array(5, "i"))], tensors=GOOD), "is []"),
    "version": (dict(tensors=GOOD, version=1), "version 1"),
    "type": (dict(tensors=[("a.weight", (256, 4), 16, 0)]), "GGUF type 16"),
    "columns": (dict(tensors=[("a.weight", (40, 4), 8, 0)]), "blocks of 32"),
    "cut off": (dict(tensors=GOOD, data=bytes(100)), "cut off"),
    "twice": (dict(tensors=GOOD * 2), "twice"),
    "dimensions": (dict(tensors=[("a.weight", (), 0, 0)]), "0 dimensions"),
    "value": (dict(keys=[("x", 99, b"")], tensors=GOOD), "type 99"),
    "length": (dict(keys=[("x", 8, struct.pack("<Q", 1 << 40))], tensors=GOOD), "beyond the file"),
    "alignment": (dict(keys=[("general.alignment", 4, struct.pack("<I", 0))], tensors=GOOD), "alignment 0"),
    "alignment that is a flag": (dict(keys=[("general.alignment", 7, b"\1")], tensors=GOOD), "alignment True"),
    "key twice": (dict(keys=[("config", 8, string("{}"))] * 2, tensors=GOOD), "config stands in it twice"),
    "arrays without end": (dict(keys=[("x", 9, struct.pack("<IQ", 9, 1) * 5000 + array(4, "I", 1))], tensors=GOOD), "more than 8 deep"),
    "shared bytes": (dict(tensors=[*GOOD, ("b.weight", (32, 4), 8, 128)]), "a.weight and b.weight share bytes"),
    "place": (dict(tensors=[*GOOD, ("b.weight", (32, 4), 8, 152)]), "b.weight is at byte 152, no multiple of 32"),
    "bytes behind": (dict(tensors=GOOD, data=bytes(168)), "32 bytes after its last tensor"),
    "nothing": (dict(), "unknown"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_in_one_sentence(what, tmp_path):
    parts, word = BROKEN[what]
    with pytest.raises(FileError) as caught:
        open_file(write(tmp_path / "x.gguf", **parts))
    assert word in str(caught.value) and str(caught.value).startswith("x.gguf")


@pytest.mark.parametrize("size", [5, 20, 60])
def test_a_header_that_ends_early_is_refused(size, tmp_path):
    path = write(tmp_path / "x.gguf", [("general.architecture", 8, string("ltxv"))], GOOD)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FileError, match="broken GGUF file"):
        open_file(path)
