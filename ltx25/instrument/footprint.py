"""Working memory of each phase, from configs and shapes, and what records measured of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..shapes import AudioLatentShape, Compression, VideoLatentShape, VideoShape
from ..text import working_bytes as text_bytes
from ..working import (
    TEXT_TOKENS,
    connecting_bytes,
    decoding_bytes,
    frames_bytes,
    sampling_bytes,
    sounding_bytes,
    wave_bytes,
)
from .history import Run
from .models import Models

KNOWN = ("text.tower", "text.project", "text.connect", "sample", "decode.video", "decode.audio")  # phases whose memory is estimated
MEASURABLE = 64 << 20  # bytes: below, what allocators keep and round is larger than what a phase takes


@dataclass(frozen=True)
class Footprint:
    """The clip whose memory is asked for: `rows` legs side by side, `batch` clips.

    tokens: by stream, where a sampling's are not those of the clip: a first stage's, or with conditions beside it.
    """

    latent: VideoLatentShape
    sound: AudioLatentShape
    rows: int
    batch: int
    tokens: Mapping[str, int] | None = None

    def working(self, phase: str, models: Models, device: str, room: int | None) -> dict[str, int]:
        """Bytes beside the weights in `phase`: on the device, and on the host beyond the process itself.

        A video decoder takes the fastest way that fits `room` bytes (None: the fastest), as it does when it runs.
        """
        itemsize = 4 if device == "cpu" else 2
        frames = frames_bytes(self.latent.pixels(models.compression), self.batch)
        if phase == "sample":
            tokens = self.tokens or {"video": self.latent.tokens, "audio": self.sound.tokens}
            return {"device": sampling_bytes(models.dit, tokens, self.rows, True, self.batch, itemsize, device), "host": 0}
        if phase == "decode.video":
            return {"device": decoding_bytes(models.video, self.latent, itemsize, device, room), "host": frames}
        if phase == "decode.audio":
            samples = self.sound.samples
            return {"device": sounding_bytes(samples), "host": frames + wave_bytes(samples, self.batch)}
        if phase in ("text.tower", "text.project"):
            return {"device": text_bytes(models.tower, TEXT_TOKENS, itemsize), "host": 0}
        return {"device": connecting_bytes(models.connectors, itemsize), "host": 0}


def footprints(runs: Sequence[Run], models: Models) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(phase, "device" or "host") -> pairs of estimated and measured bytes, from finished phases of `models`' runs."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        clip = _clip(run, models.compression)
        if clip is None:
            continue
        begun = {event.get("id"): event.get("facts") for event in run.of("phase") if event.get("state") == "open"}
        for row in run.phases:
            if row["error"] or row["parent"] is not None or row["name"] not in KNOWN:
                continue
            asked = _sampled(begun.get(row["id"]) or {}) if row["name"] == "sample" else {}
            estimate = replace(clip, **asked).working(row["name"], models, run.header.get("device_type") or "cpu", None)
            for place, size in estimate.items():
                before, peak = row[f"{place}_before"], row[f"peak_{place}"]
                if size >= MEASURABLE and before is not None and peak is not None:
                    found.setdefault((row["name"], place), []).append((size, max(0, peak - before)))
    return found


def _sampled(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a sample phase says of itself as it begins: a render may have several, of other sizes and legs."""
    rows = len(facts.get("legs") or [1]) if facts.get("batched") else 1
    return {"rows": rows, "tokens": facts.get("tokens")}


def _clip(run: Run, compression: Compression) -> Footprint | None:
    """None for a run without a whole clip, or of a model that samples another one's sizes."""
    clip = run.header.get("geometry") or {}
    if not all(clip.get(name) for name in ("width", "height", "frames", "frame_rate")):
        return None
    latent = VideoShape(clip["frames"], clip["height"], clip["width"]).latent(compression)
    return Footprint(latent, AudioLatentShape.of_clip(clip["frames"], clip["frame_rate"]), 1, clip.get("batch") or 1)
