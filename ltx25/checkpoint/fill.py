"""Strict and complete loading of modules built on the meta device.

A module's parameter and buffer names are the file's names after a prefix. A module that stores several tensors of the
file as one (merged projections) says so in a method

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]

that maps its own parameter name to the file names (relative to the module) stacked along dimension 0, in order. Where
they are not equally tall it also says how many rows each has, by the same parameter names:

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]

Every parameter must be filled; every tensor under the prefix must be used or matched by a pattern of known-unused names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import FileError
from .header import Header
from .read import read_tensors


@dataclass(frozen=True)
class Slice:
    """Rows [start, start + rows) of parameter `name` come from one tensor of the file; `rows` None: all of it."""

    name: str
    start: int
    rows: int | None


def expected(module: nn.Module, header: Header | None = None, prefix: str = "") -> dict[str, Slice]:
    """File name (without prefix) -> where it goes, for every persistent parameter and buffer of `module`.

    Merged parameters are split as the module says, else as the header does, else evenly.
    """
    merged: dict[str, tuple[str, ...]] = {}
    declared: dict[str, tuple[int, ...]] = {}
    for path, child in module.named_modules():
        lead = f"{path}." if path else ""
        for own, names in getattr(child, "checkpoint_sources", dict)().items():
            merged[lead + own] = tuple(lead + name for name in names)
        for own, counts in getattr(child, "checkpoint_rows", dict)().items():
            declared[lead + own] = counts
    table: dict[str, Slice] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in merged:
            table[name] = Slice(name, 0, None)
            continue
        rows = declared.get(name) or [_rows(header, prefix + source) for source in merged[name]]
        if None in rows or sum(rows) != tensor.shape[0]:  # `check` then names what is missing or misshapen
            each = tensor.shape[0] // len(rows)
            rows = [each] * (len(rows) - 1) + [tensor.shape[0] - each * (len(rows) - 1)]
        start = 0
        for source, count in zip(merged[name], rows, strict=True):
            table[source] = Slice(name, start, count)
            start += count
    return table


def _rows(header: Header | None, name: str) -> int | None:
    info = header.tensors.get(name) if header is not None else None
    return info.shape[0] if info is not None and info.shape else None


def check(module: nn.Module, header: Header, prefix: str, unused: Sequence[str] = ()) -> dict[str, Slice]:
    """Compare names and shapes of the file below `prefix` with `module` (any device); return full file name -> Slice.

    `unused` holds fnmatch patterns, relative to the prefix, of tensors the engine knows and does not need.
    Raises FileError naming the first missing, unknown or misshapen tensors.
    """
    table = expected(module, header, prefix)
    parameters = module.state_dict(keep_vars=True)
    present = {name[len(prefix) :]: info for name, info in header.tensors.items() if name.startswith(prefix)}
    missing = sorted(name for name in table if name not in present)
    if missing:
        raise FileError(f"{header.name} lacks {_few(prefix, missing)}; it is another kind of file or an incomplete download.")
    unknown = sorted(name for name in present if name not in table and not any(fnmatchcase(name, p) for p in unused))
    if unknown:
        raise FileError(f"{header.name} has tensors no part of the model uses: {_few(prefix, unknown)}; update the pack or use the published file.")
    for name, place in table.items():
        whole = tuple(parameters[place.name].shape)
        wanted = whole if place.rows is None else (place.rows, *whole[1:])
        if present[name].shape != wanted:
            raise FileError(f"{header.name}: {prefix}{name} has shape {present[name].shape}, and the model needs {wanted}.")
    return {prefix + name: place for name, place in table.items()}


def _few(prefix: str, names: list[str]) -> str:
    shown = ", ".join(prefix + name for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def fill(
    module: nn.Module,
    header: Header,
    prefix: str,
    device: torch.device,
    dtype: torch.dtype | None,
    read: Callable[[int], None],
    unused: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> None:
    """Materialise `module` on `device` from the file. Floating tensors become `dtype`; None keeps the stored one.

    Parameters matched by a `keep` pattern (fnmatch) stay as stored: where they are rounded is the model's choice.
    `read(n)` is called for every n bytes read and may raise to cancel; the module then stays on meta.
    """
    places = check(module, header, prefix, unused)
    stored = {place.name: header.tensors[name].dtype for name, place in places.items()}
    tensors = {
        name: torch.empty(tensor.shape, dtype=stored[name] if any(fnmatchcase(name, p) for p in keep) else _converted(stored[name], dtype), device=device)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    destinations = {
        name: tensors[place.name] if place.rows is None else tensors[place.name].narrow(0, place.start, place.rows)
        for name, place in places.items()
    }
    read_tensors(header, destinations, read)
    for name, tensor in tensors.items():
        _assign(module, name, tensor)
    empty = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if empty:  # a buffer that is neither in the file nor computed: a mistake in the module, not in the file
        raise RuntimeError(f"{type(module).__name__}: {', '.join(empty)} are still on meta after loading {header.name}")


def _converted(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return stored if dtype is None or not stored.is_floating_point else dtype


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
