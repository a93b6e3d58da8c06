"""Working memory of each phase, bytes beside the weights: what an engine asks its arbiter for, and what plans count."""

from __future__ import annotations

from collections.abc import Mapping

from .config.connector import ConnectorConfig
from .config.dit import DiTConfig
from .config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig
from .shapes import VideoLatentShape
from .video.canvas import Crop
from .video.conv_plan import conv_plan, usual_chunk
from .video.diffusion_plan import choose, diffusion_plans

# Rows of a stream's width that live at once, per token. Measured on an H200 with the published model, 1344 to 14080 tokens:
# 21.0 with one leg, 22.4 a leg with four side by side.
STATE_ROWS = 3  # of every leg, whether it runs or waits: residual, norm, what is made of it
BLOCK_ROWS = 20  # of every leg that runs: queries to values, the MLP's inner layer, results
PLAIN = 1.5  # times that where twins run in place of kernels
PER_WIDTH = 288 << 10  # bytes per channel whatever the clip: modulation, contexts, workspaces; 1.0 to 1.1 GiB at 4096
TEXT_TOKENS = 1024
SOUND = 64 << 20  # bytes of the vocoder's widest stages for a few seconds


def sampling_bytes(config: DiTConfig, tokens: Mapping[str, int], legs: int, batched: bool, batch: int, itemsize: int, device: str) -> int:
    """A guided step. tokens: by stream; legs: of the step; batched: they run side by side; device: its type."""
    widths = {"video": config.width, "audio": config.audio_width}
    rows = sum(count * widths[name] for name, count in tokens.items())
    live = STATE_ROWS * legs + BLOCK_ROWS * (legs if batched else 1) * (1.0 if device == "cuda" else PLAIN)
    return PER_WIDTH * max(widths[name] for name in tokens) + int(live * batch * rows * itemsize)


def connecting_bytes(config: ConnectorConfig, itemsize: int) -> int:
    """The connectors, one prompt."""
    return TEXT_TOKENS * config.video.width * 16 * itemsize


def decoding_bytes(config: ConvDecoderConfig | DiffusionDecoderConfig, latent: VideoLatentShape, itemsize: int, device: str, room: int | None) -> int:
    """A video decode in the fastest way that fits `room` bytes (None: the fastest), as it does when it runs."""
    if isinstance(config, ConvDecoderConfig):
        return conv_plan(config, latent, room, itemsize, usual_chunk(device)).bytes
    canvas = Crop.of(config, latent).canvas
    frames = latent.pixels(config.compression).frames
    return choose(diffusion_plans(config, canvas, frames, itemsize, tiled=True), room).bytes
