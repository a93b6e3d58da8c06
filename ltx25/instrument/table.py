"""The phase table: where a run's time went, as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .units import bytes_text, rate_text, seconds_text

HEAD = ("phase", "wall", "share", "device", "busy", "units", "to device", "to host", "peak device", "peak host")


def phase_table(rows: Sequence[Mapping[str, Any]], wall: float | None) -> str:
    """`rows` are closed phases as recorded, `wall` the run's s. Nested phases are indented and not summed again; phases of
    one name (two prompts) share a row.
    """
    rows = _merged(rows)
    top = [row for row in rows if row["parent"] is None]
    total = wall or sum(row["wall"] for row in top)
    cells = [HEAD]
    for row, depth in _nested(rows):
        cells.append(
            (
                "  " * depth + row["name"] + (f" x {row['times']}" if row["times"] > 1 else ""),
                seconds_text(row["wall"]),
                f"{100 * row['wall'] / total:.1f} %" if total else "-",
                seconds_text(row.get("device_span")),
                f"{100 * row['device_busy'] / row['wall']:.0f} %" if row.get("device_busy") is not None and row["wall"] else "-",
                _units(row),
                _moved(row.get("h2d"), row["wall"]),
                _moved(row.get("d2h"), row["wall"]),
                bytes_text(row.get("peak_device")),
                bytes_text(row.get("peak_host")),
            )
        )
    if wall:
        rest = max(0.0, wall - sum(row["wall"] for row in top))
        cells.append(("(between phases)", seconds_text(rest), f"{100 * rest / wall:.1f} %", *[""] * 7))
        cells.append(("run", seconds_text(wall), "100 %", *[""] * 7))
    return aligned(cells, left=(0, 5))


def _merged(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Top-level phases of one name, unit and outcome become one row, unless phases nest in them: "text.tower x 2"."""
    parents = {row["parent"] for row in rows}
    merged: dict[Any, dict[str, Any]] = {}
    for row in rows:
        alone = row["parent"] is not None or row["id"] in parents or row.get("error")
        key = ("alone", row["id"], len(merged)) if alone else (row["name"], row["unit"])
        if key not in merged:
            merged[key] = {**row, "times": 1}
            continue
        total = merged[key]
        total["times"] += 1
        for name in ("wall", "done", "total", "device_span", "device_busy", "h2d", "d2h"):
            known = total.get(name) is not None and row.get(name) is not None
            total[name] = total[name] + row[name] if known else None if name not in ("wall", "done") else total[name]
        for name in ("peak_device", "peak_host"):
            total[name] = max((value for value in (total.get(name), row.get(name)) if value is not None), default=None)
    return list(merged.values())


def _nested(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """In order of opening, children after their parent, with depth."""
    below: dict[Any, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["id"] or 0):
        below.setdefault(row["parent"], []).append(row)

    def walk(parent: Any, depth: int) -> list[tuple[Mapping[str, Any], int]]:
        return [pair for row in below.get(parent, ()) for pair in [(row, depth), *(walk(row["id"], depth + 1) if row["id"] is not None else ())]]

    return walk(None, 0)


def _units(row: Mapping[str, Any]) -> str:
    if not row["unit"]:
        return ""
    if row["unit"] == "byte":
        rate = row["done"] / row["wall"] if row["wall"] and row["done"] else None
        return f"{bytes_text(row['done'])} at {rate_text(rate)}" if rate else bytes_text(row["done"])
    total = f"/{row['total']}" if row["total"] is not None and row["total"] != row["done"] else ""
    plural = "" if row["done"] == 1 and not total else "s"
    failed = " (stopped)" if row.get("error") else ""
    return f"{row['done']}{total} {row['unit']}{plural}{failed}"


def _moved(n: int | None, wall: float) -> str:
    return "-" if n is None else f"{bytes_text(n)}" + (f" at {rate_text(n / wall)}" if n > 1 << 20 and wall > 0 else "")


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Rows of equal length, the first being the head, in columns; columns in `left` are flush left, the others right.

    Columns that say nothing ("-" or blank in every row below the head) are left out.
    """
    used = [column for column in range(len(rows[0])) if any(row[column] not in ("", "-") for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = []
    for row in rows:
        parts = [row[c].ljust(widths[c]) if c in left else row[c].rjust(widths[c]) for c in used]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
