"""Where what is worth keeping between processes lies: choices made by timing, encoded prompts, the tiny checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """LTX25_CACHE, else `ltx25` in the user's cache folder: LOCALAPPDATA on Windows, elsewhere XDG_CACHE_HOME; ~/.cache without it."""
    home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    folder = os.environ.get("LTX25_CACHE") or Path(home or "~/.cache", "ltx25")
    return Path(os.path.expanduser(folder))  # ~ is the home folder: not all that sets a variable expands it
