"""Which engines exist: one per set of files and options, shared by every handle to it.

The engine that has weights loaded is held strongly, so that a host which forgets node outputs between prompts
(--cache-none) does not read the files again. At most one is: another one, a file that changed, or the host taking the
last weights off the device (/free, "unload models") ends that. All others live as long as a handle does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import comfy.model_management as mm

from ..ltx25.engine import Engine, Files, Options
from .patcher import HostArbiter, PartPatcher


class EngineHandle:
    """The value of an LTX25_ENGINE link. `patcher` tells the host's caches that a model hangs on it.

    base: the handle this one was made from, which the registry must find as long as this one is used.
    """

    def __init__(self, engine: Engine, arbiter: HostArbiter, base: EngineHandle | None = None) -> None:
        self.engine = engine
        self.arbiter = arbiter
        self.base = base

    @property
    def patcher(self) -> PartPatcher:
        return self.arbiter.patchers["transformer"]


class Registry:
    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple, EngineHandle] = weakref.WeakValueDictionary()
        self._held: tuple[tuple, EngineHandle] | None = None
        self._leaving: HostArbiter | None = None

    def open(self, files: Files, options: Options) -> EngineHandle:
        """The engine of these files as they are now; headers are read, weights are not. Raises FileError, InputError."""
        self._leaving = None
        key = (tuple(stamp(path) for path in astuple(files)), options)
        if self._held is not None and self._held[0] != key:
            self._held = None
        handle = self._known.get(key)
        if handle is None:
            engine = Engine.open(files, options, mm.get_torch_device())
            engine.arbiter = HostArbiter(engine.parts, self._freed(key, engine))
            handle = self._known[key] = EngineHandle(engine, engine.arbiter)
        self._held = (key, handle)
        return handle

    def _freed(self, key: tuple, engine: Engine) -> Callable[[], None]:
        engine_ref = weakref.ref(engine)

        def freed() -> None:
            if (engine := engine_ref()) is None:
                return
            engine.detach()
            # The host is walking its list of models right now and looks at each patcher once more after this call: they
            # stay, empty, until the next engine is opened.
            self._leaving = engine.arbiter
            if self._held is not None and self._held[0] == key:
                self._held = None

        return freed


REGISTRY = Registry()


def stamp(path: Path | str) -> tuple[str, int, int]:
    """What changes when a file does: its name, time of last change (ns) and size (bytes); zeros when there is none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return str(path), 0, 0
    return str(path), stat.st_mtime_ns, stat.st_size
