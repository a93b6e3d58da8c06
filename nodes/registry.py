"""Which engines exist: one per set of files and options, shared by every handle to it.

Those that the last prompt opened are held strongly, so that a host which forgets node outputs between prompts (--cache-none)
does not read the files again. A prompt that opened others, or whose files changed, ends that when its first phase begins: the
host runs loaders before all else. The host taking an engine's last weights off the device (/free, "unload models") ends it at
once. All others live as long as a handle does. Encoded prompts are shared by all engines, and go with the last of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import comfy.model_management as mm
from comfy_execution.utils import get_executing_context

from ..ltx25.engine import Engine, Files, Options
from ..ltx25.prompt_cache import PromptMemory
from .patcher import HostArbiter, PartPatcher

HELD = 4  # engines at most: their weights are the host's to take, but what is parked of them in host memory is not


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
        self._held: dict[tuple, EngineHandle] = {}  # opened by the prompt `_prompt`, the latest last
        self._before: dict[tuple, EngineHandle] = {}  # by those before it, since a phase began
        self._prompt: str | None = None
        self._leaving: list[HostArbiter] = []
        self._encoded: Callable[[], PromptMemory | None] = lambda: None

    def open(self, files: Files, options: Options) -> EngineHandle:
        """The engine of these files as they are now; headers are read, weights are not. Raises FileError, InputError."""
        self._leaving.clear()
        context = get_executing_context()
        if context is None or context.prompt_id != self._prompt:
            self._prompt = None if context is None else context.prompt_id
            self._before, self._held = _latest({**self._before, **self._held}), {}
        key = (tuple(stamp(path) for path in astuple(files)), options)
        handle = self._known.get(key)
        if handle is None:
            encoded = self._encoded()
            encoded = PromptMemory() if encoded is None else encoded
            engine = Engine.open(files, options, mm.get_torch_device(), encoded)
            self._encoded = weakref.ref(encoded)
            engine.arbiter = HostArbiter(engine.parts, self._freed(key, engine), self._before_phase)
            handle = self._known[key] = EngineHandle(engine, engine.arbiter)
        self._held.pop(key, None)
        self._held = _latest({**self._held, key: handle})
        return handle

    def _before_phase(self) -> None:
        self._before = {}

    def _freed(self, key: tuple, engine: Engine) -> Callable[[], None]:
        engine_ref = weakref.ref(engine)

        def freed() -> None:
            if (engine := engine_ref()) is None:
                return
            engine.detach()
            # The host is walking its list of models right now and looks at each patcher once more after this call: they
            # stay, empty, until the next engine is opened.
            self._leaving.append(engine.arbiter)
            self._held.pop(key, None)
            self._before.pop(key, None)

        return freed


REGISTRY = Registry()


def _latest(handles: dict[tuple, EngineHandle]) -> dict[tuple, EngineHandle]:
    return dict(list(handles.items())[-HELD:])


def stamp(path: Path | str) -> tuple[str, int, int]:
    """What changes when a file does: its name, time of last change (ns) and size (bytes); zeros when there is none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return str(path), 0, 0
    return str(path), stat.st_mtime_ns, stat.st_size
