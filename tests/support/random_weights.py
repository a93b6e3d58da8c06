"""Seeded random weights for a module built on meta, made on the device it will run on: benchmarks and device tests.

Values are scaled so that activations stay near 1 through the depth of the published model; they mean nothing.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
from torch import nn


def fill_random(module: nn.Module, device: torch.device | str, dtype: torch.dtype, seed: int = 0, keep: tuple[str, ...] = ()) -> nn.Module:
    """Replace every meta parameter and persistent buffer of `module` by random values on `device`; return `module`.

    Floating tensors become `dtype`, those matched by a `keep` pattern (fnmatch on the full name) float32.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        stored = torch.float32 if any(fnmatchcase(name, pattern) for pattern in keep) else dtype
        values = _values(name, tensor, torch.device(device), stored, generator)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(values, requires_grad=False)
        else:
            owner._buffers[leaf] = values
    return module


def _values(name: str, like: torch.Tensor, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    values = torch.empty(like.shape, dtype=dtype, device=device)
    leaf = name.rpartition(".")[2]
    if leaf == "weight" and like.ndim == 1:  # a norm
        return values.normal_(1.0, 0.1, generator=generator)
    if leaf == "weight":
        return values.normal_(0.0, 1.0 / math.sqrt(math.prod(like.shape[1:])), generator=generator)
    return values.normal_(0.0, 0.1, generator=generator)  # biases, tables, embeddings
