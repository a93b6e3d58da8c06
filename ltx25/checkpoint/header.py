"""The header of a safetensors file: everything about it except the weights, read without touching them.

Layout: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes. A file whose first bytes are a
Git-LFS pointer, that is too short for its own header, or shorter than its tensors is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import FileError
from ..formats import Format

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: bytes [begin, end) count from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """How a quantised tensor is kept: its format, and the tensors of the file that make it, by role."""

    format: Format
    parts: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Header:
    """What a file holds. `tensors` is in file order; `mtime_ns` and `size` (bytes) tell whether the file changed since.

    `stored` names the quantised ones (see open.py): in `tensors` those have the shape and a dtype of what they stand for,
    and begin and end of their largest part.
    """

    path: Path
    size: int
    mtime_ns: int
    digest: str  # sha256 of the header bytes, hex
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    stored: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    def bytes_of(self, name: str) -> int:
        """What has to be read for one tensor, with its scales where it is quantised."""
        parts = self.stored[name].parts.values() if name in self.stored else (self.tensors[name],)
        return sum(info.end - info.begin for info in parts)

    @cached_property
    def raw(self) -> Header:
        """The same file with quantised tensors as it stores them, each part under its own name."""
        parts = {info.name: info for stored in self.stored.values() for info in stored.parts.values()}
        return replace(self, tensors={**self.tensors, **parts}, stored={})

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats its quantised tensors are stored in, sorted; none where nothing is quantised."""
        return tuple(sorted({stored.format.name for stored in self.stored.values()}))

    def metadata_json(self, key: str) -> Any:
        """Metadata value `key` parsed as JSON; raises FileError when it is missing or not JSON."""
        text = self.metadata.get(key)
        if text is None:
            raise FileError(f"{self.name} has no metadata key '{key}'; use the file as published by Lightricks.")
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            raise FileError(f"{self.name}: metadata key '{key}' is not JSON; download the file again.") from None


def read_header(path: str | Path) -> Header:
    """Read and check the header of `path`, and nothing else of the file.

    Raises FileError for a file that is missing, unreadable, empty, an LFS pointer, of another format, cut off inside its
    header or its tensors, or whose header is broken, names a tensor twice or lets two tensors share bytes.
    """
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path} is a folder; choose the .safetensors file in it.")
    if not path.exists():
        raise FileError(f"{path} does not exist; put the file there or choose another one.")
    try:
        stat = path.stat()
        with path.open("rb") as file:
            raw = _header_bytes(file, path.name, stat.st_size)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror}); check its permissions and the disk.") from None
    metadata, tensors = _parse(raw, path.name)
    end = max((info.end for info in tensors), default=8 + len(raw))
    if end > stat.st_size:
        raise FileError(f"{path.name} is cut off ({stat.st_size} bytes of {end}); download it again.")
    if end < stat.st_size:
        raise FileError(f"{path.name} has {stat.st_size - end} bytes after its last tensor that belong to none; download it again.")
    return Header(
        path=path,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=hashlib.sha256(raw).hexdigest(),
        metadata=metadata,
        tensors={info.name: info for info in tensors},
    )


def _header_bytes(file: BinaryIO, name: str, size: int) -> bytes:
    """The JSON text, once what stands in front of it looks like a safetensors file."""
    start = file.read(64)
    if not start:
        raise FileError(f"{name} is empty (0 bytes); download it again.")
    if start.startswith(b"version https://git-lfs"):
        raise FileError(f"{name} is a Git-LFS pointer of {size} bytes, not the weights; run 'git lfs pull' or download the file itself.")
    if start.startswith(b"GGUF"):
        raise FileError(f"{name} is a GGUF file, and a .safetensors file is wanted here; use one from huggingface.co/Lightricks/LTX-2.5.")
    if len(start) < 9:
        raise FileError(f"{name} is only {size} bytes long, too short for a safetensors file; download it again.")
    length = int.from_bytes(start[:8], "little")
    if length > _LARGEST_HEADER or start[8:9] != b"{":
        raise FileError(f"{name} is neither a safetensors nor a GGUF file, and only those are read; choose another one or download it again.")
    if size < 8 + length:
        raise FileError(f"{name} ends inside its header ({size} bytes, the header alone needs {8 + length}); download it again.")
    file.seek(8)
    return file.read(length)


def _parse(raw: bytes, name: str) -> tuple[dict[str, str], list[TensorInfo]]:
    """Metadata and tensors, in file order, of the header's JSON text."""
    try:
        table = json.loads(raw, object_pairs_hook=_unique)
        metadata = {str(key): str(value) for key, value in (table.pop("__metadata__", None) or {}).items()}
        unreadable = {str(entry["dtype"]) for entry in table.values()} - DTYPES.keys()
        tensors = [] if unreadable else [_info(key, entry, 8 + len(raw)) for key, entry in table.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Broken) else "its JSON is not that of a safetensors file"
        raise FileError(f"{name} has a broken header: {reason}; download it again.") from None
    if unreadable:
        raise FileError(f"{name} stores tensors as {', '.join(sorted(unreadable))}, which cannot be read; use the bf16 or int8-convrot file.")
    tensors.sort(key=lambda info: (info.begin, info.end))
    for before, after in pairwise(tensors):
        if after.begin < before.end:
            raise FileError(f"{name} has a broken header: {before.name} and {after.name} share bytes; download it again.")
    return metadata, tensors


class _Broken(ValueError):
    """What exactly is wrong inside a header."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ: Python would keep the last of two silently."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Broken(f"'{twice}' stands in it twice")
    return table


def _info(name: str, entry: dict[str, Any], data: int) -> TensorInfo:
    (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), DTYPES[entry["dtype"]]
    if any(type(n) is not int or n < 0 for n in (begin, end, *shape)) or end - begin != math.prod(shape) * dtype.itemsize:
        raise _Broken(f"{name} of shape {list(shape)} does not fit its bytes {begin} to {end}")
    return TensorInfo(name, dtype, shape, data + begin, data + end)
