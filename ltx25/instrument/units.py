"""Seconds, bytes, rates and paths as people read them."""

from __future__ import annotations

import os
from pathlib import Path


def seconds_text(seconds: float | None, rough: bool = False) -> str:
    """0.0021 -> "2.1 ms", 0.21 -> "0.21 s", 75 -> "1 min 15 s". `rough` drops what an estimate cannot know (5.67 -> "6 s")."""
    if seconds is None:
        return "-"
    if rough:
        seconds = round(seconds) if seconds >= 1 else max(0.1, round(seconds, 1))
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60} min"
    if seconds >= 59.95:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60} s"
    if rough:
        return f"{seconds:g} s"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms"


def between_text(least: float, most: float) -> str:
    """Two durations an estimate lies between, as roughly as it knows them."""
    return f"{seconds_text(least, rough=True)} to {seconds_text(most, rough=True)}"


def bytes_text(n: float | None) -> str:
    """Binary units for sizes: 1536 -> "1.5 KiB"."""
    if n is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def rate_text(bytes_per_second: float | None) -> str:
    """Decimal units for rates, as links are sold: 3.2e9 -> "3.2 GB/s"."""
    if bytes_per_second is None:
        return "-"
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"


def path_text(path: Path | None) -> str:
    """A path as metadata and messages can hold it; "" for None. A file system takes names that are no text in any encoding:
    what of one is none becomes the replacement character.
    """
    return "" if path is None else os.fsencode(path).decode("utf-8", "replace")


def counted(number: int, thing: str) -> str:
    """1, "frame" -> "1 frame"; 9, "frame" -> "9 frames"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
