"""Benchmarks whose cases are tests: run as a program, such a file would define them and end without a word."""

import sys
from pathlib import Path
from typing import NoReturn


def refuse(file: str) -> NoReturn:
    """Say in one line how `file` is run and end the process with code 2, as for wrong arguments."""
    print(f"the cases of this benchmark are run by pytest: pytest -s tests/bench/{Path(file).name}", file=sys.stderr)
    sys.exit(2)
