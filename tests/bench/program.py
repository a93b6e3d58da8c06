"""Benchmarks as programs: wrong arguments, files and machines are one sentence and code 2, as the command line says them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from comfyui_ltx25.ltx25.errors import InputError, LTX25Error


def program(main: Callable[[], None]) -> None:
    """Run the benchmark `main`."""
    try:
        main()
    except LTX25Error as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def need_card() -> None:
    """Raise InputError on a machine without a CUDA device. Call it once the arguments are read: --help needs no card."""
    if not torch.cuda.is_available():
        raise InputError("this benchmark measures a CUDA device, and torch finds none; run it on a machine with a card and a torch built for it.")
