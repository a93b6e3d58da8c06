"""CUDA graphs of the audio nets: hundreds of small kernels, whose launches take longer than they do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .layers import Tick

KEPT = 3  # graphs of one net: a long clip has a first, a middle and a last chunk


class Replay:
    """Calls net(x, tick). On a GPU the second call with a shape is captured, and later ones are replays of it.

    The first call of a shape compiles kernels and packs weights; a length that never comes back is never captured.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[torch.Size, torch.dtype], _Graph | None] = OrderedDict()

    def __call__(
        self, net: Callable[[torch.Tensor, Tick], torch.Tensor], x: torch.Tensor, tick: Tick, ticks: int
    ) -> torch.Tensor:
        """The net's output, a tensor of the caller's own. `ticks`: how many times net calls `tick`."""
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return net(x, tick)
        kind = (x.shape, x.dtype)
        if kind not in self._graphs:
            y = net(x, tick)
            self._keep(kind, None)
            return y
        graph = self._graphs[kind] or _capture(net, x)
        self._keep(kind, graph)
        graph.source.copy_(x)
        graph.graph.replay()
        y = graph.result.clone()
        tick(ticks)
        return y

    def _keep(self, kind: tuple[torch.Size, torch.dtype], graph: _Graph | None) -> None:
        self._graphs[kind] = graph
        self._graphs.move_to_end(kind)
        while len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    source: torch.Tensor
    result: torch.Tensor


def _capture(net: Callable[[torch.Tensor, Tick], torch.Tensor], x: torch.Tensor) -> _Graph:
    graph, source = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = net(source, _silent)
    return _Graph(graph, source, result)


def _silent(n: int = 1) -> None:
    """Nothing runs while a graph is captured, so there is nothing to report."""
