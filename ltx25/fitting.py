"""How a phase fits: which way it runs in the memory there is, and what happens when that was not enough after all.

Before anything is loaded, need is held against what could be free; what cannot fit is refused with the numbers and the
setting that would. Out of memory inside of a phase frees what the phase held and goes on in the next smaller way, and says
so; after the last one the error passes, and nothing of the phase stays behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ..kernels.memory import is_out_of_memory
from .device import release
from .errors import InputError
from .instrument import Watch
from .instrument.memory import host_free
from .instrument.units import bytes_text
from .part import Part
from .residency import UNKNOWN, Arbiter

log = logging.getLogger(__name__)
Result = TypeVar("Result")

HOST_LEAST = 1 << 30  # bytes of host memory that staging buffers and the process need while weights are read


@dataclass(frozen=True)
class Way:
    """One way to run a phase. text: what distinguishes it, for people; working: bytes beside the weights."""

    text: str
    working: int
    batched: bool = False


def choose(arbiter: Arbiter, part: Part, ways: Sequence[Way], advice: Callable[[int], str]) -> list[Way]:
    """The `ways` (fastest first) that fit if everything else leaves. advice(bytes short): how it could fit.

    Raises InputError when none does, with the numbers.
    """
    room = arbiter.room(part.device)
    possible = [way for way in ways if part.least + way.working <= room]
    if possible:
        return possible
    least = min(ways, key=lambda way: way.working)
    place = "host" if part.device.type == "cpu" else "device"
    raise InputError(
        f"{part.name} needs {bytes_text(part.least + least.working)} of {place} memory ({bytes_text(part.least)} for weights, "
        f"{bytes_text(least.working)} to work with {least.text}), and {bytes_text(room)} can be had; {advice(part.least + least.working - room)}."
    )


def fit(
    arbiter: Arbiter, part: Part, ways: Sequence[Way], advice: Callable[[int], str], watch: Watch, run: Callable[[Way], Result]
) -> tuple[Result, tuple[str, ...]]:
    """Run in the first way that has memory enough: what `run` returns, and what to tell the user.

    `run(way)` is called with the part loaded; called again after it ran out of memory, it begins anew.
    """
    check_host(part)
    possible = choose(arbiter, part, ways, advice)
    attempts = [(way, nullcontext) for way in possible]
    if part.least < part.wanted:  # whatever the estimates said; again from the fastest, because blocks now take the least room
        attempts += [(replace(way, text=f"{way.text}, all blocks streamed"), part.at_its_least) for way in possible]
    notices: list[str] = []
    for number, (way, held) in enumerate(attempts):
        try:
            with held():
                arbiter.ready([part], way.working, watch)
                return run(way), tuple(notices)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        # Out here the error is gone, and with it the frames that held the failed run's tensors.
        part.forget()
        release(part.device)
        log.warning("%s ran out of memory with %s: %s", part.name, way.text, reason)
        if number + 1 < len(attempts):
            notices.append(f"{part.name} ran out of memory with {way.text}; it went on with {attempts[number + 1][0].text}.")
            watch.note("retry", notices[-1], part=part.name, memory=reason)
    part.unload()
    room = arbiter.room(part.device)
    had = f"{bytes_text(room)} can be had" if room < UNKNOWN else "how much can be had this device does not say"
    raise torch.OutOfMemoryError(f"{part.name} ran out of memory even with {attempts[-1][0].text}; {had}: {advice(0)}.")


def change(part: Part, run: Callable[[], None], what: str, watch: Watch) -> tuple[str, ...]:
    """Change `part` where it is, by a `run` that takes it off the device where it fails: what to tell the user.

    Out of memory inside is no end of the phase: `fit` loads the part again, as `run` was to leave it, in as little room as it takes.
    """
    try:
        run()
        return ()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
    release(part.device)
    log.warning("%s ran out of memory while %s: %s", part.name, what, reason)
    notice = f"{part.name} ran out of memory while {what}; it went on by loading the weights again."
    watch.note("retry", notice, part=part.name, memory=reason)
    return (notice,)


def check_host(part: Part) -> None:
    """Raise InputError where reading a part would take the last of the host's memory."""
    free = host_free()
    if not part.loaded and part.device.type != "cpu" and free is not None and free < HOST_LEAST:
        raise InputError(
            f"Reading {part.name} needs {bytes_text(HOST_LEAST)} of host memory for a while, and {bytes_text(free)} are free; close other programs."
        )
