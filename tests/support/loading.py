"""Fill one module from one file the way the engine does, for tests of a single part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ...ltx25.checkpoint import Header, fill

M = TypeVar("M", bound=nn.Module)


def load(build: Callable[[], M], header: Header, prefix: str, unused: Sequence[str] = (), dtype: torch.dtype = torch.float32) -> M:
    """Built on meta, filled strictly and completely on the CPU, floating weights widened to `dtype`."""
    with torch.device("meta"):
        module = build()
    fill(module, header, prefix, torch.device("cpu"), dtype, lambda _: None, unused)
    return module.eval()
