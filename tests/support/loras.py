"""A small LoRA for the tiny transformer, in any spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ...ltx25.checkpoint import write_file
from .quantised import read_all
from .tiny import tiny_files

OFFICIAL = (".lora_A.weight", ".lora_B.weight")


def tiny_lora(
    path: Path,
    rank: int = 4,
    spell: Callable[[str], str] = lambda name: f"diffusion_model.{name}",
    ends: tuple[str, str] = OFFICIAL,
    alpha: float | None = None,
    metadata: Mapping[str, str] | None = None,
    extra: Mapping[str, torch.Tensor] | Iterable = (),
    size: float = 0.1,
) -> Path:
    """A pair for every linear layer of the first two blocks, of adaLN, of input and output: 96 of them."""
    tensors, _ = read_all(tiny_files().transformer)
    made = {}
    for name, tensor in tensors.items():
        layer = name.removeprefix("model.diffusion_model.").removesuffix(".weight")
        if tensor.ndim != 2 or not name.endswith(".weight") or "_connector." in layer:
            continue
        if layer.startswith("transformer_blocks.") and int(layer.split(".")[1]) > 1:
            continue
        generator = torch.Generator().manual_seed(sum(map(ord, layer)))
        out, inner = tensor.shape
        r = min(rank, out, inner)
        made[spell(layer) + ends[0]] = (torch.randn(r, inner, generator=generator) / inner**0.5).bfloat16()
        made[spell(layer) + ends[1]] = (size * torch.randn(out, r, generator=generator)).bfloat16()
        if alpha is not None:
            made[spell(layer) + ".alpha"] = torch.tensor(alpha)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, {**made, **dict(extra)}, metadata or {})
    return path
