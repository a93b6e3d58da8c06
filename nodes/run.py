"""One node's part of a run: what watches it, and the run record that all nodes of a prompt write together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ..ltx25.engine import Engine
from ..ltx25.instrument import DeviceMeter, RunRecord, Watch, files_facts, machine
from ..ltx25.instrument.forecast import forecaster
from .progress import NodeSink

log = logging.getLogger(__name__)


class NodeRun:
    """`watch` goes to the engine; `record` is the prompt's; `tell` shows the user what the engine noticed."""

    def __init__(self, watch: Watch, sink: NodeSink, record: RunRecord) -> None:
        self.watch, self.sink, self.record = watch, sink, record
        self.notices: list[str] = []

    def tell(self, notices: Sequence[str]) -> None:
        for notice in notices:
            log.warning("%s", notice)
            self.record.note("warning", text=notice)
        self.notices += notices


@contextlib.contextmanager
def node_run(engine: Engine, bar: str, previews: bool = False, idle: str = "") -> Iterator[NodeRun]:
    """The part of a run that the executing node does. `bar` names the phase its progress bar counts; `idle` is its last word when no phase ran."""
    sink = NodeSink(bar, previews)
    record = RECORDS.of_this_prompt(engine)
    engine.forecast = forecaster(runs_folder(), engine.device)
    watch = Watch([sink, record], DeviceMeter(engine.device))
    run = NodeRun(watch, sink, record)
    with record:
        try:
            yield run
        finally:
            watch.finish()
    sink.finish(run.notices, idle)


@contextlib.contextmanager
def node_watch(bar: str, idle: str) -> Iterator[Watch]:
    """What shows and cancels an executing node that is no part of a run: it has no record. bar, idle: as of `node_run`."""
    sink = NodeSink(bar, previews=False)
    yield Watch([sink])
    sink.finish((), idle)


def failures_recorded(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """`node`, whose failures outside of `node_run` end the prompt's record too: a guider runs no phase and may refuse its inputs."""
    execute = node.execute.__func__
    if inspect.iscoroutinefunction(execute):  # the host runs these before all others: nothing of the prompt is recorded yet
        return node

    @functools.wraps(execute)
    def recorded(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> io.NodeOutput:
        try:
            return execute(cls, *args, **inputs)
        except Exception as error:
            RECORDS.failed(node.__name__, error)
            raise

    node.execute = classmethod(recorded)
    return node


class _Records:
    """The record of the prompt that runs now; one is kept, because the host runs one prompt at a time."""

    def __init__(self) -> None:
        self._last: tuple[str, RunRecord] | None = None

    def of_this_prompt(self, engine: Engine) -> RunRecord:
        prompt = prompt_id()
        if self._last is None or self._last[0] != prompt:
            facts = {**machine(engine.device), "files": files_facts(engine.headers), "options": vars(engine.options)}
            self._last = (prompt, RunRecord(runs_folder(), facts, record_prompts=os.environ.get("LTX25_RECORD_PROMPTS") == "1"))
        return self._last[1]

    def path_of(self, prompt: str) -> Path | None:
        """The record of a prompt, if it was the last that had one."""
        return self._last[1].path if self._last is not None and self._last[0] == prompt else None

    def failed(self, node: str, error: Exception) -> None:
        """Nothing to do where no part of this prompt was recorded, or the part that failed has said so itself."""
        if self._last is not None and self._last[0] == prompt_id() and self._last[1].status == "done":
            self._last[1].fail(node, error)


def prompt_id() -> str:
    context = get_executing_context()
    return context.prompt_id if context is not None else ""


RECORDS = _Records()


def runs_folder() -> Path:
    """Where run records go: LTX25_RUNS, else ltx25_runs in the host's output folder."""
    return Path(os.path.expanduser(os.environ.get("LTX25_RUNS") or "") or Path(folder_paths.get_output_directory()) / "ltx25_runs")
