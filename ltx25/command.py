"""The console command: what comes before `cli.main` can do anything is reading libraries, for seconds."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `ltx25`; Ctrl-C is code 130 from the first moment."""
    try:
        from .cli import main as run  # reads torch and what the engine needs
    except KeyboardInterrupt:
        sys.stderr.write("ltx25: cancelled\n")
        return 130
    return run()
