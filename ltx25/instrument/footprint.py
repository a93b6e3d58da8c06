"""Working memory of each phase, from configs and shapes, and what records measured of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.upscaler import UpscalerConfig
from ..errors import InputError
from ..parts import AUDIO_VAE, CONNECTORS, TEXT, TRANSFORMER, VIDEO_VAE
from ..shapes import AudioLatentShape, Compression, VideoLatentShape, VideoShape
from ..text import working_bytes as text_bytes
from ..upscaler import working_bytes as upscaling_bytes
from ..video.output import copying_bytes
from ..working import (
    TEXT_TOKENS,
    connecting_bytes,
    decoding_bytes,
    frames_bytes,
    sampling_bytes,
    sounding_bytes,
    wave_bytes,
    writing_bytes,
)
from .costs import APART, sound_of
from .history import Run
from .law import LEAST
from .models import Models
from .units import bytes_text, counted

MEASURABLE = 64 << 20  # bytes: below, what allocators keep and round is larger than what a phase takes of a device

# What records may make of the arithmetic: times so much of it, and so many bytes more.
DEVICE_BOUNDS = (0.8, 2.0, 0)
HOST_BOUNDS = (0.5, 3.0, 1 << 30)  # libraries, staging and what allocators keep are the process's own, and no part of the arithmetic
GRAIN = 2 << 20  # bytes allocators take and give back at a time: no measurement is closer
FRESH = 32 << 20  # bytes a process may hold more than at its first run and count as one that has not rendered

PARTS = {"text.tower": TEXT, "text.connect": CONNECTORS, "sample": TRANSFORMER, "decode.video": VIDEO_VAE, "decode.audio": AUDIO_VAE}
ENLARGING, UPSCALER = "upscale", "upscaler"  # between two stages: its phase, and the slot of its file in records
LOADING, WRITING = "load.read", "mux"  # on the host beside the parts: what reading holds for a while, and a clip's encoder


@dataclass(frozen=True)
class Footprint:
    """The clip whose memory is asked for: `rows` legs side by side, `batch` clips. latent, sound: None where a phase has none.

    tokens: by stream, where a sampling's are not those of the clip: a first stage's, or with conditions beside it.
    upscaler: of a first stage's clip, what enlarges it.
    """

    latent: VideoLatentShape | None
    sound: AudioLatentShape | None
    rows: int
    batch: int
    tokens: Mapping[str, int] | None = None
    upscaler: UpscalerConfig | None = None

    def working(self, phase: str, models: Models, device: str, room: int | None, kept: int | None = None) -> dict[str, int]:
        """Bytes beside the weights in `phase`: on the device, and on the host beyond the process itself. A CPU has no device.

        A video decoder takes the fastest way that fits `room` bytes (None: the fastest), as it does when it runs; on a CPU the
        frames lie in them too. kept: host bytes of all that was decoded before; None: this clip alone, as far as it is then.
        """
        itemsize = itemsize_on(device)
        clip = None if self.latent is None else self.latent.pixels(models.compression)
        frames, waves = self.decoded("decode.video", models), self.decoded("decode.audio", models)
        own, beside = 0, kept or 0
        if phase == "sample":
            tokens = self.tokens or {"video": self.latent.tokens, "audio": self.sound.tokens}
            own = sampling_bytes(models.dit, tokens, self.rows, True, self.batch, itemsize, device)
        elif phase == ENLARGING and self.upscaler is not None:
            own = upscaling_bytes(self.upscaler, self.latent.frames, self.latent.height, self.latent.width, itemsize)
        elif phase == "decode.video":
            free = room if room is None or device != "cpu" else max(0, room - frames)
            own = decoding_bytes(models.video, self.latent, itemsize, device, free)
            beside += frames + (copying_bytes(clip.height, clip.width) if device == "cuda" else 0)
        elif phase == "decode.audio":
            own = sounding_bytes(models.audio, models.held[AUDIO_VAE], self.sound.samples, device)
            beside = waves + (frames if kept is None else kept)
        elif phase == WRITING:
            beside = writing_bytes(clip) + (frames + waves if kept is None else kept)
        elif phase in ("text.tower", "text.project"):
            own = text_bytes(models.tower, TEXT_TOKENS, itemsize)
        elif phase == "text.connect":
            own = connecting_bytes(models.connectors, itemsize)
        return {"device": 0, "host": own + beside} if device == "cpu" else {"device": own, "host": beside}

    def decoded(self, phase: str, models: Models) -> int:
        """Host bytes of what `phase` makes and leaves to those behind it."""
        if phase == "decode.video" and self.latent is not None:
            return frames_bytes(self.latent.pixels(models.compression), self.batch)
        if phase == "decode.audio" and self.sound is not None:
            return wave_bytes(self.sound.samples, self.batch)
        return 0


@dataclass(frozen=True)
class Line:
    """bytes = fixed + slope * arithmetic, and never beyond `bounds` of the arithmetic; of a size seen, what it took.

    off: bytes, the largest of what it missed of the sizes seen, what lines without one of them missed of that one, and the
    spread of runs of equal size. least, most: arithmetic of the sizes seen, `samples` phases of `sizes` different ones.
    seen: arithmetic -> bytes measured. others: the lines without one size each, of three sizes or more.
    """

    fixed: float
    slope: float
    off: float
    samples: int
    sizes: int
    least: float
    most: float
    bounds: tuple[float, float, int]
    seen: Mapping[float, Sequence[float]]
    others: tuple[Line, ...]

    def at(self, arithmetic: float) -> int:
        if arithmetic in self.seen:
            return int(statistics.median(self.seen[arithmetic]))
        low, high, beyond = self.bounds
        return int(min(max(self.fixed + self.slope * arithmetic, low * arithmetic), high * arithmetic + beyond))

    def is_known(self, arithmetic: float) -> bool:
        """Whether the measurements tell how far off `at` may be: three sizes do, and repeats of this one."""
        return self.sizes >= LEAST or len(self.seen.get(arithmetic, ())) > 1

    def open(self, arithmetic: float) -> int:
        """Bytes that `at` may be off by as far as the measurements tell; wider the farther from what was seen.

        Of n repeats: (n + 1)/(n - 1) of their spread, because a few show less of it than many, and that of other sizes.
        """
        repeats = self.seen.get(arithmetic, ())
        n = len(repeats)
        if n > 1:
            return math.ceil(max(GRAIN, _spread(self.seen), (max(repeats) - min(repeats)) * (n + 1) / (n - 1)))
        outside = max(0.0, self.least - arithmetic, arithmetic - self.most) / max(self.most - self.least, self.least, 1.0)
        apart = max((abs(other.at(arithmetic) - self.at(arithmetic)) for other in self.others), default=0)
        return math.ceil(max(GRAIN, self.off * (1 + outside), apart))

    def basis(self, arithmetic: float) -> str:
        how = f"within {bytes_text(self.open(arithmetic))}" if self.is_known(arithmetic) else "how far off is not known"
        outside = "" if self.least <= arithmetic <= self.most else ", extrapolated"
        return f"{counted(self.samples, 'phase')} of {counted(self.sizes, 'size')} measured here, {how}{outside}"


def line_of(pairs: Sequence[tuple[float, float]], bounds: tuple[float, float, int], has_fixed: bool = True) -> Line:
    """Least squares through pairs of (arithmetic, measured) bytes, the slope held within `bounds`, the fixed part not negative
    where the line may bend for it. has_fixed: False: nothing but what grows.

    Sizes that are too few or too much alike to tell a slope from a fixed part keep the arithmetic's own slope.
    """
    seen = {size: [bytes_ for other, bytes_ in pairs if other == size] for size, _ in pairs}
    fixed, slope = _fit(pairs, bounds, has_fixed)
    line = Line(fixed, slope, 0.0, len(pairs), len(seen), min(seen), max(seen), bounds, seen, ())
    missed = [abs(fixed + slope * size - bytes_) for size, bytes_ in pairs]
    others = []
    if len(seen) >= LEAST:
        for size, measured in seen.items():
            rest = [pair for pair in pairs if pair[0] != size]
            other = replace(line, **dict(zip(("fixed", "slope"), _fit(rest, bounds, has_fixed), strict=True)), seen={})
            missed += [abs(other.at(size) - bytes_) for bytes_ in measured]
            others.append(other)
    return replace(line, off=max(*missed, _spread(seen)), others=tuple(others))


def _fit(pairs: Sequence[tuple[float, float]], bounds: tuple[float, float, int], has_fixed: bool) -> tuple[float, float]:
    """Fixed part and slope of `line_of`."""
    xs, ys = zip(*pairs, strict=True)
    sizes, span = len(set(xs)), (min(xs), max(xs))
    fixed, slope, through_zero = 0.0, 1.0, not has_fixed
    if has_fixed and sizes >= LEAST and span[1] >= APART * span[0]:
        slope, fixed = statistics.linear_regression(xs, ys)
        through_zero = fixed < 0
    if through_zero and span[1] > 0:
        slope = sum(x * y for x, y in pairs) / sum(x * x for x in xs)
    slope = min(max(slope, bounds[0]), bounds[1])
    return (statistics.fmean(y - slope * x for x, y in pairs) if has_fixed else 0.0), slope


def _spread(seen: Mapping[float, Sequence[float]]) -> float:
    """Bytes between runs of equal size, at most."""
    return max(max(repeats) - min(repeats) for repeats in seen.values())


def device_lines(runs: Sequence[Run], models: Models) -> dict[str, Line]:
    """By phase: what it took of the device beside what was there when it opened, against the arithmetic."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for row, arithmetic in _finished(run, models):
            before, peak = row["device_before"], row["peak_device"]
            if arithmetic["device"] >= MEASURABLE and before is not None and peak is not None:
                found.setdefault(row["name"], []).append((arithmetic["device"], max(0, peak - before)))
    return {phase: line_of(pairs, DEVICE_BOUNDS) for phase, pairs in found.items()}


def host_lines(runs: Sequence[Run], models: Models, again: bool) -> dict[str, Line]:
    """By phase, against the arithmetic: how far the process rose above what it held before its first run, less weights that
    are host memory; again: above what it held when the run began, of processes that had rendered before.

    The two are not one: a process keeps its libraries and memory of earlier renders, which hides what a smaller clip takes;
    there only what grows with the clip comes on top.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        first, now = ((run.header.get("process") or {}).get(name) for name in ("first", "now"))
        if first is None or now is None or again != (now - first > FRESH):
            continue
        on_cpu = (run.header.get("device_type") or "cpu") == "cpu"
        reached: dict[str, tuple[int, int]] = {}  # rise and arithmetic of the highest phase of a name
        for row, arithmetic in _finished(run, models):
            if row["peak_host"] is not None:
                reached[row["name"]] = max(reached.get(row["name"], (0, 0)), (row["peak_host"] - now, arithmetic["host"]))
        weights = 0
        for phase in (LOADING, *PARTS, WRITING):
            if phase not in reached or (on_cpu and phase == LOADING):  # a CPU's weights stay where they are read to
                continue
            rise, size = reached[phase]
            own = models.held[PARTS[phase]] if on_cpu and phase in PARTS and not again else 0
            if own and phase == "sample":  # the highest of two samplings: the upscaler came before it
                own += _upscaler_held(run)
            weights += own
            rise -= weights if rise >= weights else own  # parts that were short of room left
            found.setdefault(phase, []).append((size, max(0, rise)))
    return {phase: line_of(pairs, HOST_BOUNDS, has_fixed=not again) for phase, pairs in found.items()}


def itemsize_on(device: str) -> int:
    """Bytes of a number that a device computes in."""
    return 4 if device == "cpu" else 2


def _upscaler_held(run: Run) -> int:
    """Bytes on a CPU of the upscaler a run had between two stages, whose file is bfloat16; 0: it had none."""
    return ((run.header.get("files") or {}).get(UPSCALER) or {}).get("bytes", 0) // 2 * itemsize_on("cpu")


def process_before(runs: Sequence[Run]) -> int | None:
    """Bytes of a process before it renders for the first time, as records tell; None: none does."""
    firsts = [first for run in runs if (first := (run.header.get("process") or {}).get("first"))]
    return int(statistics.median(firsts)) if firsts else None


def _finished(run: Run, models: Models) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Phases of a run and the arithmetic of their memory. None of a run whose blocks took turns on the device: it held other memory."""
    whole = _clip(run.header.get("geometry") or {}, models.compression)
    begun = {event.get("id"): event.get("facts") or {} for event in run.of("phase") if event.get("state") == "open"}
    if any(facts.get("residency") == "stream" for facts in begun.values()):
        return
    kept = 0
    for row in run.phases:
        if row["error"] or row["parent"] is not None:
            continue
        clip = _clip_of(row["name"], begun.get(row["id"], {}), whole, models.compression)
        if clip is not None:
            yield row, clip.working(row["name"], models, run.header.get("device_type") or "cpu", None, kept)
            kept += clip.decoded(row["name"], models)


def _clip_of(phase: str, facts: Mapping[str, Any], whole: Footprint | None, compression: Compression) -> Footprint | None:
    """What a phase says it works on as it begins: a run may have clips of several sizes, and one clip samplings of several.
    Older records say it in their header alone, `whole`. None: not known.
    """
    batch = facts.get("batch") or (whole.batch if whole is not None else 1)
    if phase == "sample":
        asked = _sampled(facts)
        return Footprint(None, None, batch=batch, **asked) if asked["tokens"] else whole and replace(whole, **asked)
    if phase in ("decode.video", WRITING):
        return _clip(facts, compression) if facts.get("frames") else whole
    if phase == "decode.audio":
        return Footprint(None, sound, 1, batch) if (sound := sound_of(facts, {})) is not None else whole
    return Footprint(None, None, 1, batch)


def _sampled(facts: Mapping[str, Any]) -> dict[str, Any]:
    widest = max((len(group["legs"].split("+")) for group in facts.get("work") or ()), default=len(facts.get("legs") or [1]))
    told = facts.get("tokens")
    tokens = {name: told[name] for name in ("video", "audio") if name in told} if isinstance(told, Mapping) else None
    return {"rows": widest if facts.get("batched") else 1, "tokens": tokens}


def _clip(sizes: Mapping[str, Any], compression: Compression) -> Footprint | None:
    """A header's geometry, or the sizes a phase says."""
    if not all(sizes.get(name) for name in ("width", "height", "frames")):
        return None
    try:
        latent = VideoShape(sizes["frames"], sizes["height"], sizes["width"]).latent(compression)
    except InputError:  # off this model's grid: a clip of another model, or none at all
        return None
    return Footprint(latent, sound_of({}, sizes), 1, sizes.get("batch") or 1)
