"""A tiny engine on the CPU and small jobs for it, for tests of memory and of whole phases."""

from __future__ import annotations

from dataclasses import replace

import torch
from comfyui_ltx25.ltx25.connector import Conditioning
from comfyui_ltx25.ltx25.engine import Engine, Files, Options, SampleJob
from comfyui_ltx25.ltx25.guidance import Bins, Guidance
from comfyui_ltx25.tests.support.tiny import tiny_files

CPU = torch.device("cpu")
GUIDED = Guidance(3.0, 1.0, 3.0, 0.7, frozenset([1]), 0)


def files() -> Files:
    tiny = tiny_files()
    return Files(tiny.transformer, tiny.text_encoder, tiny.video_vae, tiny.audio_vae)


def engine(device: torch.device = CPU, **options: str) -> Engine:
    chosen = {"precision": "auto", "residency": "auto", "legs": "auto", "cache": "memory", **options}
    return Engine.open(files(), Options(**chosen), device)


def job(engine: Engine, seed: int = 5, frames: int = 2, steps: int = 2, **changes: object) -> SampleJob:
    """A guided denoise of a clip of `frames` latent frames, with contexts drawn from the seed."""
    config, draw = engine.opened.dit, torch.Generator().manual_seed(seed)
    contexts = [Conditioning(*(torch.randn(1, 1024, width, generator=draw) for width in (config.width, config.audio_width)), ()) for _ in range(2)]
    made = SampleJob(
        video=torch.zeros(1, config.in_channels, frames, 2, 3),
        audio=torch.zeros(1, 8, 9, 16),
        video_mask=None,
        audio_mask=None,
        frame_rate=24.0,
        seed=seed,
        positive=contexts[0],
        negative=contexts[1],
        video_guidance=Bins.constant(GUIDED),
        audio_guidance=Bins.constant(GUIDED),
        sigmas=tuple(1 - step / steps for step in range(steps + 1)),
        schedule=None,
        sampler="euler",
        eta=1.0,
        conditions=(),
        add_noise=True,
    )
    return replace(made, **changes)
