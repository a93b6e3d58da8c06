"""Safetensors files for tests: published headers as sparse files, small real ones, and deliberately broken ones."""

from __future__ import annotations

import gzip
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ltx25.checkpoint import Header

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_SUFFIX = ".safetensors.header.json.gz"


def fixture_names() -> list[str]:
    """Every published file whose header is kept, by its name without ending."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in FIXTURES.glob("*" + _SUFFIX))


def fixture(name: str) -> dict[str, Any]:
    """{"__metadata__": {...}, "tensors": {name: {"dtype", "shape"}}} of a published file."""
    with gzip.open(FIXTURES / (name + _SUFFIX)) as file:
        return json.load(file)


def tensor_bytes(header: Header) -> int:
    """What all tensors of a file take in it."""
    return sum(map(header.bytes_of, header.tensors))


def write_published(name: str, folder: Path) -> Path:
    """The published file `name`, sparse: real header and length, every weight zero, next to nothing on disk."""
    published = fixture(name)
    return write_sparse(folder / f"{name}.safetensors", published["tensors"], published["__metadata__"])


def write_sparse(path: Path, tensors: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str] | None) -> Path:
    """A well-formed file of all-zero tensors, {"dtype": "BF16", "shape": [...]} each, in the order given."""
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        size = ITEM_BYTES[tensor["dtype"]] * math.prod(tensor["shape"])
        table[name] = {**tensor, "data_offsets": [end, end + size]}
        end += size
    return write_raw(path, json.dumps(table), end)


def write_raw(path: Path, text: str, data: int | bytes) -> Path:
    """A file of any header text, good or bad, and `data`: bytes, or how many zero bytes."""
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if isinstance(data, bytes):
            file.write(data)
        else:
            file.truncate(8 + len(raw) + data)
    return path
