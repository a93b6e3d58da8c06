"""What the modules of a block hold, as something that can be moved as a whole: into one run of bytes, on another device.

Parameters, buffers, and tensors inside of plain attributes (a weight kept as it is stored, linear.py) are all alike here.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .device import copied
from .pinned import host_memory, pin

_PLAIN = (bool, int, float, str, type(None), dict, OrderedDict)  # what most attributes of a module are: looking into each costs more than moving it
ALIGNED = 512  # bytes: as the allocator of a device aligns tensors, so that kernels take the same ways
Change = Callable[[torch.Tensor], torch.Tensor]


class Content:
    """(path, where, key, value) of everything a block holds: the path of a module in it, and which of its dictionaries."""

    def __init__(self, items: Sequence[tuple[str, str, str, Any]]) -> None:
        self._items = tuple(items)

    @staticmethod
    def of(block: nn.Module, stay: Sequence[str] = ()) -> Content:
        """What `block` holds now, but parameters whose name matches a pattern of `stay`."""
        items: list[tuple[str, str, str, Any]] = []
        for path, module in block.named_modules():
            lead = f"{path}." if path else ""
            for where in ("_parameters", "_buffers"):
                named = vars(module)[where].items()  # None too: a weight that is stored otherwise is gone from here
                items += [(path, where, key, value) for key, value in named if not any(fnmatchcase(lead + key, p) for p in stay)]
            items += [(path, "", key, value) for key, value in vars(module).items() if _holds_tensors(value)]
        return Content(items)

    def put(self, block: nn.Module) -> None:
        """Let `block`, or another one built alike, hold this."""
        modules = _modules(block)
        for path, where, key, value in self._items:
            module = modules[path] if path else block
            (vars(module)[where] if where else vars(module))[key] = value

    def take_from(self, block: nn.Module) -> None:
        """Leave `block` with everything but the numbers: tensors of this content become empty ones of their shape and dtype."""
        self.map(lambda tensor: torch.empty_like(tensor, device="meta")).put(block)

    def map(self, change: Change) -> Content:
        """The same places with every tensor changed."""
        return Content([(path, where, key, _mapped(value, change)) for path, where, key, value in self._items])

    def tensors(self) -> list[torch.Tensor]:
        """In an order that `map` keeps."""
        found: list[torch.Tensor] = []

        def see(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map(see)
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        """The dense parameters by their names in the block; those that are stored otherwise are missing."""
        named = ((f"{path}.{key}" if path else key, value) for path, where, key, value in self._items if where == "_parameters")
        return {name: value.detach() for name, value in named if value is not None}

    def gathered(self, memory: torch.Tensor, used: int) -> Content:
        """The same places with all tensors in `memory` (n,) uint8: those that are elsewhere are copied behind its first `used` bytes."""
        start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal used
            if tensor.numel() == 0 or start <= tensor.data_ptr() < end:
                return tensor
            first, used = used, used + _room_of(tensor)
            there = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return copied(tensor, there)

        return self.map(gather)

    def placed(self, buffer: torch.Tensor) -> Content:
        """The same places with views of `buffer` (n,) uint8, one tensor behind the other, unwritten."""
        at, run = 0, Run(buffer)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal at
            start, at = at, at + _room_of(tensor)
            return run.at(start, tensor.dtype, tensor.shape, tensor.stride() if _dense(tensor) else None)

        return self.map(view)


class Run:
    """Tensors in one run of bytes (n,) uint8, n a multiple of every item size. One step each: of three, thousands of times a step, the
    device saw the difference."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def at(self, begin: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor that begins at byte `begin`, a multiple of ALIGNED; contiguous unless `strides` says otherwise."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._buffer.view(dtype)
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        return typed.as_strided(shape, strides, typed.storage_offset() + begin // dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Packed:
    """A block's content as views of one run of bytes."""

    buffer: torch.Tensor
    content: Content


_known: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()


def _modules(block: nn.Module) -> dict[str, nn.Module]:
    """What is in a block by path, without the block itself: a block comes and goes in every step, and its modules stay."""
    modules = _known.get(block)
    if modules is None:
        modules = _known[block] = {path: module for path, module in block.named_modules() if path}
    return modules


def packed_bytes(content: Content) -> int:
    return sum(map(_room_of, content.tensors()))


def pack_for(content: Content, device: torch.device) -> Packed | None:
    """`content` in host memory that `device` can copy from on its own, where it is a CUDA one; None: there is no more of it."""
    buffer = host_memory(packed_bytes(content))
    if buffer is None:
        return None
    packed = Packed(buffer, content.placed(buffer))
    pin(packed, buffer, device)
    for target, source in zip(packed.content.tensors(), content.tensors(), strict=True):
        copied(source, target)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return packed


def _room_of(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1 == math.prod(tensor.shape)


def _holds_tensors(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, see)
    return bool(found)


def _mapped(value: Any, change: Change) -> Any:
    """`value` with every tensor in it changed; the same object where there is none."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(change(value.detach()), requires_grad=False)
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [_mapped(part, change) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not hasattr(value, "__dict__") or isinstance(value, (nn.Module, type)) or callable(value):
        return value
    parts = {key: _mapped(part, change) for key, part in vars(value).items()}
    if all(parts[key] is part for key, part in vars(value).items()):
        return value
    made = copy.copy(value)
    vars(made).update(parts)
    return made
