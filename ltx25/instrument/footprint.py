"""Working memory of each phase, from configs and shapes, and what records measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.video_layout import ConvDecoderConfig
from ..shapes import AudioLatentShape, Compression, VideoLatentShape, VideoShape
from ..text import working_bytes as text_bytes
from ..video.canvas import Crop
from ..video.conv_plan import conv_plan, usual_chunk
from ..video.diffusion_plan import choose, diffusion_plans
from .history import Run
from .models import Models

ROWS_OF_WIDTH = 14  # rows of a block's width that live at once, per leg and token: residual, normed, the MLP's inner layer
SOUND = 64 << 20  # bytes of the vocoder's widest stages for a few seconds
TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Footprint:
    """The clip whose memory is asked for: `rows` legs side by side, `batch` clips."""

    latent: VideoLatentShape
    sound: AudioLatentShape
    rows: int
    batch: int

    def working(self, phase: str, models: Models, device: str, room: int | None) -> dict[str, int]:
        """Bytes beside the weights in `phase`: on the device, and on the host beyond the process itself.

        A video decoder takes the fastest way that fits `room` bytes (None: the fastest), as it does when it runs.
        """
        itemsize = 4 if device == "cpu" else 2
        pixels = self.latent.pixels(models.compression)
        frames = self.batch * pixels.frames * pixels.height * pixels.width * 3 * 4  # float32 output, held from decode to mux
        if phase == "sample":
            dit = models.dit
            width = self.latent.tokens * dit.width + self.sound.tokens * dit.audio_width
            return {"device": ROWS_OF_WIDTH * self.rows * self.batch * width * itemsize, "host": 0}
        if phase == "decode.video":
            return {"device": _decode(models, self.latent, itemsize, device, room), "host": frames}
        if phase == "decode.audio":
            return {"device": SOUND * self.batch, "host": frames}
        if phase in ("text.tower", "text.project"):
            return {"device": text_bytes(models.tower, TEXT_TOKENS, itemsize), "host": 0}
        return {"device": TEXT_TOKENS * models.connectors.video.width * 16 * itemsize, "host": 0}


def _decode(models: Models, latent: VideoLatentShape, itemsize: int, device: str, room: int | None) -> int:
    if isinstance(models.video, ConvDecoderConfig):
        return conv_plan(models.video, latent, room, itemsize, usual_chunk(device)).bytes
    canvas = Crop.of(models.video, latent).canvas
    frames = latent.pixels(models.compression).frames
    return choose(diffusion_plans(models.video, canvas, frames, itemsize, tiled=True), room).bytes


def footprints(runs: Sequence[Run], models: Models) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(phase, "device" or "host") -> pairs of estimated and measured bytes, from finished phases of `models`' runs."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        clip = _clip(run, models.compression)
        if clip is None:
            continue
        for row in run.phases:
            if row["error"] or row["parent"] is not None or row["name"].startswith(("load", "mux", "encode")):
                continue
            estimate = clip.working(row["name"], models, run.header.get("device_type") or "cpu", None)
            for place, size in estimate.items():
                before, peak = row[f"{place}_before"], row[f"peak_{place}"]
                if size and before is not None and peak is not None:
                    found.setdefault((row["name"], place), []).append((size, max(0, peak - before)))
    return found


def _clip(run: Run, compression: Compression) -> Footprint | None:
    """None for a run without a whole clip, or of a model that samples another one's sizes."""
    clip = run.header.get("geometry") or {}
    facts = next((event.get("facts") or {} for event in run.of("phase") if event.get("name") == "sample"), {})
    if not all(clip.get(name) for name in ("width", "height", "frames", "frame_rate")):
        return None
    rows = len(facts.get("legs") or [1]) if facts.get("batched") else 1
    latent = VideoShape(clip["frames"], clip["height"], clip["width"]).latent(compression)
    return Footprint(latent, AudioLatentShape.of_clip(clip["frames"], clip["frame_rate"]), rows, clip.get("batch") or 1)
