"""Where what is worth keeping between processes lies: choices made by timing, encoded prompts, the tiny checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """LTX25_CACHE, else `ltx25` in the user's cache folder: LOCALAPPDATA on Windows, elsewhere XDG_CACHE_HOME; ~/.cache without it."""
    own = os.environ.get("LTX25_CACHE")
    if own:
        return Path(own)
    home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return Path(home or os.path.expanduser("~/.cache"), "ltx25")
