"""What a plan needs to know of a model: its configs, and the bytes each part reads and holds. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..checkpoint import Header
from ..config.audio import AudioConfig, BandwidthConfig, GeneratorConfig, MelVAEConfig
from ..config.connector import ConnectorConfig, ConnectorStream
from ..config.dit import DiTConfig
from ..config.text import TowerConfig
from ..config.upscaler import UpscalerConfig
from ..config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig, Resample, ResStack
from ..parts import AUDIO_VAE, CONNECTORS, FP8_PRODUCTS, TEXT, TRANSFORMER, VIDEO_VAE, Opened
from ..shapes import PUBLISHED_COMPRESSION, Compression


@dataclass(frozen=True)
class Models:
    """`read`, `held` and `least`: part name -> bytes in the file, bytes on the device, and bytes there where its blocks take
    turns. `name` is what a plan calls the model; `precision` the transformer's, as records say it. streamed: its blocks take turns
    however much room there is.
    """

    name: str
    dit: DiTConfig
    connectors: ConnectorConfig
    tower: TowerConfig
    video: ConvDecoderConfig | DiffusionDecoderConfig
    audio: AudioConfig
    compression: Compression
    read: Mapping[str, int]
    held: Mapping[str, int]
    least: Mapping[str, int]
    precision: str
    streamed: bool

    @staticmethod
    def of(opened: Opened) -> Models:
        """From the headers of a set of files."""
        return Models(
            name=opened.headers["transformer"].name,
            dit=opened.dit,
            connectors=opened.connectors,
            tower=opened.tower,
            video=opened.video.decoder,
            audio=opened.audio,
            compression=opened.video.compression,
            read={name: part.read_bytes for name, part in opened.parts.items()},
            held={name: part.bytes for name, part in opened.parts.items()},
            least={name: part.least for name, part in opened.parts.items()},
            precision=opened.precision,
            streamed=opened.parts[TRANSFORMER].residency == "stream",
        )

    @property
    def signature(self) -> str:
        """As `sample_work` writes it into records."""
        return f"{self.dit.layers} blocks of {self.dit.width}/{self.dit.audio_width}"


@dataclass(frozen=True)
class Enlarging:
    """The upscaler between two stages, the bytes of its file, and how many numbers its weights are."""

    config: UpscalerConfig
    read: int
    numbers: int

    @staticmethod
    def of(header: Header, config: UpscalerConfig) -> Enlarging:
        return Enlarging(config, header.size, sum(info.numel for info in header.tensors.values()))


PUBLISHED_UPSCALER = Enlarging(UpscalerConfig(channels=128, width=1024, blocks=4, space=Fraction(2), time=1, rational=False), 995_735_808, 497_867_904)


def published(device: torch.device, in_fp8: bool = False) -> Models:
    """The files at huggingface.co/Lightricks/LTX-2.5 (bf16, convolutional decoder), for a plan before they are downloaded.

    in_fp8: the transformer as precision fp8 holds it on a card.
    """
    generator = GeneratorConfig(
        inputs=128,
        channels=1536,
        rates=(5, 2, 2, 2, 2, 2),
        up_kernels=(11, 4, 4, 4, 4, 4),
        block_kernels=(3, 7, 11),
        dilations=((1, 3, 5),) * 3,
        final="clamp",
    )
    bandwidth = GeneratorConfig(128, 512, (6, 5, 2, 2, 2), (12, 11, 4, 4, 4), (3, 7, 11), ((1, 3, 5),) * 3, "none")
    stages = (ResStack(2), Resample((2, 2, 2), 2), ResStack(2), Resample((2, 2, 2), 1), ResStack(4), Resample((2, 1, 1), 2), ResStack(6))
    read = {TEXT: 26_126_823_008, CONNECTORS: 4_032_332_800, TRANSFORMER: 37_985_180_160, VIDEO_VAE: 814_338_656, AUDIO_VAE: 321_474_516}
    held = {**read, TRANSFORMER: 24_079_685_120 if in_fp8 else 37_975_718_400, AUDIO_VAE: 642_949_032}  # the vocoder runs in float32 everywhere
    turns = {TEXT: 5_292_786_180, TRANSFORMER: 2_602_999_040 if in_fp8 else 2_401_715_456}
    if device.type == "cpu":  # weights are widened to float32 there
        turns = {TEXT: 10_585_559_048, TRANSFORMER: 4_803_344_896}
        held = {name: n if name == AUDIO_VAE else 2 * n for name, n in held.items()}
    return Models(
        name="the published LTX-2.5 files in bf16" + (", the transformer made fp8" if in_fp8 else ""),
        dit=DiTConfig(
            layers=48,
            heads=32,
            head_dim=128,
            audio_head_dim=64,
            in_channels=128,
            out_channels=128,
            audio_in_channels=128,
            audio_out_channels=128,
            norm_eps=1e-6,
            rope_theta=10000.0,
            max_position=(20, 2048, 2048),
            audio_max_position=20,
            timestep_scale=1000.0,
            cross_timestep_scale=1000.0,
            ff_bias=False,
            audio_ff_bias=True,
            prompt_adaln=True,
            keyframe_embedding=True,
        ),
        connectors=ConnectorConfig(ConnectorStream(8, 32, 128, 4096, True), ConnectorStream(8, 32, 64, 4096, True)),
        tower=TowerConfig(
            vocabulary=262144,
            hidden=3840,
            intermediate=15360,
            full=(False, False, False, False, False, True) * 8,
            heads=16,
            kv_heads=8,
            head_dim=256,
            full_kv_heads=1,
            full_head_dim=512,
            window=1024,
            eps=1e-6,
            theta=10000.0,
            full_theta=1000000.0,
            rotated=0.25,
            bos=2,
            pad=0,
            gemma_version="gemma4-12b-ltx-v1",
        ),
        video=ConvDecoderConfig(128, 128, 4, (*stages, Resample((1, 2, 2), 2), ResStack(4))),
        audio=AudioConfig(
            vae=MelVAEConfig(width=128, multipliers=(1, 2, 4), blocks=2, latent_channels=8, mel_bins=64, rate=16000, hop=160, fft=1024),
            vocoder=generator,
            bandwidth=BandwidthConfig(bandwidth, fft=512, hop=80, mel_bins=64, input_rate=16000, output_rate=48000),
        ),
        compression=PUBLISHED_COMPRESSION,
        read=read,
        held=held,
        least={**held, **turns},
        precision=FP8_PRODUCTS if in_fp8 else "float32" if device.type == "cpu" else "bfloat16",
        streamed=False,
    )
