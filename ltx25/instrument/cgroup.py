"""Memory that the control groups of a process leave it. A container has less than its machine, and the kernel kills who takes more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Version:
    """Names of the files in a group's folder, and of the line of memory.stat that tells which pages can go at once."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def group_free(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Bytes until the tightest limit of the groups this process is in, file pages that can go counted as free; None: no limit.

    mount: where the groups' folders are; own: the file that names the process's groups. Version 1 and 2 of control groups.
    """
    rooms = [room for folder, version in _groups(mount, own) if (room := _room(folder, version)) is not None]
    return min(rooms, default=None)


def _groups(mount: Path, own: Path) -> Iterator[tuple[Path, _Version]]:
    """Folders of this process's groups and of those around them. A container's mount may begin at its own group."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (_V1, mount / "memory") if controllers else (_V2, mount)
        folder = root / path.strip("/")
        yield from ((around, version) for around in (folder, *folder.parents) if around == root or root in around.parents)


def _room(folder: Path, version: _Version) -> int | None:
    try:
        limit, used = int((folder / version.limit).read_text()), int((folder / version.usage).read_text())
    except (OSError, ValueError):  # no such group here, or "max", or one that tells nothing
        return None
    return max(0, limit - used + _reclaimable(folder, version.reclaimable))


def _reclaimable(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
