"""One run as a picture: phases and forwards along the time, how busy the device was, and memory below.

Readable at 1280 px; a plain RGB image, so that a node can hand it on and a file can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .history import Run
from .report import clip_text
from .units import bytes_text, counted, seconds_text

WIDTH = 1280  # px
MARGIN = 24
LEFT = 132  # where the time axis begins: lane names stand before it
LANE = 34
MEMORY = 150
TEXT = 15  # px, the smallest text that survives a browser's scaling
PAPER, INK, FAINT, GRID = (255, 255, 255), (28, 30, 34), (112, 118, 128), (226, 229, 233)
BUSY, IDLE = (38, 120, 84), (206, 226, 216)
DEVICE_LINE, HOST_LINE = (178, 62, 38), (52, 92, 158)
COLOURS = (
    ("load", (126, 140, 158)),
    ("text", (74, 148, 118)),
    ("sample", (222, 148, 60)),
    ("decode.video", (112, 96, 176)),
    ("decode.audio", (176, 96, 148)),
    ("encode", (96, 128, 176)),
    ("mux", (140, 112, 88)),
)
OTHER = (160, 160, 160)
STOPPED = (196, 40, 40)


def plot_run(run: Run, width: int = WIDTH) -> Image.Image:
    """The picture of `run`, `width` px wide and as tall as it needs (at least 1024 px wide to stay readable)."""
    width = max(1024, width)
    clock = _Clock(run)
    lanes = _lanes(run)
    table = _legend(run, clock)
    head = MARGIN + 3 * (TEXT + 7)
    height = head + LANE * (len(lanes) + 2) + 30 + MEMORY + 60 + (TEXT + 8) * math.ceil(len(table) / 2) + MARGIN
    page = _Page(Image.new("RGB", (width, height), PAPER), clock)
    _title(page, run)
    y = head
    for name, rows in lanes:
        page.lane(y, name)
        for row in rows:
            page.bar(y, row["start"], row["start"] + row["wall"], _colour(row["name"]), row["name"], stopped=bool(row["error"]))
        y += LANE
    page.lane(y, "forwards")
    for number, forward in enumerate(run.forwards):
        shade = _colour("sample") if number % 2 == 0 else _lighter(_colour("sample"), 0.35)
        page.bar(y, forward["t"] - forward["seconds"], forward["t"], shade, str(forward.get("step", "")))
    y += LANE
    page.lane(y, "device busy")
    _device(page, run, y)
    y += LANE
    page.axis(y)
    y += 30
    _memory(page, run, y)
    y += MEMORY + 36
    for number, (colour, text) in enumerate(table):
        column, row = number % 2, number // 2
        x = MARGIN + column * (width - 2 * MARGIN) // 2
        page.swatch(x, y + row * (TEXT + 8), colour, text)
    return page.image


class _Clock:
    """Seconds of the record -> seconds of the picture: the time between a run's parts (other nodes) is cut out."""

    def __init__(self, run: Run) -> None:
        self._cuts: list[tuple[float, float]] = []
        ended: float | None = None
        for event in run.events:
            if event["event"] == "end":
                ended = event.get("t")
            elif event["event"] == "resume" and ended is not None:
                self._cuts.append((ended, event["t"]))
        last = max((event.get("t") or 0.0 for event in run.events), default=0.0)
        self.total = max(self(last), 1e-3)

    def __call__(self, t: float) -> float:
        return t - sum(min(max(t - begin, 0.0), end - begin) for begin, end in self._cuts)


@dataclass
class _Page:
    image: Image.Image
    clock: _Clock

    def __post_init__(self) -> None:
        self.draw = ImageDraw.Draw(self.image)
        self.font, self.small = _font(TEXT), _font(TEXT - 2)
        self.right = self.image.width - MARGIN

    def x(self, t: float) -> float:
        return LEFT + (self.right - LEFT) * min(max(self.clock(t) / self.clock.total, 0.0), 1.0)

    def text(self, x: float, y: float, text: str, colour: tuple[int, int, int] = INK, anchor: str = "la", small: bool = False) -> None:
        self.draw.text((x, y), text, fill=colour, font=self.small if small else self.font, anchor=anchor)

    def lane(self, y: int, name: str) -> None:
        self.text(LEFT - 10, y + LANE / 2, name, FAINT, anchor="rm")
        self.draw.line((LEFT, y + LANE - 1, self.right, y + LANE - 1), fill=GRID)

    def bar(self, y: int, begin: float, end: float, colour: tuple[int, int, int], label: str, stopped: bool = False) -> None:
        a, b = self.x(begin), max(self.x(end), self.x(begin) + 1)
        box = (a, y + 4, b, y + LANE - 5)
        self.draw.rectangle(box, fill=colour, outline=PAPER if b - a > 4 else None)
        if stopped:
            self.draw.line((b, y + 2, b, y + LANE - 3), fill=STOPPED, width=3)
        if self.draw.textlength(label, font=self.small) < b - a - 8:
            self.text((a + b) / 2, y + LANE / 2, label, PAPER, anchor="mm", small=True)

    def axis(self, y: int) -> None:
        step = _nice(self.clock.total / 8)
        for n in range(int(self.clock.total / step + 1e-9) + 1):
            x = LEFT + (self.right - LEFT) * n * step / self.clock.total
            self.draw.line((x, y - 2, x, y + 4), fill=FAINT)
            self.text(x, y + 6, _tick(n * step), FAINT, anchor="ma", small=True)

    def swatch(self, x: float, y: float, colour: tuple[int, int, int], text: str) -> None:
        self.draw.rectangle((x, y + 1, x + 14, y + 15), fill=colour)
        self.text(x + 22, y, text)


def _title(page: _Page, run: Run) -> None:
    header = run.header
    size = clip_text(run)
    stopped = f", stopped in {run.where}" if run.status != "done" else ""
    steps = next((event["facts"].get("steps") for event in run.of("phase") if event.get("name") == "sample" and event.get("facts")), None)
    size += f", {counted(steps, 'step')}" if steps else ""
    page.text(MARGIN, MARGIN - 6, f"{run.status} in {seconds_text(run.wall)}{stopped}", INK if run.status == "done" else STOPPED)
    page.text(MARGIN, MARGIN + TEXT + 1, ", ".join(part for part in (size, str(header.get("device", ""))) if part))
    page.text(MARGIN, MARGIN + 2 * TEXT + 8, f"{run.name}, pack {header.get('pack') or '-'}, torch {header.get('torch') or '-'}", FAINT)


def _lanes(run: Run) -> list[tuple[str, list[dict[str, Any]]]]:
    """Phases by depth of nesting."""
    by_id = {row["id"]: row for row in run.phases if row["id"] is not None}
    lanes: list[list[dict[str, Any]]] = []
    for row in sorted(run.phases, key=lambda row: row["start"]):
        depth, parent = 0, by_id.get(row["parent"])
        while parent is not None:
            depth, parent = depth + 1, by_id.get(parent["parent"])
        while len(lanes) <= depth:
            lanes.append([])
        lanes[depth].append(row)
    return [("phases" if depth == 0 else "inside them", rows) for depth, rows in enumerate(lanes)] or [("phases", [])]


def _device(page: _Page, run: Run, y: int) -> None:
    """Dark: the share a trace found busy. Pale: the span between events, where no trace was taken."""
    stretches = [
        (row["start"], row["wall"], row["device_span"], row["device_busy"])
        for row in run.phases
        if row["parent"] is None and (row["device_span"], row["device_busy"]) != (None, None)
    ]
    stretches += [
        (event["begin"], event["wall"], None, event["device_busy"])
        for event in run.of("profile")
        if None not in (event.get("begin"), event.get("wall"), event.get("device_busy"))
    ]
    for begin, wall, span, busy in stretches:
        if not wall:
            continue
        a, b = page.x(begin), max(page.x(begin + wall), page.x(begin) + 1)
        page.draw.rectangle((a, y + 4, b, y + LANE - 5), outline=GRID)
        for value, colour in ((span, IDLE), (busy, BUSY)):
            if value is not None:
                page.draw.rectangle((a, y + LANE - 5 - (LANE - 9) * min(1.0, value / wall), b, y + LANE - 5), fill=colour)
        label = f"busy {100 * busy / wall:.0f} %" if busy is not None else f"span {100 * span / wall:.0f} %"
        if page.draw.textlength(label, font=page.small) < b - a - 8:
            page.text((a + b) / 2, y + LANE / 2, label, PAPER if busy is not None else INK, anchor="mm", small=True)
    if not stretches:
        page.text(LEFT + 6, y + LANE / 2, "not measured on this device", FAINT, anchor="lm", small=True)


def _memory(page: _Page, run: Run, y: int) -> None:
    series = {name: _samples(run, name) for name in ("device", "host")}
    most = max((value for points in series.values() for _, value in points), default=0)
    page.text(LEFT - 10, y + MEMORY, "memory", FAINT, anchor="rm")
    if not most:
        page.text(LEFT + 6, y + MEMORY - 12, "not measured", FAINT, anchor="lm", small=True)
        return
    unit = next(unit for unit in (1 << 30, 1 << 20, 1) if most >= unit)
    step = _nice(most / unit / 4) * unit
    lines = math.ceil(most / step)
    top = step * lines
    for n in range(lines + 1):
        line = y + MEMORY * (1 - n / lines)
        page.draw.line((LEFT, line, page.right, line), fill=GRID)
        if n:
            page.text(LEFT - 10, line, bytes_text(step * n).replace(".0 ", " "), FAINT, anchor="rm", small=True)
    legend = LEFT + 8
    for name, colour in (("device", DEVICE_LINE), ("host", HOST_LINE)):
        points = series[name]
        if not points:
            continue
        path = [(page.x(t), y + MEMORY * (1 - value / top)) for t, value in points]
        page.draw.line(path, fill=colour, width=2, joint="curve")
        label = f"{name}, at most {bytes_text(max(value for _, value in points))}"
        page.draw.rectangle((legend, y + MEMORY + 13, legend + 18, y + MEMORY + 16), fill=colour)
        page.text(legend + 26, y + MEMORY + 6, label, colour, small=True)
        legend += 60 + page.draw.textlength(label, font=page.small)


def _samples(run: Run, name: str) -> list[tuple[float, float]]:
    """(t, bytes) of every line that carries a sample, and each phase's peak at its end."""
    told = (event for event in run.events if event["event"] != "run")  # the header says how much the device has
    points = [(event["t"], event[f"{name}_memory"]) for event in told if event.get(f"{name}_memory") is not None and "t" in event]
    for row in run.phases:
        peak = row.get(f"peak_{name}")
        if peak is not None:
            points.append((row["start"] + row["wall"], peak))
    return sorted(points)


def _legend(run: Run, clock: _Clock) -> list[tuple[tuple[int, int, int], str]]:
    """One entry per top-level phase name: seconds, share, peaks."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for row in run.phases:
        if row["parent"] is None:
            entries.setdefault(row["name"], []).append(row)
    wall = run.wall or clock.total
    legend = []
    for name, rows in entries.items():
        seconds = sum(row["wall"] for row in rows)
        parts = [f"{name}  {seconds_text(seconds)}", f"{100 * seconds / wall:.1f} %" if wall else ""]
        for label, key in (("device", "peak_device"), ("host", "peak_host")):
            peak = max((row[key] for row in rows if row[key] is not None), default=None)
            parts += [f"{label} peak {bytes_text(peak)}"] if peak is not None else []
        legend.append((_colour(name), ", ".join(part for part in parts if part)))
    if run.forwards:
        last = sorted(forward["seconds"] for forward in run.untraced or run.forwards)
        forwards = run.forwards[-1]
        legend.append((_colour("sample"), f"forward groups: {len(last)}, median {seconds_text(last[len(last) // 2])}, to forward {forwards.get('last')}/{forwards.get('of')}"))
    return legend


def _colour(name: str) -> tuple[int, int, int]:
    return next((colour for start, colour in COLOURS if name.startswith(start)), OTHER)


def _lighter(colour: Sequence[int], by: float) -> tuple[int, int, int]:
    r, g, b = (round(c + (255 - c) * by) for c in colour)
    return (r, g, b)


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(value, 1e-9)))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= value * (1 - 1e-9))


def _tick(seconds: float) -> str:
    if seconds >= 60:
        return f"{int(seconds // 60)}:{round(seconds % 60):02d} min"
    return f"{seconds:g} s"


def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow before 10.1 has one bitmap font of one size
        return ImageFont.load_default()
