"""Where one step's time goes: matrix products, attention, element-wise, copies, and gaps in which the device waits.

    attribution, result = profile_step(lambda: dit(...), device)
    print(attribution.text(speed))

A trace of the step is cut into stretches of time. Every instant belongs to one kind: to what runs then, to the dearest
kind where streams overlap, to the gaps where nothing runs. So the parts sum to the trace's own wall time by construction,
and `measured` (a clock around the step) tells whether that trace is the step. On a CPU the operators stand in for kernels.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config.dit import DiTConfig
from ..dit.modality import LegPlan
from .flops import Flops, group_flops, group_traffic
from .memory import query
from .selftest import Speed, self_test
from .units import bytes_text, rate_text, seconds_text
from .watch import Watch

T = TypeVar("T")
Interval = tuple[float, float]  # s, start before end

MATRIX, ATTENTION, ELEMENTWISE, COPIES, GAPS = "matrix products", "attention", "element-wise", "copies", "host gaps"
KINDS = (MATRIX, ATTENTION, ELEMENTWISE, COPIES)  # dearest first: an instant with several goes to the first
STEP = "ltx25.profiled step"

# Names of kernels (CUDA, ROCm, Triton) and of operators (CPU), tried in this order. What matches none is element-wise.
_NAMES = (
    (ATTENTION, re.compile(r"flash|fmha|sdpa|attention|attn_fwd|na3d|neighbou?r", re.I)),
    (COPIES, re.compile(r"memcpy|memset|direct_copy|CatArray|aten::(copy_|_to_copy|cat|clone|contiguous)\b|copy_kernel", re.I)),
    (MATRIX, re.compile(r"gemm|gemv|cutlass|nvjet|xmma|wgmma|cublas|matmul|scaled_mm|conv|winograd|Cijk_|aten::(mm|addmm|bmm|baddbmm|linear|_int_mm)\b", re.I)),
)


@dataclass(frozen=True)
class Attribution:
    """One profiled step, s. `wall` of the trace, `measured` by a clock around it; `seconds` per kind, host gaps included.

    kernels: launches on the device (operators on a CPU). flops, traffic: what the step must compute and move, where
    known; copied: bytes of the copies the trace counted.
    """

    wall: float
    measured: float
    seconds: dict[str, float]
    kernels: int
    copied: int
    flops: Flops | None
    traffic: int | None

    @property
    def device_busy(self) -> float:
        """Union of kernel and copy intervals."""
        return self.wall - self.seconds[GAPS]

    @property
    def shares(self) -> dict[str, float]:
        return {kind: seconds / self.wall for kind, seconds in self.seconds.items()}

    def facts(self) -> dict[str, Any]:
        """For the run record's `profile` line."""
        return {
            "wall": self.wall,
            "measured": self.measured,
            "device_busy": self.device_busy,
            "seconds": self.seconds,
            "shares": self.shares,
            "kernels": self.kernels,
            "copied": self.copied,
            "linear": None if self.flops is None else self.flops.linear,
            "attention": None if self.flops is None else self.flops.attention,
            "traffic": self.traffic,
        }

    def text(self, speed: Speed | None = None) -> str:
        """The split, and the rates reached against what the device did in its self-test."""
        lines = [f"one step: {seconds_text(self.wall)}, {self.kernels} kernels, device busy {100 * self.device_busy / self.wall:.1f} %"]
        for kind, seconds in self.seconds.items():
            rate = self._rate(kind, speed)
            lines.append(f"  {kind:<16}{seconds_text(seconds):>10}  {100 * seconds / self.wall:5.1f} %" + (f"  {rate}" if rate else ""))
        if self.traffic is not None and self.device_busy > 0:
            reached = self.traffic / self.device_busy
            lines.append(f"  moves about {bytes_text(self.traffic)}: {rate_text(reached)}" + (_of(reached, speed.copy, rate_text) if speed else ""))
        return "\n".join(lines)

    def _rate(self, kind: str, speed: Speed | None) -> str:
        seconds = self.seconds[kind]
        flops = {MATRIX: self.flops and self.flops.linear, ATTENTION: self.flops and self.flops.attention}.get(kind)
        if not seconds:
            return ""
        if flops:
            return _tflops(flops / seconds) + (_of(flops / seconds, speed.flops, _tflops) if speed else "")
        if kind == COPIES and self.copied:
            return rate_text(self.copied / seconds) + (_of(self.copied / seconds, speed.copy, rate_text) if speed else "")
        return ""


def profile_step(step: Callable[[], T], device: torch.device, flops: Flops | None = None, traffic: int | None = None) -> tuple[Attribution, T]:
    """Run `step` under the profiler; returns its split and its result. Waits for the device before and after.

    On CUDA it runs twice and the second time counts: in the first the tracer prepares itself for every kernel it meets.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    wait()
    with torch.profiler.profile(activities=activities) as profiler:
        if device.type == "cuda":
            step()
            wait()
        begin = time.perf_counter()
        with torch.profiler.record_function(STEP):
            result = step()
            wait()
        measured = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return attribute(events, measured, flops, traffic), result


def attribute(events: Iterable[dict[str, Any]], measured: float, flops: Flops | None = None, traffic: int | None = None) -> Attribution:
    """The split of the step marked `STEP` in a Chrome trace (times in us). Raises ValueError where it has no such mark."""
    spans = [event for event in events if event.get("ph") == "X"]
    mark = next((event for event in spans if event.get("name") == STEP and event.get("cat") != "gpu_user_annotation"), None)
    if mark is None:
        raise ValueError("the trace holds no profiled step")
    start, end = mark["ts"] / 1e6, (mark["ts"] + mark["dur"]) / 1e6
    on_device = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ran = on_device or [event for event in spans if event.get("cat") == "cpu_op"]
    by_kind: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    copied = 0
    inside = []
    for event in ran:
        a, b = max(start, event["ts"] / 1e6), min(end, (event["ts"] + event["dur"]) / 1e6)
        if b <= a:
            continue
        inside.append(event)
        by_kind[kind_of(event["name"])].append((a, b))
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            copied += int((event.get("args") or {}).get("bytes", 0))
    seconds, taken = {}, []
    for kind in KINDS:
        together = union([*taken, *by_kind[kind]])
        seconds[kind] = length(together) - length(taken)
        taken = together
    seconds[GAPS] = (end - start) - length(taken)
    kernels = sum(event["cat"] == "kernel" for event in inside) if on_device else _leaves(inside)
    return Attribution(end - start, measured, seconds, kernels, copied, flops, traffic)


def kind_of(name: str) -> str:
    """The kind of work a kernel or operator of this name does."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), ELEMENTWISE)


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover what `intervals` cover."""
    merged: list[Interval] = []
    for a, b in sorted(intervals):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], b))
        else:
            merged.append((a, b))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(b - a for a, b in intervals)


def _leaves(operators: Sequence[dict[str, Any]]) -> int:
    """Operators that call no other one, per thread."""
    leaves, stacks = 0, {}
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks.setdefault(event.get("tid"), [])
        while stack and stack[-1][0] <= event["ts"]:
            leaves += stack.pop()[1]
        if stack:
            stack[-1][1] = 0
        stack.append([event["ts"] + event["dur"], 1])
    return leaves + sum(leaf for stack in stacks.values() for _, leaf in stack)


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _of(reached: float, most: float, text: Callable[[float], str]) -> str:
    return f", {100 * reached / most:.0f} % of {text(most)}"


@dataclass(frozen=True)
class StepWork:
    """What turns a traced call into rates: the model, tokens by stream, text tokens, clips, bytes of a number."""

    config: DiTConfig
    tokens: Mapping[str, int]
    text: int
    batch: int
    itemsize: int

    def flops(self, plan: LegPlan) -> Flops:
        return group_flops(self.config, plan, self.tokens.get("video", 0), self.tokens.get("audio", 0), self.text) * self.batch

    def traffic(self, plan: LegPlan) -> int:
        return int(group_traffic(self.config, plan, *(self.batch * self.tokens.get(name, 0) for name in ("video", "audio")), self.itemsize))


class ProfiledTransformer:
    """A transformer one of whose calls is traced; all others pass through, and results are the same.

    The third call is: by then buffers are warm and graphs captured. Where there are graphs the next call is traced without
    them: two `device_busy` in one record are what their use is decided by. `texts` fills with what was found.
    """

    def __init__(self, dit: Any, plain: Any, device: torch.device, watch: Watch, plans: Sequence[LegPlan], work: StepWork) -> None:
        """`plain`: the same transformer without graphs; `plans`: of its calls, in order. Tests the device for 2 s first."""
        self.texts: tuple[str, ...] = ()
        self._dit, self._plain, self._device, self._watch = dit, plain, device, watch
        self._plans, self._work = plans, work
        self._at = min(2, len(plans) - 1)
        self._calls = 0
        with watch.phase("profile.selftest"):
            self._speed = query(lambda: self_test(device))  # None where its buffers find no room beside the model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dit, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        if call not in self.traced:
            return self._dit(*arguments, **named)
        graphs = self._graphed and call == self._at
        return self._trace(self._dit if graphs else self._plain, graphs, call, arguments, named)

    @property
    def traced(self) -> range:
        """Numbers of the calls that are traced, from 0."""
        return range(self._at, min(self._at + 1 + self._graphed, len(self._plans)))

    @property
    def _graphed(self) -> bool:
        return self._dit is not self._plain

    def _trace(self, dit: Any, graphs: bool, call: int, arguments: tuple, named: dict[str, Any]) -> Any:
        plan, begins = self._plans[call], []

        def step() -> Any:
            begins.append(time.monotonic())
            return dit(*arguments, **named)

        attribution, result = profile_step(step, self._device, self._work.flops(plan), self._work.traffic(plan))
        text = attribution.text(self._speed)
        if self._device.type == "cuda":
            text = f"graphs {'on' if graphs else 'off'}, {text}"
        speed = None if self._speed is None else {"flops": self._speed.flops, "copy": self._speed.copy, "link": self._speed.link}
        self._watch.note("profile", text, **attribution.facts(), graphs=graphs, group=call, begin=begins[-1], selftest=speed)
        self.texts = (*self.texts, text)
        return result
