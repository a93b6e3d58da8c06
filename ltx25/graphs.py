"""The transformer's forward as a captured CUDA graph: one launch instead of thousands, for small clips many times faster.

A graph is bound to the shapes of a clip and to its leg plan, not to values: seed, prompt, sigmas, scales and a next clip of
the same shape are copied into its inputs. The first forward of a kind runs without one, which also warms everything up
that may not happen inside a capture; the second is captured. Forwards that are paced (flight.py: slower than half a
second) are not captured: there the device is the bottleneck, and the host must be able to stop between blocks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..kernels.memory import is_out_of_memory
from .device import capture_stream
from .dit import Contexts, DiT, Geometry, Leg, LegPlan, StepTables, Stream, Velocity
from .dit.kept_text import StepTexts
from .flight import Pause, unpaced

log = logging.getLogger(__name__)

FIXED = (".geometry", ".positive", ".negative")  # inputs that stay the same objects, never written to, through a run
KEPT = 4  # graphs: a guided and a plain plan, each at two sizes


class Captured:
    """The graphs of a transformer that is loaded, shared by all handles to it."""

    def __init__(self) -> None:
        self._dit: GraphedDiT | None = None

    def of(self, dit: DiT) -> GraphedDiT:
        """The transformer with its graphs, the same one until `drop`."""
        if self._dit is None:
            self._dit = GraphedDiT(dit)
        return self._dit

    def drop(self) -> None:
        """Free all graphs and their memory: the weights go, or are changed."""
        if self._dit is not None:
            self._dit.drop()
            self._dit = None


class GraphedDiT:
    """A DiT whose fast forwards are replayed. Same calls, same results: the same kernels run on the same numbers."""

    def __init__(self, dit: DiT) -> None:
        self._dit = dit
        self._pool: Any = None
        self._replays: OrderedDict[Hashable, _Replay] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused = False

    def prepare(self, video: Stream | None, audio: Stream | None, device: torch.device, dtype: torch.dtype) -> Geometry:
        return self._dit.prepare(video, audio, device, dtype)

    def schedule_tables(self, geometry: Geometry, sigmas: Sequence[tuple[float, float]], told: Callable[[int], None]) -> Sequence[StepTables]:
        return self._dit.schedule_tables(geometry, sigmas, told)

    def __call__(
        self,
        video: torch.Tensor | None,
        audio: torch.Tensor | None,
        geometry: Geometry,
        tables: StepTables,
        positive: Contexts,
        negative: Contexts | None,
        plan: LegPlan,
        batched: bool,
        pause: Pause,
        kept: StepTexts | None = None,
    ) -> Mapping[Leg, Velocity]:
        """As DiT.forward. The velocities stay valid until the next call.

        A graph makes keys and values itself: copying kept ones into it moves twice their 1.2 GB to spare 5 ms.
        """
        inputs = _Inputs(video, audio, geometry, tables, positive, negative)
        key = (_structure(inputs), plan, batched)
        if pause is not unpaced or self._refused or (key not in self._replays and key not in self._seen):
            self._seen.add(key)
            return self._run(inputs, plan, batched, pause, kept)
        if key not in self._replays and not self._capture(key, inputs, plan, batched):
            return self._run(inputs, plan, batched, pause, kept)
        self._replays.move_to_end(key)
        return self._replays[key](inputs)

    def drop(self) -> None:
        """Free all graphs and their memory."""
        self._replays.clear()
        self._seen.clear()
        self._pool = None

    @property
    def captured(self) -> int:
        """Graphs held now."""
        return len(self._replays)

    def _run(self, inputs: _Inputs, plan: LegPlan, batched: bool, pause: Pause, kept: StepTexts | None) -> Mapping[Leg, Velocity]:
        return self._dit(*inputs, plan, batched, pause, kept)

    def _capture(self, key: Hashable, inputs: _Inputs, plan: LegPlan, batched: bool) -> bool:
        while len(self._replays) >= KEPT:
            self._replays.popitem(last=False)
        torch.cuda.empty_cache()  # what the warm-up left cached would lie idle beside the graph's own memory
        if self._pool is None or not self._replays:
            self._pool = torch.cuda.graph_pool_handle()  # shared: replays follow each other on one stream
        try:
            self._replays[key] = _Replay(inputs, lambda static: self._run(static, plan, batched, unpaced, None), self._pool)
        except RuntimeError as error:
            if is_out_of_memory(error):  # the driver's word for it, too: nothing is known of the next time
                raise
            self._refused = True  # a library that cannot be captured
            log.warning("the transformer runs without captured graphs: %s", str(error).splitlines()[0])
            return False
        return True


@dataclass(frozen=True)
class _Inputs:
    """Everything a forward reads besides weights."""

    video: torch.Tensor | None
    audio: torch.Tensor | None
    geometry: Geometry
    tables: StepTables
    positive: Contexts
    negative: Contexts | None

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))


class _Replay:
    """One captured forward: inputs of its own, and the outputs every replay writes."""

    def __init__(self, inputs: _Inputs, run: Callable[[_Inputs], Mapping[Leg, Velocity]], pool: Any) -> None:
        self._static: _Inputs = _map(inputs, torch.clone)
        self._tensors = {path: tensor for path, tensor in _tensors(self._static) if tensor.device.type == "cuda"}
        self._last: dict[str, torch.Tensor] = {}
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process (previews, heartbeats) may talk to the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=capture_stream(), capture_error_mode="thread_local"):
            self._outputs = run(self._static)

    def __call__(self, inputs: _Inputs) -> Mapping[Leg, Velocity]:
        targets, sources = [], []
        for path, tensor in _tensors(inputs):
            if path not in self._tensors:
                continue
            if path.startswith(FIXED):
                if self._last.get(path) is tensor:
                    continue
                self._last[path] = tensor
            targets.append(self._tensors[path])
            sources.append(tensor)
        torch._foreach_copy_(targets, sources)
        self._graph.replay()
        return self._outputs


def _structure(value: Any) -> Hashable:
    """Two inputs of equal structure may share a graph: shapes, dtypes and every plain value agree."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device)
    if is_dataclass(value):
        return tuple(_structure(getattr(value, field.name)) for field in fields(value))
    return value


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{path}.{field.name}")


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value):
        return type(value)(*(_map(getattr(value, field.name), change) for field in fields(value)))
    return value
