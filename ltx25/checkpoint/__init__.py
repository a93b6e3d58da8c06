"""Checkpoint files: header first, then strict and complete loading into modules built on meta."""

from .fill import check, check_beside, decode, expected, fill, held_bytes, stored_parameters
from .header import Header, TensorInfo, read_header
from .identify import Kind, identify, require_kind
from .open import interpret, open_file
from .read import read_bytes, read_tensors
from .write import write_file

__all__ = [
    "Header",
    "Kind",
    "TensorInfo",
    "check",
    "check_beside",
    "decode",
    "expected",
    "fill",
    "held_bytes",
    "identify",
    "interpret",
    "open_file",
    "read_bytes",
    "read_header",
    "read_tensors",
    "require_kind",
    "stored_parameters",
    "write_file",
]
