"""The LTX25_* environment variables, and what the ones that choose may say.

A misspelt one would do nothing, and be taken for one that does not help: it is refused before anything runs, on every device.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os

from ..kernels.attention import ORDER
from .errors import InputError

log = logging.getLogger(__name__)

CHOICES: dict[str, tuple[str, ...]] = {
    "LTX25_ATTENTION": ORDER,
    "LTX25_KERNELS": ("triton", "reference"),
    "LTX25_GRAPHS": ("on", "off"),
    "LTX25_RECORD_PROMPTS": ("0", "1"),
}
OTHERS = ("LTX25_RUNS", "LTX25_CACHE", "LTX25_CACHE_GB")  # folders and sizes, judged where they are used
ALIKE = 0.85  # how close a name must come to one of ours to be taken for a misspelt one: others may use the prefix, too


def tell_unused(device_type: str) -> None:
    """Say once in the log that a switch does nothing on such a device."""
    forced = os.environ.get("LTX25_ATTENTION", "")
    if forced and device_type != "cuda":
        _say_once(f"LTX25_ATTENTION={forced} does nothing on this device ({device_type}): back ends of attention are chosen on CUDA devices alone.")


@functools.cache
def _say_once(sentence: str) -> None:
    log.warning("%s", sentence)


def check_switches() -> None:
    """Raise InputError for a value that is no choice, and for a name that is almost one of ours. Empty means not set."""
    for name, choices in CHOICES.items():
        got = os.environ.get(name, "")
        if got and got not in choices:
            raise InputError(f"{name} is '{got}', wanted {', '.join(choices[:-1])} or {choices[-1]}; correct it, or unset it.")
    known = (*CHOICES, *OTHERS)
    for name in sorted(os.environ):
        if name.startswith("LTX25_") and name not in known:
            meant = difflib.get_close_matches(name, known, 1, ALIKE)
            if meant:
                raise InputError(f"{name} is read by nothing; the variable is called {meant[0]}.")
