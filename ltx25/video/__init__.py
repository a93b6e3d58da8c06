"""The video VAE: frames to latents and back. The file decides which decoder it is."""

from __future__ import annotations

from ..config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig
from .conv_decoder import ConvDecoder
from .decode import VideoDecoder, decode_video
from .diffusion_decoder import DiffusionDecoder
from .encoder import Encoder
from .statistics import ChannelStatistics

# Tensors of published or known files that decoding does not need, relative to the file's prefix. `type_emb` tags
# keyframes in later upstream releases; `coarse_*` is a preview head; the statistics beyond two are of other trainings.
STATISTICS = "per_channel_statistics."
STATISTICS_UNUSED = ("channel", "mean-of-stds*")
_STATISTICS_UNUSED = tuple(STATISTICS + name for name in STATISTICS_UNUSED)
DECODER_UNUSED = ("encoder.*", "decoder.type_emb", "decoder.coarse_*", *_STATISTICS_UNUSED)
ENCODER_UNUSED = ("decoder.*", *_STATISTICS_UNUSED)

__all__ = [
    "DECODER_UNUSED",
    "ENCODER_UNUSED",
    "STATISTICS",
    "STATISTICS_UNUSED",
    "ChannelStatistics",
    "ConvDecoder",
    "DiffusionDecoder",
    "Encoder",
    "VideoDecoder",
    "build_decoder",
    "decode_video",
]


def build_decoder(config: ConvDecoderConfig | DiffusionDecoderConfig) -> ConvDecoder | DiffusionDecoder:
    """The decoder that a file's configuration asks for, unfilled."""
    return ConvDecoder(config) if isinstance(config, ConvDecoderConfig) else DiffusionDecoder(config)
