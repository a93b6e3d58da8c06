"""Working memory of each phase, bytes beside the weights: what an engine asks its arbiter for, and what plans count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .audio.encoder import CHUNK as MEL_CHUNK
from .audio.vocoder import CHUNK_SECONDS as SOUND_CHUNK
from .config.audio import CHANNELS, AudioConfig, MelVAEConfig
from .config.connector import ConnectorConfig
from .config.dit import DiTConfig
from .config.duration import DurationConfig
from .config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig, EncoderConfig
from .shapes import OUTPUT_RATE, VideoLatentShape, VideoShape
from .video.canvas import Crop
from .video.conv_plan import conv_plan, peak_bytes, usual_chunk
from .video.diffusion_plan import choose, diffusion_plans
from .video.encoder import CHUNK as VIDEO_CHUNK

# Rows of a stream's width that live at once, per token. Measured on an H200 with the published model, 1344 to 14080 tokens:
# 21.0 with one leg, 22.4 a leg with four side by side.
STATE_ROWS = 3  # of every leg, whether it runs or waits: residual, norm, what is made of it
BLOCK_ROWS = 20  # of every leg that runs: queries to values, the MLP's inner layer, results
PLAIN = 1.5  # times that where twins run in place of kernels
PER_WIDTH = 288 << 10  # bytes per channel whatever the clip: modulation, contexts, workspaces; 1.0 to 1.1 GiB at 4096
TEXT_TOKENS = 1024
SPECTRUM_ROWS = 3  # of fft samples per mel frame: windows, half a spectrum of complex numbers, magnitudes
LEVEL_ROWS = 5  # of the encoder's first level: residual, norm, padded input of a convolution, result
HEAD_ROWS = 6  # of the duration head's width, per token: projection, sum, both in one row, keys, values
SOUND_ROWS = 14  # values of a generator's widest level that live at once: 13.7 counted on a CPU; a card holds fewer, and graphs of them
COPIED = 0.5  # of the weights once more on a card, in bf16: 426 MB measured with a chunk at the published size, 540 MB by this
ENCODING = 165  # bytes of a pixel of one frame: 138 MB at 1280 x 704
WAVES = 7  # of both channels at 48 kHz: the two stages' waves, pieces and sums of them, and a resampling between


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


def seeing_bytes(config: EncoderConfig, latent: VideoLatentShape, itemsize: int) -> int:
    """A video encode: its blocks are a decoder's, read from the pixels' end, and stream as many frames at a time.

    A picture counts as two latent frames: convolutions read two frames of a past that it does not have.
    """
    latent = replace(latent, frames=max(latent.frames, 2))
    return peak_bytes(config.mirrored, latent, VIDEO_CHUNK * config.compression.frames, itemsize)


def hearing_bytes(config: MelVAEConfig, samples: int, rate: int) -> int:
    """An audio encode in float32: one item's wave and spectrum, which grow with the clip, then one chunk of mel frames."""
    resampled = samples * config.rate / rate
    transformed = resampled / config.hop * SPECTRUM_ROWS * config.fft
    chunk = LEVEL_ROWS * 2 * MEL_CHUNK * config.mel_bins * config.width  # with the past that is computed again
    return int(4 * (CHANNELS * (2 * samples + 2 * resampled + transformed) + chunk))


def sounding_bytes(config: AudioConfig, weights: int, samples: int, device: str) -> int:
    """An audio decode of one clip of `samples` at 48 kHz: a chunk, whole waves of both stages, and on a card copies of weights.

    weights: bytes of the part. Clips go one by one.
    """
    stages = (config.vocoder, config.vae.rate / config.vae.hop), (config.bandwidth.generator, config.bandwidth.input_rate / config.bandwidth.hop)
    values = max(frames * generator.values for generator, frames in stages)  # a second of sound, at the widest level
    chunk = SOUND_ROWS * 4 * values * min(samples / OUTPUT_RATE, SOUND_CHUNK)
    return int(chunk + WAVES * 4 * CHANNELS * samples + (COPIED * weights if device == "cuda" else 0))


def writing_bytes(clip: VideoShape) -> int:
    """The encoder of a clip's file, on the host: frames it looks ahead over, and those it compares with."""
    return ENCODING * clip.height * clip.width


def frames_bytes(clip: VideoShape, batch: int) -> int:
    """The frames that a decode makes: float32 on the host, held until they are written."""
    return batch * clip.frames * clip.height * clip.width * 3 * 4


def wave_bytes(samples: int, batch: int) -> int:
    """The waves that an audio decode makes, on the host: one by one, as a batch, and cut or padded."""
    return 3 * 4 * CHANNELS * batch * samples


def timing_bytes(config: DurationConfig, tokens: int, itemsize: int) -> int:
    """The duration head over `tokens` of each context."""
    return tokens * (config.video + config.audio + 2 * HEAD_ROWS * config.width) * itemsize
