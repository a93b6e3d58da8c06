"""The instrument: what a run does, how long, and on what."""

from .estimate import Estimate, Forwards, Group
from .watch import Phase, Sink, Watch

__all__ = ["Estimate", "Forwards", "Group", "Phase", "Sink", "Watch"]
