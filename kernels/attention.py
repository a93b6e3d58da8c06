"""Dense attention: which back end computes it, for which shape, mask and dtype.

On CUDA the back ends that work are timed once per device, library versions and shape class, on random input of that
class; the first of ORDER is taken unless another is more than 5 % faster. The choice is kept on disk, so that equal
runs use equal kernels. Before it is trusted a back end is compared with the reference once, also one that was kept; one
that is wrong, absent or refuses the shape is skipped with one log line. What only this process or this shape had against
one, a lack of memory or a length that its class does not tell, is not kept. LTX25_ATTENTION names one that is then used
without timing, wherever it is there and right.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cache_folder import cache_folder
from .dispatch import power_of_two
from .memory import is_out_of_memory

log = logging.getLogger(__name__)

Shape = tuple[torch.device, torch.dtype, torch.Size, torch.Size, bool]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) v. q (R, T, H, d), k and v (R, S, H, d), bias (T, S) in q's dtype or None: (R, T, H, d)."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias).transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `attention_reference`."""
    if q.device.type != "cuda":
        return attention_reference(q, k, v, bias)
    return _CHOICES.run(*map(aligned, (q, k, v)), bias)


_LOAD = 16  # bytes: fused kernels load this much at once, and end the process' use of the device where an address is not a multiple


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x (..., H, d), or a copy where a head of some token would not begin at a multiple of 16 bytes.

    That is so for parts of a merged product whose width is not a multiple of 8: small models, never the published ones.
    """
    places = (x.data_ptr(), *(stride * x.itemsize for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1))
    return x.clone(memory_format=torch.contiguous_format) if any(place % _LOAD for place in places) else x


def choices() -> dict[str, str]:
    """Shape class -> back end, for all classes met by this process: part of what a run depends on."""
    return dict(_CHOICES.made)


def _with(backend: SDPBackend) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attention_reference(q, k, v, bias)

    return attend


def _flash_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """FlashAttention 3, where the user installed it."""
    import flash_attn_interface

    if bias is not None:
        raise NotImplementedError("no bias")
    out = flash_attn_interface.flash_attn_func(q, k, v)
    return out[0] if isinstance(out, tuple) else out


BACKENDS: dict[str, Attend] = {
    "cudnn": _with(SDPBackend.CUDNN_ATTENTION),
    "flash3": _flash_3,
    "flash": _with(SDPBackend.FLASH_ATTENTION),
    "efficient": _with(SDPBackend.EFFICIENT_ATTENTION),
    "math": _with(SDPBackend.MATH),
}
ORDER = tuple(BACKENDS)
MARGIN = 0.05  # how much faster than an earlier one of ORDER a back end must be


class Choices:
    """What was chosen for each shape class on this machine; made on first use, outside of graph capture."""

    def __init__(self, file: Path | None) -> None:
        """`file` keeps choices between processes; None: nothing is kept."""
        self.made: dict[str, str] = {}
        self._file = file
        self._by_shape: dict[Shape, str] = {}
        self._refused: dict[Shape, set[str]] = {}  # by a shape of its class that a chosen one did not take after all
        self._right: set[tuple] = set()  # kept ones that were compared by this process
        self._skipped: set[str] = set()
        self._said = False  # that the one that was asked for is not used

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`attention_reference` by the back end for the shape; where that refuses it after all, by another from here on."""
        while True:
            name = self.of(q, k, bias)
            try:
                return BACKENDS[name](q, k, v, bias)
            except RuntimeError as error:
                # A capture that met an error is lost: whoever captures runs without a graph, and meets it again here.
                if name == ORDER[-1] or is_out_of_memory(error) or torch.cuda.is_current_stream_capturing():
                    raise
                self._refuse(name, q, k, bias, error)

    def of(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> str:
        shape = _shape(q, k, bias)
        name = self._by_shape.get(shape)
        if name is None:
            name = self._by_shape[shape] = self._choose(q, k, bias, self._refused.get(shape, set()))
        return name

    def _choose(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, refused: set[str]) -> str:
        key = shape_class(q, k, bias)
        if refused:
            key = f"{key}, exactly {q.shape[0]} x {q.shape[1]} x {k.shape[1]}"
            self.made[key], _ = self._fastest(q, k, bias, refused)
        elif key not in self.made:
            self.made[key] = self._chosen(key, q, k, bias)
        return self.made[key]

    def _chosen(self, key: str, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> str:
        """For a class that this process meets for the first time."""
        forced = os.environ.get("LTX25_ATTENTION", "")
        if forced and forced not in BACKENDS:
            raise ValueError(f"LTX25_ATTENTION is '{forced}', wanted one of {', '.join(ORDER)}")
        kept = self._kept().get(key, "")
        for given in filter(None, (forced, kept)):
            if given in BACKENDS and self._is_right(given, q, k, bias):
                return given
        if forced and not self._said:
            self._said = True
            log.warning("LTX25_ATTENTION asks for %s, which is not there or not right for %s heads of %d: the fastest of the others is used", forced, q.dtype, q.shape[-1])
        name, lasting = self._fastest(q, k, bias, {forced, kept})
        if lasting and not forced:
            self._keep(key, name)
        return name

    def _is_right(self, name: str, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether a kept or named back end is there and right in this process too: its library may be gone, or another one."""
        what = name, q.device, q.dtype, q.shape[2:], bias is None
        if name == ORDER[-1] or what in self._right:
            return True
        if name in self._skipped:
            return False
        _outside_captures()
        try:
            _compare(BACKENDS[name], q, k, bias)
        except Exception as error:  # every back end has its own ways to refuse
            if is_out_of_memory(error):
                raise
            self._skip(name, q, error)
            return False
        self._right.add(what)
        return True

    def _fastest(self, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, without: set[str]) -> tuple[str, bool]:
        """The back end to use, and whether that is worth keeping: not where one had too little memory to be timed, or
        took a part of this shape but not the whole. Raises OutOfMemoryError where memory was too little for all.
        """
        _outside_captures()
        sample = _sample(q, k, bias)
        seconds: dict[str, float] = {}
        compared: set[str] = set()
        starved: Exception | None = None
        for name in ORDER[:-1]:
            if name in self._skipped or name in without:
                continue
            try:
                _compare(BACKENDS[name], q, k, bias)
                compared.add(name)
                seconds[name] = _time(BACKENDS[name], *sample)
            except Exception as error:
                if is_out_of_memory(error):
                    starved = error.with_traceback(None)  # whose frames hold tensors
                else:
                    self._skip(name, q, error)
        lasting = starved is None and compared == seconds.keys()
        if seconds:
            best = min(seconds.values())
            return next(name for name in ORDER if name in seconds and seconds[name] <= best * (1 + MARGIN)), lasting
        if starved is not None:
            raise starved
        return ORDER[-1], lasting

    def _refuse(self, name: str, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, error: RuntimeError) -> None:
        shape = _shape(q, k, bias)
        self._refused.setdefault(shape, set()).add(name)
        del self._by_shape[shape]
        log.warning(
            "attention back end %s refuses %d x %d x %d of %s, another is used for that shape: %s", name, q.shape[0], q.shape[1], k.shape[1], q.dtype, _reason(error)
        )

    def _skip(self, name: str, q: torch.Tensor, error: Exception) -> None:
        if isinstance(error, (ImportError, ArithmeticError)):
            self._skipped.add(name)
        level = logging.DEBUG if isinstance(error, ImportError) else logging.WARNING  # FlashAttention 3 is rarely there
        log.log(level, "attention back end %s is skipped for %s heads of %d: %s", name, q.dtype, q.shape[-1], _reason(error))

    def _kept(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            kept = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return {key: name for key, name in kept.items() if isinstance(name, str)} if isinstance(kept, dict) else {}

    def _keep(self, key: str, name: str) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a choice that cannot be kept is made again next time
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(self._kept() | {key: name}, indent=1, sort_keys=True))
            partial.replace(self._file)


def _shape(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> Shape:
    return q.device, q.dtype, q.shape, k.shape, bias is None


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _outside_captures() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an attention shape is met for the first time inside a graph capture; run it once before")


def shape_class(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> str:
    """What a choice is kept under: device, versions, dtype, heads, and lengths to the next power of two."""
    device = torch.cuda.get_device_name(q.device)
    cudnn = torch.backends.cudnn.version()
    rows, tokens, heads, head = q.shape
    masked = "" if bias is None else " biased"
    more = " flash3" if importlib.util.find_spec("flash_attn_interface") else ""
    return (
        f"{device} torch {torch.__version__} cudnn {cudnn}{more} {str(q.dtype).removeprefix('torch.')} "
        f"{power_of_two(rows)} x {power_of_two(tokens)} x {power_of_two(k.shape[1])} {heads} heads of {head}{masked}"
    )


def _sample(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random input of the shape: what the model happens to hold does not decide."""
    return torch.randn(q.shape, dtype=q.dtype, device=q.device), *(torch.randn(k.shape, dtype=q.dtype, device=q.device) for _ in range(2)), bias


def _compare(attend: Attend, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ArithmeticError unless a slice of the shape agrees with the plain sums."""
    generator = torch.Generator().manual_seed(0)
    tokens, sources = min(q.shape[1], 64), min(k.shape[1], 96)
    parts = [torch.randn(1, n, *q.shape[2:], generator=generator).to(q.dtype) for n in (tokens, sources, sources)]
    part_bias = None if bias is None else torch.randn(tokens, sources, generator=generator).to(q.dtype)
    truth = attention_reference(*(part.double() for part in parts), None if part_bias is None else part_bias.double())
    got = attend(*(part.to(q.device) for part in parts), None if part_bias is None else part_bias.to(q.device)).cpu().double()
    allowed = 8 * torch.finfo(q.dtype).eps
    error = float((got - truth).abs().max() / truth.abs().max())
    if not error <= allowed:
        raise ArithmeticError(f"its relative error is {error:.3g}, allowed {allowed:.3g}")


def _time(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Median seconds of a call."""
    for _ in range(2):
        attend(q, k, v, bias)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        attend(q, k, v, bias)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


_CHOICES = Choices(cache_folder() / "attention.json")
