"""The command `ltx25`: renders without a host, the tiny checkpoint, and what past runs say.

Every command is a module with `add_parser(subparsers)`, which sets `run`: parsed arguments -> exit code. Wrong input ends
in one sentence and code 2, memory that ran out in one and code 1, Ctrl-C in code 130, a reader that closed the pipe in 141.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Sequence

from ...kernels.memory import is_out_of_memory
from ..errors import LTX25Error
from ..switches import check_switches
from . import decode, plan, render, runs, tiny
from .arguments import Parser

COMMANDS = (render, decode, plan, runs, tiny)
CLOSED = 141  # what a shell says of a program that wrote to a closed pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` default to the process's own."""
    _print_any_name()
    parsed = parser().parse_args(arguments)
    try:
        code = _run(parsed)
        sys.stdout.flush()  # here, not as the process ends: what is lost then cannot be caught
        return code
    except BrokenPipeError:
        _drop_unread()
        return CLOSED


def _print_any_name() -> None:
    """Names of files go out as the bytes they are in the file system, which may be no text: printing one must not end a render."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def _run(parsed: argparse.Namespace) -> int:
    try:
        check_switches()
        return parsed.run(parsed)
    except LTX25Error as error:
        print(f"ltx25 {parsed.command}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"ltx25 {parsed.command}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ltx25 {parsed.command}: cancelled", file=sys.stderr)
        return 130


def _drop_unread() -> None:
    """The reader of what is printed went away (`| head -1`): what still waits to be printed goes nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def parser() -> argparse.ArgumentParser:
    whole = Parser(prog="ltx25", description="LTX-2.5: video with sound from text.")
    subparsers = whole.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return whole
