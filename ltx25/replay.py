"""CUDA graphs of nets whose small kernels take less time than their launches: the audio nets, the text side.

A net's first call of a kind (shapes and dtypes) runs as it is, which compiles kernels and packs weights; the second is
captured, later ones are replays: the same kernels on the same numbers, whether or not a graph ran. A kind that never
comes back is never captured. The transformer has its own (graphs.py): its inputs are many, and its runs are paced.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..kernels.memory import is_out_of_memory
from .device import capture_stream
from .instrument import Tick

log = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]
Results = TypeVar("Results", torch.Tensor, Tensors)
Kind = tuple[tuple[torch.Size, torch.dtype], ...]


def graphs_wanted(device: torch.device) -> bool:
    """LTX25_GRAPHS=off turns them off; they exist on CUDA only."""
    return device.type == "cuda" and os.environ.get("LTX25_GRAPHS", "on") != "off"


class Replay:
    """The graphs of one net. They hold the addresses of its weights: `drop` them before weights go.

    kept: graphs at a time, each with the memory its net works in; the one used longest ago makes room.
    """

    def __init__(self, name: str, kept: int) -> None:
        self._name = name
        self._kept = kept
        self._graphs: OrderedDict[Kind, _Graph[Any]] = OrderedDict()
        self._seen: set[Kind] = set()
        self._refused = False

    def __call__(
        self, net: Callable[..., Results], inputs: Tensors, tick: Tick, ticks: int, reads: Tensors = ()
    ) -> Results:
        """net(*inputs, tick), a tensor or a tuple of them, the caller's own. `ticks`: how many units the net tells `tick`.

        reads: tensors beside inputs and weights that the net reads where they are; their values belong to the kind.
        """
        kind = tuple((x.shape, x.dtype) for x in inputs)
        wanted = graphs_wanted(inputs[0].device) and not self._refused and not torch.cuda.is_current_stream_capturing()
        if not wanted:
            return net(*inputs, tick)
        if kind not in self._seen or not self._has(kind, net, inputs, reads):
            results = net(*inputs, tick)
            self._seen.add(kind)
            return results
        results = self._graphs[kind].replay(inputs)
        tick(ticks)
        return results

    @property
    def captured(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def drop(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._seen.clear()

    def _has(self, kind: Kind, net: Callable[..., Results], inputs: Tensors, reads: Tensors) -> bool:
        """Whether there is a graph of the kind, captured now if need be."""
        if kind not in self._graphs:
            while len(self._graphs) >= self._kept:
                self._graphs.popitem(last=False)
            try:
                self._graphs[kind] = _capture(net, inputs, reads)
            except RuntimeError as error:
                if is_out_of_memory(error):  # the driver's word for it, too: nothing is known of the next time
                    raise
                self._refused = True  # a library that cannot be captured
                log.warning("%s runs without captured graphs: %s", self._name, str(error).splitlines()[0])
                return False
        self._graphs.move_to_end(kind)
        return True


@dataclass
class _Graph(Generic[Results]):
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    results: Results
    reads: Tensors  # alive as long as the graph is

    def replay(self, inputs: Tensors) -> Results:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.results.clone() if isinstance(self.results, torch.Tensor) else tuple(result.clone() for result in self.results)


def _capture(net: Callable[..., Results], inputs: Tensors, reads: Tensors) -> _Graph[Results]:
    graph, own = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
    # Other threads of the process (previews, heartbeats) may talk to the device meanwhile.
    with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
        results = net(*own, _silent)
    return _Graph(graph, own, results, reads)


def _silent(n: int = 1, text: str = "") -> None:
    """Nothing runs while a graph is captured, so there is nothing to report."""
