"""The command line's own parser: a value that cannot be read is one sentence with what was got and what is wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError


class Parser(argparse.ArgumentParser):
    """Ends wrong arguments in one sentence and code 2; the usage is in --help. Its commands are of this class, too."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        sentence = message.removeprefix("argument ")
        if not sentence.endswith("."):
            sentence += f"; see `{self.prog} --help`."
        print(f"{self.prog}: {sentence}", file=sys.stderr)
        self.exit(2)


def parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` for argparse, which shows the words of its own error type only."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def path_of(text: str) -> Path:
    """A file or folder, for argparse. An empty name, as of a variable that is not set, would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no path; write the name of a file or folder.")
    return Path(text)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number; write it like 8.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number; write it like 0.7.") from None
