"""What a run record says before the first phase: machine, software, files, and what was asked for."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Header
from .memory import device_total, host_now, is_unified, query

PACK = Path(__file__).resolve().parents[2]
FORMAT = 1  # of the records; readers refuse what is newer
_AT_RUNS: list[int] = []  # bytes of this process as each of its runs began, the least so far alone


def machine(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions. Values this platform cannot give are None."""
    cuda = device.type == "cuda"
    properties = query(lambda: torch.cuda.get_device_properties(device)) if cuda else None
    return {
        "device": device_name(device),
        "device_type": device.type,
        "device_memory": device_total(device),
        "device_unified": is_unified(device),
        "capability": query(lambda: f"{properties.major}.{properties.minor}") if properties else None,
        "processors": query(lambda: properties.multi_processor_count) if properties else None,
        "driver": query(_nvidia_driver) if cuda else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": query(torch.backends.cudnn.version) if cuda else None,
        "torch": torch.__version__,
        "triton": query(lambda: metadata.version("triton")),
        "python": platform.python_version(),
        "system": platform.platform(),
        "pack": query(pack_version),
        "revision": query(revision),
        "process": process_memory(),
    }


def process_memory() -> dict[str, int | None]:
    """Resident bytes of this process before it rendered, and now. A run's own memory is what it adds to them.

    The former are those at its first run, or at a later one that found less: what stood there the first time was given back since.
    """
    now = host_now()
    if now is not None:
        _AT_RUNS[:] = [min([now, *_AT_RUNS])]
    return {"first": _AT_RUNS[0] if _AT_RUNS else None, "now": now}


def files_facts(headers: Mapping[str, Header]) -> dict[str, Any]:
    """Slot -> name, size (bytes) and sha256 of the header: tells two files apart without reading 40 GB."""
    return {slot: {"name": header.name, "bytes": header.size, "header": header.digest} for slot, header in headers.items()}


def prompts_facts(prompts: Mapping[str, str], keep: bool) -> dict[str, Any]:
    """Length of each prompt in characters; its words only with `keep`."""
    return {name: {"characters": len(text), **({"text": text} if keep else {})} for name, text in prompts.items()}


def request_facts(
    *,
    width: int,
    height: int,
    frames: int,
    frame_rate: float,
    batch: int,
    tokens: Mapping[str, int],
    steps: int,
    legs: Sequence[str],
    forwards: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What was asked for: px, frames, frames/s; tokens per stream ("video", "audio", "text"); `forwards` is the
    structural count, one per leg and step. `settings` are all other inputs, without prompts."""
    return {
        "geometry": {"width": width, "height": height, "frames": frames, "frame_rate": frame_rate, "batch": batch},
        "tokens": dict(tokens),
        "steps": steps,
        "legs": list(legs),
        "forwards": forwards,
        "settings": dict(settings),
    }


def device_name(device: torch.device) -> str:
    """The card's own name; for a CPU its model and core count: what records are compared by."""
    if device.type == "cuda":
        return query(lambda: torch.cuda.get_device_name(device)) or "cuda"
    if device.type == "cpu":
        return f"{query(_cpu_model) or platform.machine() or 'cpu'}, {torch.get_num_threads()} threads"
    return device.type


def pack_version() -> str:
    text = (PACK / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^version\s*=\s*"([^"]+)"', text, re.MULTILINE).group(1)


def revision() -> str:
    """The checkout's commit, read from .git without running git."""
    git = PACK / ".git"
    if git.is_file():  # a worktree or submodule keeps a pointer here
        git = (PACK / git.read_text().split(":", 1)[1].strip()).resolve()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head[5:]
    for folder in (git, _common(git)):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    packed = (_common(git) / "packed-refs").read_text()
    return next(line.split()[0] for line in packed.splitlines() if line.endswith(" " + name))


def _common(git: Path) -> Path:
    pointer = git / "commondir"
    return (git / pointer.read_text().strip()).resolve() if pointer.is_file() else git


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    return re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE).group(1).strip()


def _nvidia_driver() -> str:
    text = Path("/proc/driver/nvidia/version").read_text()
    return re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text).group(1)
