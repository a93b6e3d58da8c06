"""Read a metadata block strictly: every key is taken, required to have one value, or named as inert. The rest is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FileError

_MISSING = object()


class Keys:
    """One JSON object of a file's metadata. `where` names it in errors, e.g. "x.safetensors: config.transformer"."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise FileError(f"{where} is not a JSON object but {type(values).__name__}; download the file again.")
        self._left = dict(values)
        self.where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of `name`. `default` is what the official code takes when published files leave the key out."""
        value = self._left.pop(name, default)
        if value is _MISSING:
            raise FileError(f"{self.where} has no key '{name}'; the file is not an LTX-2.5 one or lost part of its metadata.")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise FileError(f"{self.where}.{name} is {value!r}, wanted {' or '.join(k.__name__ for k in kinds)}.")
        return value

    def require(self, name: str, wanted: Any, default: Any = _MISSING) -> None:
        """Refuse any value but `wanted`: other values are features this engine does not implement."""
        value = self._left.pop(name, default)
        if value is _MISSING or value != wanted or type(value) is bool and type(wanted) is not bool:
            got = "missing" if value is _MISSING else repr(value)
            raise FileError(f"{self.where}.{name} is {got}, and only {wanted!r} is supported.")

    def block(self, name: str) -> Keys:
        """A nested object, to be read (and `done`) on its own."""
        return Keys(self.take(name, dict), f"{self.where}.{name}")

    def has(self, name: str) -> bool:
        return name in self._left

    def inert(self, names: Sequence[str]) -> None:
        """Keys the official code never reads: any value is allowed."""
        for name in names:
            self._left.pop(name, None)

    def done(self) -> None:
        """Refuse what is left over: an unknown key may change what the weights mean."""
        if self._left:
            names = ", ".join(sorted(self._left))
            raise FileError(f"{self.where} has keys this version does not know: {names}; update the pack or use an LTX-2.5 file.")
