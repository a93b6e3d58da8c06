"""Golden folders in the format of tests/golden/text/README.md: cases by name, their values, and the comparison they ask for."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .files import GOLDEN


class Golden:
    """One folder, e.g. Golden("text")."""

    def __init__(self, part: str) -> None:
        self.folder = GOLDEN / part
        self.index: dict[str, Any] = json.loads((self.folder / "index.json").read_text())

    def names(self, prefix: str) -> list[str]:
        """Names of the cases below `prefix`, in file order; an empty answer is a mistake in the test."""
        found = [name for name in self.index if name.startswith(prefix)]
        assert found, f"no golden case starts with {prefix}"
        return found

    def input(self, case: str, name: str) -> Any:
        """A plain value, or a tensor: integers as stored, bf16 widened to float32."""
        return self._resolve(self.index[case]["inputs"][name])

    def output(self, case: str, name: str) -> Any:
        """The same for an expected output that is stored whole."""
        return self._resolve(self.index[case]["outputs"][name])

    def check(self, case: str, name: str, got: torch.Tensor) -> None:
        """abs(got - want) <= atol + rtol * abs(want) for output `name`, at the kept samples where it is not stored whole."""
        want, tolerance = self.index[case]["outputs"][name], self.index[case]["tolerance"]
        assert list(got.shape) == want["shape"], f"{case} {name}: shape {tuple(got.shape)}, wanted {want['shape']}"
        if want.get("sampled"):
            path, key = self.folder / want["file"], want["key"]
            got, expected = got.flatten()[_tensor(path, f"{key}.idx").long()], _tensor(path, f"{key}.val")
        else:
            expected = self._resolve(want)
        torch.testing.assert_close(got.to(expected.dtype), expected, atol=tolerance["atol"], rtol=tolerance["rtol"], msg=lambda m: f"{case} {name}: {m}")

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._reference(value)
        if "value" in value:
            return value["value"]
        assert not value.get("sampled"), f"{value['key']} is kept as samples only"
        tensor = _tensor(self.folder / value["file"], value["key"])
        return tensor.float() if tensor.is_floating_point() else tensor

    def _reference(self, text: str) -> Any:
        """`case/name` of another case, with an index or slices: "tokenize/ids[0]", "connectors/ragged/video_features[:1, :32]"."""
        path, _, place = text.partition("[")
        case, _, name = path.rpartition("/")
        entry = self.index[case]
        target = self._resolve((entry["inputs"] | entry["outputs"])[name])
        if not place:
            return target
        places = tuple(_place(part.strip()) for part in place.rstrip("]").split(","))
        return target[places if isinstance(target, torch.Tensor) else places[0]]


def _place(text: str) -> int | slice:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return slice(*(int(end) if end else None for end in text.split(":")))


@functools.lru_cache(maxsize=512)
def _tensor(path: Path, key: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(key)
