"""Strict and complete loading of modules built on the meta device.

A module's parameter and buffer names are the file's names after a prefix. A module that has other names than the file, or
stores several tensors of the file as one (merged projections), says so in a method

    def checkpoint_sources(self) -> dict[str, tuple[str, ...]]

that maps its own parameter name to the file names (relative to the module) stacked along dimension 0, in order. Where
they are not equally tall it also says how many rows each has, by the same parameter names:

    def checkpoint_rows(self) -> dict[str, tuple[int, ...]]

Every parameter must be filled; every tensor under the prefix must be used or matched by a pattern of known-unused names.

Quantised tensors (Header.stored) are decoded, unless the layer that owns the weight can hold it as it is stored: a method
`store(weight)`, which takes a formats.Weight in place of the parameter `weight` (see linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

import torch
from torch import nn

from ..errors import FileError
from ..formats import Dense, Held, Stacked, Weight
from .header import Header, Stored
from .read import read_tensors

# What one file of a whole model holds beside the part that is asked for: known, and not this part's.
WHOLE_MODEL = ("model.diffusion_model.", "vae.", "audio_vae.", "vocoder.", "text_embedding_projection.", "text_encoders.", "duration_head.", "model_ema.")
_DECODED_AT_ONCE = 1 << 30  # bytes of quantised tensors held beside what they are decoded into


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
    """Compare names, shapes and kinds of number of the file below `prefix` with `module` (any device); return full file name -> Slice.

    `unused` holds fnmatch patterns, relative to the prefix, of tensors the engine knows and does not need.
    Raises FileError naming the first missing, unknown or misshapen tensors, and integers where the model has floats: cast, they
    would render noise.
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
        if parameters[place.name].is_floating_point() and not present[name].dtype.is_floating_point:
            stored = str(present[name].dtype).removeprefix("torch.")
            raise FileError(f"{header.name}: {prefix}{name} is stored as {stored}, and the model needs a floating-point tensor; use the published file.")
    return {prefix + name: place for name, place in table.items()}


def check_beside(header: Header, prefix: str) -> None:
    """Raise FileError for tensors of the file that are neither below `prefix` nor, by WHOLE_MODEL, another part's: nobody would read them."""
    stray = sorted(name for name in header.tensors if not name.startswith((prefix, *WHOLE_MODEL)))
    if stray:
        raise FileError(f"{header.name} has tensors no part of the model uses: {_few('', stray)}; update the pack or use the published file.")


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
    held: Held = Held.EXACT,
    reread: bool = False,
) -> None:
    """Materialise `module` on `device` from the file. Floating tensors become `dtype`; None keeps the stored one.

    Parameters matched by a `keep` pattern (fnmatch) stay as stored: where they are rounded is the model's choice.
    held: what becomes of quantised weights of layers that can hold them as stored; all others are decoded.
    `read(n)` is called for every n bytes read and may raise to cancel; the module then stays on meta. reread: see read_tensors.
    Raises FileError as `check` and for a tensor that holds NaN or infinity.
    """
    places = check(module, header, prefix, unused)
    kept = _kept(module, header, places, held)
    stored = {place.name: header.tensors[name].dtype for name, place in places.items()}
    tensors = {
        name: torch.empty(tensor.shape, dtype=stored[name] if any(fnmatchcase(name, p) for p in keep) else _converted(stored[name], dtype), device=device)
        for name, tensor in module.state_dict(keep_vars=True).items()
        if name not in kept
    }
    destinations = {
        name: tensors[place.name] if place.rows is None else tensors[place.name].narrow(0, place.start, place.rows)
        for name, place in places.items()
        if place.name not in kept
    }
    read_tensors(header, {name: target for name, target in destinations.items() if name not in header.stored}, read, reread, finite=True)
    decode(header, {name: target for name, target in destinations.items() if name in header.stored}, read, reread)
    weights = _read_kept(header, kept, device, dtype, read, held is Held.EXACT, reread)
    for name, tensor in tensors.items():
        _assign(module, name, tensor)
    for name, weight in weights.items():
        _assign(module, name, torch.empty(0, dtype=dtype or torch.bfloat16, device=device))  # tells the dtype of activations
        module.get_submodule(name.rpartition(".")[0]).store(weight)
    empty = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if empty:  # a buffer that is neither in the file nor computed: a mistake in the module, not in the file
        raise RuntimeError(f"{type(module).__name__}: {', '.join(empty)} are still on meta after loading {header.name}")


def held_bytes(
    module: nn.Module, header: Header, places: Mapping[str, Slice], dtype: torch.dtype, held: Held, apart: Collection[str] = ()
) -> int:
    """What `module` takes on the device once filled, floating tensors as `dtype`; `places` as `check` returned them.

    apart: parameters that do not count.
    """
    kept = _kept(module, header, places, held)
    named = module.state_dict(keep_vars=True).items()
    dense = sum(tensor.numel() * dtype.itemsize for name, tensor in named if name not in kept and name not in apart)
    sources = (source for name, names in kept.items() if name not in apart for source in names)
    return dense + sum(_held_as_stored(header, name) if name in header.stored else header.tensors[name].numel * dtype.itemsize for name in sources)


def stored_parameters(module: nn.Module, header: Header, places: Mapping[str, Slice], held: Held) -> frozenset[str]:
    """Names of `module`'s parameters that `fill` leaves as stored; `places` as `check` returned them."""
    return frozenset(_kept(module, header, places, held))


def _held_as_stored(header: Header, name: str) -> int:
    """The scale of a whole weight, of nvfp4's two the second, is held per row, also where the file has one for all rows."""
    parts = header.stored[name].parts
    whole = "scale_2" if "scale_2" in parts else "scale"
    others = sum(info.end - info.begin for role, info in parts.items() if role != whole)
    return others + (4 * header.tensors[name].shape[0] if whole in parts else 0)


def decode(header: Header, destinations: Mapping[str, torch.Tensor], read: Callable[[int], None], reread: bool = False) -> None:
    """Fill each destination with what the quantised tensor of that name stands for. As `read_tensors`."""
    for names in _batches(header, destinations):
        raw = {name: _room(header.stored[name], destinations[name].device) for name in names}
        read_tensors(header.raw, {key: room for name in names for key, room in _named(header, name, raw[name]).items()}, read, reread, finite=True)
        _check_factors(header, raw)
        for name in names:
            target = destinations[name]
            target.copy_(header.stored[name].format.decode(raw.pop(name), target.dtype).view(target.shape))


def _batches(header: Header, names: Mapping[str, object]) -> Iterator[list[str]]:
    """Names in file order, in runs of about _DECODED_AT_ONCE bytes."""
    batch: list[str] = []
    held = 0
    for name in sorted(names, key=lambda name: header.tensors[name].begin):
        size = header.bytes_of(name)
        if batch and held + size > _DECODED_AT_ONCE:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += size
    if batch:
        yield batch


def _kept(module: nn.Module, header: Header, places: Mapping[str, Slice], held: Held) -> dict[str, list[str]]:
    """Parameters that stay as stored -> the file's tensors they are made of, in order: those of layers with `store`, of
    which at least one tensor is quantised and none has to be decoded on load."""
    if held is Held.DENSE:
        return {}
    sources: dict[str, list[str]] = {}
    for name, place in places.items():  # `expected` lists the parts of a merged parameter in order
        sources.setdefault(place.name, []).append(name)
    kept = {}
    for name, parts in sources.items():
        path, _, leaf = name.rpartition(".")
        formats = [header.stored[part].format for part in parts if part in header.stored]
        stays = formats and all(f.stays(held) for f in formats)
        if leaf == "weight" and stays and hasattr(module.get_submodule(path), "store"):
            kept[name] = parts
    return kept


def _read_kept(
    header: Header, kept: Mapping[str, list[str]], device: torch.device, dtype: torch.dtype | None, read: Callable[[int], None], exact: bool, reread: bool
) -> dict[str, Weight]:
    """Parameter name -> its weight, rows of equal formats in one."""
    raw: dict[str, dict[str, torch.Tensor]] = {}
    destinations: dict[str, torch.Tensor] = {}
    for name in (part for parts in kept.values() for part in parts):
        if name in header.stored:
            raw[name] = _room(header.stored[name], device)
        else:
            info = header.tensors[name]
            raw[name] = {"weight": torch.empty(info.shape, dtype=_converted(info.dtype, dtype), device=device)}
        destinations |= _named(header, name, raw[name])
    read_tensors(header.raw, destinations, read, reread, finite=True)
    _check_factors(header, raw)
    del destinations  # what is merged below shall not be held twice
    return {name: _stack(header, parts, raw, exact) for name, parts in kept.items()}


def _stack(header: Header, names: list[str], raw: dict[str, dict[str, torch.Tensor]], exact: bool) -> Weight:
    weights: list[Weight] = []
    for alike, run in groupby(names, lambda name: _alike(header.stored.get(name))):
        run = list(run)
        parts = [raw.pop(name) for name in run]
        if alike is None:
            weights += [Dense(part["weight"]) for part in parts]
        else:
            weights.append(header.stored[run[0]].format.weight(parts, exact))
    return weights[0] if len(weights) == 1 else Stacked(weights)


def _alike(stored: Stored | None) -> tuple[object, ...] | None:
    """Equal for tensors whose rows may stand in one stored matrix; None: stored as it is."""
    if stored is None:
        return None
    info = stored.parts["weight"]
    return stored.format.name, getattr(stored.format, "group", None), info.dtype, info.shape[1:]


def _check_factors(header: Header, raw: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise FileError for NaN or infinity inside of bytes, which reading does not know as numbers, and for scales that are not
    above 0: both load and render noise. raw: file name -> tensors by role.

    Reading has just waited for the device, so one look at the answer costs nothing.
    """
    stored = {name: header.stored[name] for name in raw if name in header.stored}
    answers = {}
    for name, one in stored.items():
        if factors := one.format.inside(raw[name]):
            answers[name] = torch.stack([factor.isfinite().all() for factor in factors]).all()
    scales = {info.name: raw[name][role] for name, one in stored.items() for role, info in one.parts.items() if role in one.format.scales}
    above = [torch.cat([scale.float().flatten() for scale in scales.values()]).amin() > 0] if scales else []
    if not answers and not above:
        return
    finite = torch.stack([*answers.values(), *above]).tolist()
    for name, good in zip(answers, finite, strict=False):
        if not good:
            raise FileError(f"{header.name}: {name} holds NaN or infinity, wanted finite numbers; download the file again.")
    if above and not finite[-1]:
        name = next(name for name, scale in scales.items() if not bool((scale > 0).all()))
        raise FileError(f"{header.name}: {name} holds 0 or less, wanted scales above 0; download the file again.")


def _room(stored: Stored, device: torch.device) -> dict[str, torch.Tensor]:
    return {role: torch.empty(info.shape, dtype=info.dtype, device=device) for role, info in stored.parts.items()}


def _named(header: Header, name: str, room: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `room`, by role, under the names the file has for them."""
    if name not in header.stored:
        return {name: room["weight"]}
    return {info.name: room[role] for role, info in header.stored[name].parts.items()}


def _converted(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return stored if dtype is None or not stored.is_floating_point else dtype


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
