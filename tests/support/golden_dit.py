"""The golden values of the transformer and of denoising, and the tiny transformer they belong to."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from safetensors.torch import load_file

from ...ltx25.checkpoint import Header, fill, read_header
from ...ltx25.config.dit import DiTConfig
from ...ltx25.config.transformer import CONNECTOR_TENSORS, read_transformer, transformer_prefix
from ...ltx25.dit import KEEP_STORED, DiT
from .files import GOLDEN

FOLDER = GOLDEN / "dit"
INDEX: dict[str, Any] = json.loads((FOLDER / "index.json").read_text())


def names(family: str) -> list[str]:
    """Cases of a family ("rope/"), in file order; none is a mistake in the test."""
    found = [name for name in INDEX if name.startswith(family)]
    assert found, f"no golden case starts with {family}"
    return found


@functools.lru_cache(maxsize=1)
def _tensors() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "cases.safetensors")


def value(stored: Any) -> Any:
    """A copy of the tensor a reference names; anything else as it is."""
    return _tensors()[stored["tensor"]].clone() if isinstance(stored, dict) and "tensor" in stored else stored


def inputs(case: str) -> dict[str, Any]:
    return {name: value(stored) for name, stored in INDEX[case]["inputs"].items()}


def outputs(case: str) -> dict[str, Any]:
    return {name: value(stored) for name, stored in INDEX[case]["outputs"].items()}


def check(case: str, name: str, got: torch.Tensor) -> None:
    """abs(got - want) <= atol + rtol * abs(want) for every element of output `name`, at the case's own tolerance."""
    close(case, name, got, value(INDEX[case]["outputs"][name]))


def close(case: str, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """The same for a part of an output (the rows of one leg)."""
    tolerance = INDEX[case]["tolerance"]
    assert got.shape == want.shape, f"{case} {name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    torch.testing.assert_close(got.to(want.dtype), want, atol=tolerance["atol"], rtol=tolerance["rtol"], msg=lambda m: f"{case} {name}: {m}")


def header(checkpoint: str = "f32") -> Header:
    return read_header(FOLDER / f"transformer_{checkpoint}.safetensors")


def config() -> DiTConfig:
    return read_transformer(header())[0]


@functools.lru_cache(maxsize=4)
def tiny_dit(checkpoint: str = "f32", dtype: torch.dtype = torch.float32) -> DiT:
    """The tiny transformer on the CPU, shared between tests: do not write to its weights."""
    return load_dit(header(checkpoint), dtype)


def load_dit(file: Header, dtype: torch.dtype) -> DiT:
    with torch.device("meta"):
        dit = DiT(read_transformer(file)[0])
    keep = KEEP_STORED if dtype == torch.bfloat16 else ()
    fill(dit, file, transformer_prefix(file), torch.device("cpu"), dtype, lambda _: None, CONNECTOR_TENSORS, keep)
    return dit
