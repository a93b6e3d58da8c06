"""Golden folders in the format of tests/golden/text/README.md: cases by name, tensors, and the comparison they ask for."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


class Golden:
    """One folder, e.g. Golden("text")."""

    def __init__(self, part: str) -> None:
        self.folder = GOLDEN / part
        self.index: dict[str, Any] = json.loads((self.folder / "index.json").read_text())

    def names(self, prefix: str) -> list[str]:
        """Cases below `prefix`, in file order; an empty answer is a mistake in the test."""
        found = [name for name in self.index if name.startswith(prefix)]
        assert found, prefix
        return found

    def tensor(self, value: Mapping[str, Any]) -> torch.Tensor:
        """A tensor that is stored whole; integers and bf16 as they are."""
        assert not value.get("sampled"), f"{value['key']} is stored as samples only"
        tensor = _tensor(self.folder / value["file"], value["key"])
        assert list(tensor.shape) == value["shape"]
        return tensor

    def input(self, case: str, name: str) -> Any:
        """A plain value or a tensor; floating tensors widened to float32."""
        return self._plain(self.index[case]["inputs"][name])

    def output(self, case: str, name: str) -> Any:
        return self._plain(self.index[case]["outputs"][name])

    def _plain(self, value: Mapping[str, Any]) -> Any:
        if "value" in value:
            return value["value"]
        tensor = self.tensor(value)
        return tensor.float() if tensor.is_floating_point() else tensor

    def check(self, case: str, name: str, got: torch.Tensor) -> None:
        """abs(got - want) <= atol + rtol * abs(want) for output `name`, at the kept samples where it is not stored whole."""
        want, tolerance = self.index[case]["outputs"][name], self.index[case]["tolerance"]
        assert list(got.shape) == want["shape"], (case, name)
        if want.get("sampled"):
            key, path = want["key"], self.folder / want["file"]
            got, expected = got.flatten()[_tensor(path, f"{key}.idx").long()], _tensor(path, f"{key}.val")
        else:
            expected = self.tensor(want)
        torch.testing.assert_close(got.to(expected.dtype), expected, atol=tolerance["atol"], rtol=tolerance["rtol"], msg=lambda m: f"{case} {name}: {m}")


@functools.lru_cache(maxsize=256)
def _tensor(path: Path, key: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(key)
