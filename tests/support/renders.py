"""A short clip by an engine on the CPU, for tests that compare files or settings end to end."""

from __future__ import annotations

from pathlib import Path

import torch

from ...ltx25.cli.render import empty_latents
from ...ltx25.engine import Conditioning, Engine, Files, Options, Sampled, SampleJob
from ...ltx25.guidance import Bins, Guidance
from ...ltx25.instrument import Watch
from ...ltx25.parts import open_parts
from ...ltx25.shapes import VideoShape
from .tiny import tiny_files

CPU = torch.device("cpu")
WATCH = Watch([])


def open_engine(precision: str = "auto", residency: str = "auto", **files: Path) -> Engine:
    """The tiny set with some of its files replaced. fp8, which `Engine.open` refuses on a CPU, in the plain arithmetic of its twins."""
    paths = {slot: files.get(slot, getattr(tiny_files(), slot)) for slot in ("transformer", "text_encoder", "video_vae", "audio_vae")}
    options = Options(precision, residency, "auto", "memory").check()
    if precision == "fp8":
        return Engine(open_parts(Files(**paths), CPU, precision, residency), options, CPU)
    return Engine.open(Files(**paths), options, CPU)


def sampled(
    engine: Engine, sigmas: tuple[float, ...] = (1.0, 0.6, 0.0), text: str = "A cat on a table.", conditioning: Conditioning | None = None, watch: Watch = WATCH
) -> Sampled:
    """Both streams of 64 x 64 px, 9 frames, without guidance."""
    video, audio = empty_latents(VideoShape(9, 64, 64), 24.0, 1, engine.compression)
    plain = Bins.constant(Guidance(1.0, 0.0, 1.0, 0.0, frozenset(), 0))
    job = SampleJob(
        video=video, audio=audio, video_mask=None, audio_mask=None, frame_rate=24.0, seed=1,
        positive=conditioning or engine.encode(text, WATCH), negative=None, video_guidance=plain, audio_guidance=plain,
        sigmas=sigmas, schedule=None, sampler="euler", eta=1.0, conditions=(), add_noise=True,
    )  # fmt: skip
    return engine.sample(job, watch)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance, by norm."""
    return ((got - want).norm() / want.norm()).item()
