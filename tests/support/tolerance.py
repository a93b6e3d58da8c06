"""The error budget of a kernel: at most twice what its plain twin in the same dtype makes, both against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def assert_no_worse_than(got: torch.Tensor, twin: torch.Tensor, truth: torch.Tensor, factor: float = 2.0) -> None:
    """Compare maxima of |got - truth| and factor * |twin - truth|; float32 rounding of the largest value is allowed on top."""
    assert got.shape == truth.shape and twin.shape == truth.shape
    truth = truth.double().cpu()
    error = (got.double().cpu() - truth).abs().max().item()
    allowed = factor * (twin.double().cpu() - truth).abs().max().item() + 2**-23 * truth.abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new memory holds NaN: what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills uninitialised memory
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
