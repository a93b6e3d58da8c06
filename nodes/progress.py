"""A run's phases on the node that runs them: bar, text line, preview picture, and the host's cancel.

The bar counts one phase, the node's own work (forwards, layers, chunks); everything else, loading first, is told in the
text while the bar stands still, so that its values only rise and the last one is the total.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import comfy.latent_formats
import comfy.model_management as mm
import latent_preview
import torch
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..ltx25.instrument import Phase, Sink
from ..ltx25.instrument.units import seconds_text
from ..ltx25.instrument.watch import why_silent

MESSAGE_GAP = 0.05  # s; each message is sent whole to every client by the server's one loop


class NodeSink(Sink):
    """Shows one node's run. Made in the node's thread, which is also the only one that looks for a cancel."""

    def __init__(self, bar: str, previews: bool) -> None:
        """`bar` names the phase that the node's bar counts; `previews`: show pictures when the host wants them."""
        context = get_executing_context()
        self._node = context.node_id if context is not None else None
        self._thread = threading.get_ident()
        self._bar = bar
        self._done, self._total = 0, 1
        self._sent = -1.0
        self._seconds: dict[tuple[str, ...], float] = {}  # by the names of a phase and those around it, outermost first
        self._previewer = latent_preview.get_previewer(torch.device("cpu"), comfy.latent_formats.LTXAV()) if previews else None
        self.wants_preview = self._previewer is not None
        self._send("starting")

    def check(self) -> None:
        if threading.get_ident() == self._thread:  # asking clears the host's flag: elsewhere the cancel would be lost
            mm.throw_exception_if_processing_interrupted()

    def opened(self, phase: Phase) -> None:
        self._count(phase)
        self._send(_line(phase))

    def ticked(self, phase: Phase) -> None:
        self._count(phase)
        last = phase.total is not None and phase.done >= phase.total
        if last or time.monotonic() - self._sent >= MESSAGE_GAP:
            self._send(_line(phase))

    def closed(self, phase: Phase) -> None:
        self._count(phase)
        path = _path(phase)
        self._seconds[path] = self._seconds.get(path, 0.0) + phase.elapsed
        if phase.error is None:
            self._send(_line(phase))

    def beat(self, phase: Phase) -> None:
        line = _line(phase)
        at = "" if line == phase.name else f"{line} - "
        self._send(f"{at}{phase.name} has run for {seconds_text(phase.elapsed, rough=True)}{why_silent()}")

    def preview(self, latent: torch.Tensor) -> None:
        """A picture of the middle of the clip: a first frame that was given would never change."""
        frame = latent[len(latent) // 2].float().cpu().permute(2, 0, 1)  # (channels, h, w)
        self._send(None, self._previewer.decode_latent_to_preview_image("JPEG", frame[None, :, None]))

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) of the bar."""
        return self._done, self._total

    def finish(self, notices: Sequence[str], idle: str) -> None:
        """The bar ends full, also when there was nothing to do; the text becomes notices and seconds per phase, or `idle`."""
        self._done = self._total
        self._send("\n".join([*notices, *filter(None, [self._spent(()) or idle])]) or "done")

    def _spent(self, path: tuple[str, ...]) -> str:
        """Seconds per phase directly inside `path`; those inside these, which they include, in brackets."""
        inside = {one: seconds for one, seconds in self._seconds.items() if one[:-1] == path}
        parts = {one: self._spent(one) for one in inside}
        return " - ".join(f"{one[-1]} {seconds_text(seconds)}" + (f" ({parts[one]})" if parts[one] else "") for one, seconds in inside.items())

    def _count(self, phase: Phase) -> None:
        if phase.name == self._bar and phase.total:
            self._total = phase.total
            self._done = min(phase.done, phase.total)

    def _send(self, text: str | None, picture: Any = None) -> None:
        self._sent = time.monotonic()
        if self._node is None:
            return
        # Not comfy.utils.ProgressBar: it drops what comes within 0.1 s or 0.5 % of the last update.
        get_progress_state().update_progress(self._node, self._done, self._total, picture)
        if text is not None:
            server = PromptServer.instance
            server.send_progress_text(text, self._node, server.client_id)


def _path(phase: Phase) -> tuple[str, ...]:
    return (*(() if phase.parent is None else _path(phase.parent)), phase.name)


def _line(phase: Phase) -> str:
    if phase.text:
        return f"{phase.name} {phase.text}"
    if phase.total is None:
        return phase.name
    return f"{phase.name} {phase.done}/{phase.total} {phase.unit}"
