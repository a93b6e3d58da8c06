"""The header of a safetensors file: everything about it except the weights, read without touching them.

Layout: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes. A file whose first bytes are a
Git-LFS pointer, that is too short for its own header, or shorter than its tensors is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
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
class Header:
    """What a file holds. `tensors` is in file order; `mtime_ns` and `size` (bytes) tell whether the file changed since."""

    path: Path
    size: int
    mtime_ns: int
    digest: str  # sha256 of the header bytes, hex
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def tensor_bytes(self) -> int:
        return sum(info.end - info.begin for info in self.tensors.values())

    def metadata_json(self, key: str) -> Any:
        """Metadata value `key` parsed as JSON; raises FileError when it is missing or not JSON."""
        text = self.metadata.get(key)
        if text is None:
            raise FileError(f"{self.name} has no metadata key '{key}'; use the file as published by Lightricks.")
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise FileError(f"{self.name}: metadata key '{key}' is not JSON; download the file again.") from None


def read_header(path: str | Path) -> Header:
    """Read and check the header of `path`. Raises FileError for a missing, empty, truncated, foreign or LFS-pointer file."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"{path} does not exist; put the file there or choose another one.")
    stat = path.stat()
    if stat.st_size == 0:
        raise FileError(f"{path.name} is empty (0 bytes); download it again.")
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise FileError(
                f"{path.name} is a Git-LFS pointer of {stat.st_size} bytes, not the weights; run 'git lfs pull' or download the file itself."
            )
        if len(start) < 8:
            raise FileError(f"{path.name} is only {stat.st_size} bytes long, too short for a safetensors file; download it again.")
        length = int.from_bytes(start[:8], "little")
        if length > _LARGEST_HEADER or start[8:9] != b"{":
            raise FileError(f"{path.name} is not a safetensors file; only .safetensors files are read.")
        if stat.st_size < 8 + length:
            raise FileError(
                f"{path.name} ends inside its header ({stat.st_size} bytes, the header alone needs {8 + length}); download it again."
            )
        file.seek(8)
        raw = file.read(length)
    try:
        table = json.loads(raw)
        metadata = table.pop("__metadata__", None) or {}
        tensors = sorted((_info(name, entry, 8 + length) for name, entry in table.items()), key=lambda info: (info.begin, info.end))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileError(f"{path.name} has a broken safetensors header; download it again.") from None
    end = max((info.end for info in tensors), default=8 + length)
    if end > stat.st_size:
        raise FileError(f"{path.name} is cut off ({stat.st_size} bytes of {end}); download it again.")
    return Header(
        path=path,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=hashlib.sha256(raw).hexdigest(),
        metadata={str(key): str(value) for key, value in metadata.items()},
        tensors={info.name: info for info in tensors},
    )


def _info(name: str, entry: dict[str, Any], data: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(name)
    return TensorInfo(name, dtype, shape, data + begin, data + end)
