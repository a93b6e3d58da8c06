"""The video VAE: frames to latents and back. The file decides which decoder it is."""

from __future__ import annotations

from .conv_decoder import ConvDecoder
from .decode import VideoDecoder, decode_video

# Tensors of published or known files that decoding does not need, relative to the file's prefix. `type_emb` tags
# keyframes in later upstream releases; `coarse_*` is a preview head; the statistics beyond two are of other trainings.
DECODER_UNUSED = ("encoder.*", "decoder.type_emb", "decoder.coarse_*", "per_channel_statistics.channel", "per_channel_statistics.mean-of-stds*")

__all__ = ["DECODER_UNUSED", "ConvDecoder", "VideoDecoder", "decode_video"]
