"""Four files -> the parts of an engine: which modules, filled from which tensors, in which precision. Reads headers only."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from ..kernels.nvfp4_linear import supported as multiplies_nvfp4
from .audio.decode import UNUSED as AUDIO_UNUSED
from .audio.decode import SoundDecoder
from .checkpoint import Header, Kind, check_beside, open_file, require_kind
from .config.audio import AudioConfig, read_audio_config
from .config.connector import AUDIO, VIDEO, ConnectorConfig
from .config.dit import DiTConfig
from .config.pairing import check_pairing
from .config.text import FeatureConfig, TowerConfig
from .config.text_layout import PROJECTION, TextLayout
from .config.transformer import CONNECTOR_TENSORS, read_transformer, transformer_prefix
from .config.video import VideoVAEConfig, read_video_config
from .connector import Connector
from .device import compute_dtype
from .dit import KEEP_STORED, DiT, fp8_layers
from .errors import FileError
from .formats import Held
from .part import Part
from .piece import Blocks, Piece
from .text import FeatureProjection, Tower
from .video import DECODER_UNUSED, build_decoder

log = logging.getLogger(__name__)

TEXT, CONNECTORS, TRANSFORMER, VIDEO_VAE, AUDIO_VAE = "text encoder", "connectors", "transformer", "video VAE", "audio VAE"

FP8_PRODUCTS = "fp8 products"  # an fp8 file that is decoded for its products is "fp8": another time a forward

# Modulation of many blocks is made in one go, ahead of them, so its tables stay.
DIT_BLOCKS = Blocks("transformer_blocks", KEEP_STORED, lambda dit: dit.streams)
TOWER_BLOCKS = Blocks("layers")


@dataclass(frozen=True)
class Files:
    """The four files of a model, as published at huggingface.co/Lightricks/LTX-2.5."""

    transformer: Path
    text_encoder: Path
    video_vae: Path
    audio_vae: Path


WANTED = {
    "transformer": (Kind.TRANSFORMER,),
    "text_encoder": (Kind.TEXT_ENCODER,),
    "video_vae": (Kind.VIDEO_VAE_CONV, Kind.VIDEO_VAE_DIFFUSION),
    "audio_vae": (Kind.AUDIO_VAE,),
}


@dataclass(frozen=True)
class Opened:
    """What the headers of one set of files say. `parts` by name, weights not read. precision: the transformer's, for records.

    decoded: part -> a sentence about weights of it that do not stay as the file has them, where there are such.
    """

    headers: dict[str, Header]
    tower: TowerConfig
    dit: DiTConfig
    connectors: ConnectorConfig
    video: VideoVAEConfig
    audio: AudioConfig
    parts: dict[str, Part]
    precision: str
    decoded: dict[str, str]


def open_parts(files: Files, device: torch.device, precision: str = "auto", residency: str = "auto") -> Opened:
    """Read and check all headers: kinds, pairing, names, shapes. Raises FileError for whatever cannot become a model.

    precision: "auto" leaves a quantised transformer as its file has it, nvfp4 where the device multiplies it; "bf16" decodes it on load; "fp8" does too, and rounds
    the inner blocks to rows of e4m3, in which weights that the file has in e4m3 keep their bits.
    residency: see Part.
    """
    headers = {field.name: open_file(getattr(files, field.name)) for field in fields(files)}
    for slot, header in headers.items():
        require_kind(header, slot, WANTED[slot])
    transformer, text_encoder = headers["transformer"], headers["text_encoder"]
    check_pairing(transformer, text_encoder)
    tower = TowerConfig.read(text_encoder)
    dit, connectors = read_transformer(transformer)
    video, audio = read_video_config(headers["video_vae"]), read_audio_config(headers["audio_vae"])
    check_beside(transformer, transformer_prefix(transformer))
    check_beside(headers["video_vae"], video.prefix)
    _check_latents(headers, dit, video, audio)
    compute = compute_dtype(device)
    native = Held.NATIVE if "nvfp4" in transformer.formats and multiplies_nvfp4(device) else Held.FAST
    held = {"auto": native, "bf16": Held.DENSE, "fp8": Held.FP8}[precision]
    pieces = {
        TEXT: _text_pieces(text_encoder, tower, compute),
        CONNECTORS: _connector_pieces(transformer, connectors, compute),
        TRANSFORMER: [_transformer_piece(transformer, dit, compute, held)],
        VIDEO_VAE: [Piece("decoder", lambda: build_decoder(video.decoder), headers["video_vae"], video.prefix, compute, DECODER_UNUSED, ())],
        # The vocoder runs in float32 on every device: in bf16 its hundred convolutions lose what makes speech clear.
        AUDIO_VAE: [Piece("decoder", lambda: SoundDecoder(audio), headers["audio_vae"], "", torch.float32, AUDIO_UNUSED, ())],
    }
    parts = {name: Part(name, some, device, residency) for name, some in pieces.items()}
    said = {TEXT: _decoded(text_encoder, Held.EXACT, compute), TRANSFORMER: _decoded(transformer, held, compute)}
    decoded = {name: sentence for name, sentence in said.items() if sentence}
    for sentence in decoded.values():
        log.info("%s", sentence)
    return Opened(headers, tower, dit, connectors, video, audio, parts, _precision(transformer, held, compute), decoded)


def _precision(header: Header, held: Held, compute: torch.dtype) -> str:
    kept = {stored.format.name for stored in header.stored.values() if stored.format.stays(held)}
    if held is Held.FP8:
        return FP8_PRODUCTS
    return "+".join(sorted(kept)) if kept else str(compute).removeprefix("torch.")


def _decoded(header: Header, held: Held, compute: torch.dtype) -> str | None:
    every = Counter(stored.format.name for stored in header.stored.values())
    decoded = Counter(stored.format.name for stored in header.stored.values() if not stored.format.stays(held))
    if not decoded:
        return None
    told = [f"its {name} weights" if count == every[name] else f"{count} of its {every[name]} {name} weights" for name, count in sorted(decoded.items())]
    return f"{header.name}: {' and '.join(told)} are decoded to {str(compute).removeprefix('torch.')} when they are loaded, not multiplied as stored."


def _transformer_piece(header: Header, config: DiTConfig, compute: torch.dtype, held: Held) -> Piece:
    blocks = replace(DIT_BLOCKS, in_fp8=fp8_layers) if held is Held.FP8 else DIT_BLOCKS
    return Piece("dit", lambda: DiT(config), header, transformer_prefix(header), compute, CONNECTOR_TENSORS, KEEP_STORED, held, blocks)


def _text_pieces(header: Header, tower: TowerConfig, compute: torch.dtype) -> list[Piece]:
    layout = TextLayout.read(header)
    layout.check(header)
    features = FeatureConfig.read(header, tower)
    return [
        Piece("tower", lambda: Tower(tower), header, layout.tower, compute, layout.unused, (), blocks=TOWER_BLOCKS),
        Piece("projection", lambda: FeatureProjection(features), header, PROJECTION, compute, (), ()),
    ]


def _connector_pieces(header: Header, config: ConnectorConfig, compute: torch.dtype) -> list[Piece]:
    prefix = transformer_prefix(header)
    return [
        Piece("video", lambda: Connector(config.video), header, prefix + VIDEO, compute, (), ()),
        Piece("audio", lambda: Connector(config.audio), header, prefix + AUDIO, compute, (), ()),
    ]


def _check_latents(headers: dict[str, Header], dit: DiTConfig, video: VideoVAEConfig, audio: AudioConfig) -> None:
    """The decoders must read what the transformer writes."""
    for slot, made, read in (
        ("video_vae", dit.out_channels, video.decoder.latent_channels),
        ("audio_vae", dit.audio_out_channels, audio.vae.latent_channels * audio.vae.latent_bins),
    ):
        if made != read:
            raise FileError(
                f"{headers['transformer'].name} makes latents of {made} features and {headers[slot].name} decodes {read}: "
                "the files do not belong together; use the ones published with the transformer."
            )
