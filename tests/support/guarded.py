"""Memory with guard bands: what a kernel writes beyond a tensor is found, what it reads beyond one shows in its results.

Bands hold NaN, a different one for every tensor, so that a NaN carried from one band to another is seen as well. In
whole-number tensors they hold a small negative number: a row index read from there leads into the band of the table, not
out of the process.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ... import kernels
from ...kernels import nvfp4_linear
from ...kernels.dispatch import Compared, Op
from ...kernels.fp8_linear import supported

BAND = 1 << 15  # bytes on either side: several rows of any check, and no less aligned than memory without bands
WHOLE = -7
QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000, torch.float64: 0x7FF8 << 48}
FLOAT32_ONLY = ("snake", "wide_conv")  # ops whose kernels are never given anything else
LIBRARY = ("fp8_linear", "linear_gelu")  # ops that are a product of the card's library
ROUNDED = ("quantise",)  # ops of which the interpreter makes other numbers: it truncates where a card rounds to e4m3


class GuardedMemory(TorchDispatchMode):
    """Inside, every new tensor lies between bands, and memory nobody has written yet holds what bands hold."""

    def __init__(self) -> None:
        super().__init__()
        self._guarded: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # memory, its bands as they were, whose it is

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # a tensor made of Python numbers
            given = []
        old = {_address(x) for x in given if isinstance(x, torch.Tensor)}
        name = func.name()

        def guard(x: Any) -> Any:
            return self._guard(x, name) if isinstance(x, torch.Tensor) and x.numel() and _address(x) not in old else x

        return tree_map(guard, made)

    def broken(self) -> list[str]:
        """Tensors whose bands were written to."""
        return [whose for memory, before, whose in self._guarded if not torch.equal(_bands(memory), before)]

    def _guard(self, x: torch.Tensor, name: str) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(2 * BAND + extent * x.itemsize, dtype=torch.uint8, device=x.device)
        flat = memory.view(x.dtype)
        if x.dtype in QUIET_NAN:
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
            memory.view(bits).fill_(QUIET_NAN[x.dtype] + 1 + len(self._guarded) % 63)
        elif x.dtype.is_floating_point or x.dtype == torch.uint8:
            memory.fill_(0x7F)  # not a number in e4m3
        else:
            flat.fill_(True if x.dtype == torch.bool else WHOLE)
        placed = flat.as_strided(x.shape, x.stride(), BAND // x.itemsize)
        if "empty" not in name:
            placed.copy_(x)
        self._guarded.append((memory, _bands(memory).clone(), f"{tuple(x.shape)} {x.dtype} of {name}"))
        return placed


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bands(memory: torch.Tensor) -> torch.Tensor:
    return torch.stack((memory[:BAND], memory[-BAND:]))


def ops() -> dict[str, tuple[Op, ModuleType]]:
    """Every op of kernels/ and its module, by name."""
    modules = [importlib.import_module(f"{kernels.__name__}.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
    return {value.name: (value, module) for module in modules for value in vars(module).values() if isinstance(value, Op)}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """What an op's kernels are given there: the interpreter has no right bf16."""
    return torch.float32 if device.type == "cpu" or name in FLOAT32_ONLY else torch.bfloat16


def why_not(name: str, device: torch.device) -> str | None:
    """Why an op's cases cannot run there; None: they can."""
    if name in LIBRARY and device.type == "cpu":
        return "its product is the card's own"
    if name == "fp8_linear" and not supported(device):
        return "this card has no e4m3 products"
    if name == "nvfp4_linear" and not nvfp4_linear.supported(device):
        return "this device has no nvfp4 products"
    return None


def launched(module: ModuleType) -> set[str]:
    """Names of the kernels a module launches, by its source: `name[grid](...)`."""
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    names = {func.value.id for func in calls if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name)}
    return {name for name in names if hasattr(getattr(module, name, None), "run")}


def check(op: Op, device: torch.device) -> list[Compared]:
    """An op's own small cases: results of the kernel, of its twin, and in float64."""
    return list(op._check(device, dtype_of(op.name, device)))


def guarded_check(op: Op, module: ModuleType, device: torch.device) -> list[str]:
    """What went wrong in an op's own small cases between guard bands; nothing if all is well."""
    wrong: list[str] = []
    with _recording(module) as ran, GuardedMemory() as memory:
        results = check(op, device)
    wrong += [f"{name} was not launched" for name in sorted(launched(module) - ran)]
    wrong += [f"wrote beyond {whose}" for whose in memory.broken()]
    for got, twin, truth in results:
        error, allowed = ((x.cpu().double() - truth.cpu()).abs().max().item() for x in (got, twin))
        if not (error <= 2 * allowed or (error < float("inf") and op.name in ROUNDED and device.type == "cpu")):
            wrong.append(f"its error is {error:.3g}, allowed {2 * allowed:.3g}")
    return wrong


class _Recorded:
    """A kernel that tells when it is launched."""

    def __init__(self, name: str, kernel: Any, ran: set[str]) -> None:
        self._name, self._kernel, self._ran = name, kernel, ran

    def __getitem__(self, grid: Any) -> Any:
        self._ran.add(self._name)
        return self._kernel[grid]


@contextlib.contextmanager
def _recording(module: ModuleType) -> Iterator[set[str]]:
    ran: set[str] = set()
    kernels_of = {name: getattr(module, name) for name in launched(module)}
    for name, kernel in kernels_of.items():
        setattr(module, name, _Recorded(name, kernel, ran))
    try:
        yield ran
    finally:
        for name, kernel in kernels_of.items():
            setattr(module, name, kernel)
