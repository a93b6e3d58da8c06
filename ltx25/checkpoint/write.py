"""Writing a safetensors file: equal tensors and metadata give equal bytes, which the format's own library does not promise."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from .header import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `path`, widest dtype first and by name inside a dtype, as published files are.

    The name appears when the file is whole: another process may be reading an older one. Raises OSError.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, _NAMES[tensors[name].dtype], name))
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                file.write(memoryview(tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
