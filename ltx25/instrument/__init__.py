"""The instrument: what a run does, how long, and on what."""

from .estimate import Estimate, Forwards, Group
from .header import files_facts, machine, request_facts
from .meter import DeviceMeter
from .record import RunRecord
from .terminal import TextSink
from .watch import Phase, Sink, Tick, Watch

__all__ = [
    "DeviceMeter",
    "Estimate",
    "Forwards",
    "Group",
    "Phase",
    "RunRecord",
    "Sink",
    "TextSink",
    "Tick",
    "Watch",
    "files_facts",
    "machine",
    "request_facts",
]
