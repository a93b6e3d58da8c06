"""Parts of an engine that a text-to-video render does without, each opened when it is first asked for and kept.

Encoders come out of the engine's own VAE files; upscalers and the duration head from files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .audio.encode import UNUSED as AUDIO_UNUSED
from .audio.encode import SoundEncoder
from .checkpoint import Header, Kind, check_beside, open_file, require_kind
from .config.duration import DurationConfig, read_duration_config
from .config.upscaler import UpscalerConfig, read_upscaler_config
from .device import compute_dtype
from .duration import DurationHead
from .errors import FileError
from .part import Part
from .parts import VIDEO_VAE, Opened
from .piece import Piece
from .upscaler import LatentUpscaler
from .video import (
    DECODER_UNUSED,
    ENCODER_UNUSED,
    STATISTICS,
    STATISTICS_UNUSED,
    ChannelStatistics,
    Encoder,
    build_decoder,
)

VIDEO_ENCODER, AUDIO_ENCODER, WIDE_VIDEO_DECODER = "video encoder", "audio encoder", "video VAE (float32)"


class OptionalParts:
    """The optional parts of one set of files. Weights are read when the arbiter loads a part."""

    def __init__(self, opened: Opened, device: torch.device) -> None:
        self._opened = opened
        self._device = device
        self._compute = compute_dtype(device)
        self._known: dict[str, tuple[object, Any, Part]] = {}  # by name: what it was opened from, its config, the part

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for _, _, part in self._known.values())

    def video_encoder(self) -> Part:
        """Piece "encoder". Raises FileError when the video VAE file holds no encoder."""
        header, config = self._opened.headers["video_vae"], self._opened.video

        def open_it() -> tuple[Any, list[Piece]]:
            _require_some(header, f"{config.prefix}encoder.", "images", "ltx-2.5-video-vae-bf16")
            return config.encoder, [Piece("encoder", lambda: Encoder(config.encoder), header, config.prefix, self._compute, ENCODER_UNUSED, ())]

        return self._part(VIDEO_ENCODER, header.digest, open_it)[1]

    def wide_video_decoder(self) -> Part:
        """Piece "decoder" with float32 weights; the engine's own part where those are float32 anyway."""
        opened = self._opened
        if self._compute == torch.float32:
            return opened.parts[VIDEO_VAE]
        header, config = opened.headers["video_vae"], opened.video

        def open_it() -> tuple[Any, list[Piece]]:
            return config.decoder, [Piece("decoder", lambda: build_decoder(config.decoder), header, config.prefix, torch.float32, DECODER_UNUSED, ())]

        return self._part(WIDE_VIDEO_DECODER, header.digest, open_it)[1]

    def audio_encoder(self) -> Part:
        """Piece "encoder", in float32 like the sound's way out. Raises FileError when the audio VAE file holds none."""
        header, config = self._opened.headers["audio_vae"], self._opened.audio

        def open_it() -> tuple[Any, list[Piece]]:
            _require_some(header, "audio_vae.encoder.", "sound", "ltx-2.5-audio-vae-bf16")
            return config, [Piece("encoder", lambda: SoundEncoder(config), header, "", torch.float32, AUDIO_UNUSED, ())]

        return self._part(AUDIO_ENCODER, header.digest, open_it)[1]

    def upscaler(self, path: Path) -> tuple[UpscalerConfig, Part]:
        """Pieces "upscaler" and "statistics". Raises FileError for another kind of file, or one for other latents."""
        header, config = open_upscaler(path)
        channels, video = self._opened.video.encoder.latent_channels, self._opened.video
        if config.channels != channels:
            raise FileError(f"{header.name} upscales latents of {config.channels} channels and this model's have {channels}; use an upscaler of LTX-2.5.")

        def open_it() -> tuple[Any, list[Piece]]:
            vae = self._opened.headers["video_vae"]
            return config, [
                Piece("upscaler", lambda: LatentUpscaler(config), header, "", self._compute, (), ()),
                Piece("statistics", lambda: ChannelStatistics(channels), vae, video.prefix + STATISTICS, torch.float32, STATISTICS_UNUSED, ()),
            ]

        return self._part(f"upscaler {header.name}", _stamp(header), open_it)

    def duration_head(self, path: Path) -> tuple[DurationConfig, Part]:
        """Piece "head". Raises FileError for another kind of file, or one that reads other contexts."""
        header = open_file(path)
        require_kind(header, "duration_head", (Kind.DURATION_HEAD,))
        config, dit = read_duration_config(header), self._opened.dit
        check_beside(header, config.prefix)
        if (config.video, config.audio) != (dit.width, dit.audio_width):
            raise FileError(
                f"{header.name} reads contexts of {config.video} and {config.audio} features and this model's have {dit.width} and "
                f"{dit.audio_width}: the files do not belong together; use the one published with the transformer."
            )
        piece = Piece("head", lambda: DurationHead(config), header, config.prefix, self._compute, (), ())
        return self._part(f"duration head {header.name}", _stamp(header), lambda: (config, [piece]))

    def _part(self, name: str, source: object, open_it: Callable[[], tuple[Any, list[Piece]]]) -> tuple[Any, Part]:
        known = self._known.get(name)
        if known is None or known[0] != source:
            if known is not None:
                known[2].unload()
            config, pieces = open_it()
            known = self._known[name] = (source, config, Part(name, pieces, self._device))
        return known[1:]


def open_upscaler(path: Path) -> tuple[Header, UpscalerConfig]:
    """Check a latent upscaler file by its header: what can be known before anything is rendered. Raises FileError."""
    header = open_file(path)
    require_kind(header, "upscale_model", (Kind.UPSCALER,))
    return header, read_upscaler_config(header)


def _stamp(header: Header) -> tuple[str, int, int]:
    return str(header.path), header.size, header.mtime_ns


def _require_some(header: Header, prefix: str, what: str, published: str) -> None:
    if not any(name.startswith(prefix) for name in header.tensors):
        raise FileError(f"{header.name} has no encoder, so it cannot take in {what}; use {published} from huggingface.co/Lightricks/LTX-2.5.")
