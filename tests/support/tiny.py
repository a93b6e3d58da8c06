"""The tiny checkpoint, written once per test run: `tiny_files()` in any test."""

from __future__ import annotations

import tempfile
from functools import lru_cache

from comfyui_ltx25.ltx25.tiny import TinyFiles, write_tiny

_folders: list[tempfile.TemporaryDirectory] = []  # kept until the process ends


@lru_cache
def tiny_files(seed: int = 0) -> TinyFiles:
    """The set of that seed. Tests must not change the files; copy them first."""
    _folders.append(tempfile.TemporaryDirectory(prefix="ltx25-tiny-"))
    return write_tiny(_folders[-1].name, seed)
