"""A LoRA file and the base it is for: which of its pairs change which tensor, found from headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint import Header, Kind, TensorInfo, open_file, read_bytes, require_kind
from ..errors import FileError, InputError
from .names import FOREIGN, owner, spellings, split

LARGEST = 1e4  # |strength * alpha / rank|: nodes allow strengths to 100, and trainers an alpha of some times the rank
_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)  # what an alpha may be


@dataclass(frozen=True)
class Pair:
    """W + scale * B A: a (rank, in), b (out, rank). scale: alpha / rank where the file has an alpha, else 1."""

    a: TensorInfo
    b: TensorInfo
    scale: float

    @property
    def bytes(self) -> int:
        return self.a.end - self.a.begin + self.b.end - self.b.begin


@dataclass(frozen=True)
class Lora:
    """pairs: base tensor (full name in its file) -> what changes it. unmatched: layers of the LoRA that the base lacks."""

    header: Header
    strength: float
    pairs: dict[str, Pair]
    unmatched: tuple[str, ...]

    @staticmethod
    def open(path: str | Path, strength: float, base: Header, prefix: str, other: tuple[str, ...] = ()) -> Lora:
        """Match `path` with the linear layers of `base` below `prefix`; `other` are prefixes below it of another part's.

        Alpha is taken from `.alpha` tensors alone, as ComfyUI does: `lora_alpha` in the metadata changes nothing, per the
        official loader. Raises FileError for a file that is no LoRA, of which nothing matches, or whose shapes do not fit,
        InputError for a strength that is no number or out of proportion.
        """
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not math.isfinite(strength):
            raise InputError(f"LoRA strength is {strength!r}, wanted a finite number like 1.0.")
        header = open_lora(path)
        layers = [
            name[len(prefix) : -len(".weight")]
            for name, info in base.tensors.items()
            if name.startswith(prefix) and name.endswith(".weight") and len(info.shape) == 2 and not name[len(prefix) :].startswith(other)
        ]
        found = _by_layer(header)
        table = spellings(layers)
        pairs: dict[str, Pair] = {}
        unmatched = []
        for spelled, roles in found.items():
            layer = table.get(spelled)
            if layer is None:
                unmatched.append(spelled if {"a", "b"} & roles.keys() else next(iter(roles.values())).name)
                continue
            _refuse_foreign(header, spelled, roles)
            if not {"a", "b"} <= roles.keys():
                raise FileError(f"{header.name}: {spelled} has only {' and '.join(info.name for info in roles.values())} of a LoRA pair; download it again.")
            name = f"{prefix}{layer}.weight"
            if name in pairs:
                raise FileError(f"{header.name} changes {layer} twice, as {spelled} and in another spelling; use a file made by one tool.")
            pairs[name] = _pair(header, roles, base.tensors[name])
        _refuse_owned(header, {spelled: roles for spelled, roles in found.items() if spelled not in table}, base, prefix, other)
        if not pairs:
            shown = ", ".join(unmatched[:2]) or ", ".join(list(header.tensors)[:2]) or "nothing"
            raise FileError(f"{header.name}: none of its {len(unmatched)} layers is one of {base.name} (it has {shown}); use a LoRA for LTX-2.5.")
        worst = max(pairs, key=lambda name: abs(pairs[name].scale))
        if abs(strength * pairs[worst].scale) > LARGEST:
            raise InputError(
                f"{header.name} at strength {strength:g} changes {worst} by {strength * pairs[worst].scale:.3g} times its product, and beyond "
                f"{LARGEST:g} there is only noise; use a strength like 1.0, or download the file again."
            )
        return Lora(header, float(strength), pairs, tuple(unmatched))

    @property
    def file(self) -> tuple[object, ...]:
        """Equal for LoRAs of one file."""
        return str(self.header.path), self.header.size, self.header.mtime_ns

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for LoRAs that change a base alike."""
        return *self.file, self.strength

    def __str__(self) -> str:
        total = len(self.pairs) + len(self.unmatched)
        text = f"LoRA {self.header.name} at strength {self.strength:g}: {len(self.pairs)} of {total} layers matched"
        if all(pair.scale == 0 for pair in self.pairs.values()):
            text += ", and its alpha is 0, so it changes nothing"
        if not self.unmatched:
            return text + "."
        more = f" and {len(self.unmatched) - 3} more" if len(self.unmatched) > 3 else ""
        return f"{text}; not used: {', '.join(self.unmatched[:3])}{more}."


def open_lora(path: str | Path) -> Header:
    """Check a LoRA file by its header: what can be known without its base. Raises FileError."""
    header = open_file(path)
    layers = [(layer, {role: header.tensors[key]}) for key in header.tensors for layer, role in [split(key)]]
    if not any("a" in roles for _, roles in layers):
        for layer, roles in layers:
            _refuse_foreign(header, layer, roles)
        require_kind(header, "LoRA", (Kind.LORA,))
    return header


def _by_layer(header: Header) -> dict[str, dict[str, TensorInfo]]:
    """Layer, as spelled -> its tensors by role. A layer with tensors of no known role keeps them under their own names."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for key, info in header.tensors.items():
        layer, role = split(key)
        first = found.setdefault(layer, {}).setdefault(role or key, info)
        if first is not info and role not in FOREIGN.values():  # which of the two was meant, nothing tells
            raise FileError(f"{header.name} changes {layer} twice, as {first.name} and as {key}; use a file made by one tool.")
    return found


def _refuse_foreign(header: Header, layer: str, roles: dict[str | None, TensorInfo]) -> None:
    for kind in FOREIGN.values():
        if kind in roles:
            raise FileError(f"{header.name}: {layer} is a {kind} (it has {roles[kind].name}), which is not supported; use a plain LoRA.")


def _refuse_owned(header: Header, unmatched: Mapping[str, dict[str | None, TensorInfo]], base: Header, prefix: str, other: tuple[str, ...]) -> None:
    """Raise FileError for what belongs to a layer, linear or not, that the base has: left out, the render would not be the LoRA's."""
    odd = {spelled: roles for spelled, roles in unmatched.items() if not {"a", "b", "alpha"} & roles.keys()}
    if not odd:
        return
    names = [name[len(prefix) :] for name in base.tensors if name.startswith(prefix) and not name[len(prefix) :].startswith(other)]
    every = spellings({layer: None for name in names for layer in (name, name.removesuffix(".weight").removesuffix(".bias"))})
    for spelled, roles in odd.items():
        own = owner(spelled, every)
        if own is not None:
            _refuse_foreign(header, spelled, roles)
            raise FileError(f"{header.name}: {next(iter(roles.values())).name} changes {own} in a way that this version does not know; use a plain LoRA.")


def _pair(header: Header, roles: dict[str, TensorInfo], target: TensorInfo) -> Pair:
    a, b = _matrix(roles["a"]), _matrix(roles["b"])
    rank = a.shape[0] if len(a.shape) == 2 else 0
    if len(a.shape) != 2 or len(b.shape) != 2 or b.shape[1] != rank or (b.shape[0], a.shape[1]) != target.shape or rank == 0:
        raise FileError(
            f"{header.name}: {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not fit {target.name} {list(target.shape)}; "
            "the LoRA was made for another model."
        )
    for info in (a, b):
        if not info.dtype.is_floating_point or info.name in header.stored:
            raise FileError(f"{header.name}: {info.name} is stored as {header.raw.tensors[info.name].dtype}, wanted bf16, fp16 or fp32.")
    return Pair(a, b, 1.0 if "alpha" not in roles else _number(header, roles["alpha"]) / rank)


def _matrix(info: TensorInfo) -> TensorInfo:
    """Some trainers keep linear layers as 1 x 1 convolutions."""
    return replace(info, shape=info.shape[:2]) if len(info.shape) == 4 and info.shape[2:] == (1, 1) else info


def _number(header: Header, info: TensorInfo) -> float:
    if info.numel != 1 or info.dtype not in _NUMBERS or info.name in header.stored:
        kind = header.raw.tensors[info.name].dtype
        raise FileError(f"{header.name}: {info.name} is {kind} of shape {list(info.shape)}, wanted one number as bf16, fp16, fp32 or int.")
    number = float(torch.frombuffer(bytearray(read_bytes(header, info.name)), dtype=info.dtype)[0])
    if not math.isfinite(number):
        raise FileError(f"{header.name}: {info.name} is {number}, wanted a finite number; download it again.")
    return number
