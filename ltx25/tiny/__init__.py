"""The tiny checkpoint: every file of LTX-2.5 with the published names, metadata and dtypes, and a few MB of random weights."""

from .metadata import DIT_BLOCKS
from .write import TinyFiles, ready, write_tiny

__all__ = ["DIT_BLOCKS", "TinyFiles", "ready", "write_tiny"]
