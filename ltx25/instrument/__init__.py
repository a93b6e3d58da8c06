"""The instrument: what a run does, how long, and on what."""

from .watch import Phase, Sink, Watch

__all__ = ["Phase", "Sink", "Watch"]
