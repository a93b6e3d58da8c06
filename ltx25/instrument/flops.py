"""Arithmetic of a run, counted from the configs and the shapes: what times are held against, and what the planner scales.

A multiply-add is 2 FLOP. Element-wise work is left out: it moves bytes, not FLOP. `linear` grows with the token count
(matrix products, convolutions), `attention` with the token count times the keys each token reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..config.audio import AudioConfig, GeneratorConfig
from ..config.connector import ConnectorConfig, ConnectorStream
from ..config.dit import DiTConfig
from ..config.text import TowerConfig
from ..config.upscaler import UpscalerConfig
from ..config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig, Resample, ResStack
from ..dit.modality import Leg, LegPlan
from ..dit.rows import Point, StreamSchedule, schedule
from ..shapes import SAMPLES_PER_MEL, AudioLatentShape, VideoLatentShape


@dataclass(frozen=True)
class Flops:
    """FLOP, not per second."""

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.attention + other.attention)

    def __mul__(self, n: float) -> Flops:
        return Flops(self.linear * n, self.attention * n)


PASSES = 30  # tensors of tokens x width that a block reads and writes per row with its element-wise work fused
ONE_LEG = LegPlan((Leg.COND,), frozenset(), frozenset(), video=True, audio=True)


def group_flops(config: DiTConfig, plan: LegPlan, video: int, audio: int, text: int) -> Flops:
    """One group of forwards of one clip: tokens of each stream (0: not there), `text` tokens of a context.

    What legs share is counted once, by the same schedule the transformer runs by.
    """
    legs = schedule(plan, video > 0, audio > 0)
    d, da, heads = config.width, config.audio_width, config.heads
    total = Flops(2.0 * (video * d * (config.in_channels + config.out_channels) + audio * da * (config.audio_in_channels + config.audio_out_channels)), 0.0)
    for block in range(config.layers):
        for stream, tokens, width in ((legs.video, video, d), (legs.audio, audio, da)):
            if stream is not None and stream.enabled:
                total += _self_attention(stream, block, tokens, width, heads)
                total += _text_attention(stream, block, tokens, width, heads, text)
                total += Flops(2.0 * len(stream.groups(block, Point.CROSS)) * tokens * 8 * width * width, 0.0)  # feed-forward
        if video and audio:
            rows = sum(group != (Leg.ISOLATED,) for group in legs.video.groups(block, Point.CROSS))
            audio_rows = sum(group != (Leg.ISOLATED,) for group in legs.audio.groups(block, Point.CROSS))
            for enabled, queries, query_width, keys, key_width, query_rows, key_rows in (
                (legs.video.enabled, video, d, audio, da, rows, audio_rows),
                (legs.audio.enabled, audio, da, video, d, audio_rows, rows),
            ):
                if enabled:
                    products = query_rows * queries * (2 * query_width * da + query_width * heads) + key_rows * keys * 2 * key_width * da
                    total += Flops(2.0 * products, 4.0 * query_rows * queries * keys * da)
    return total


def group_traffic(config: DiTConfig, plan: LegPlan, video: int, audio: int, itemsize: int) -> float:
    """Bytes a group moves in device memory, roughly: the blocks' weights once, and `PASSES` tensors per block and row."""
    legs = schedule(plan, video > 0, audio > 0)
    d, da = config.width, config.audio_width
    weights = config.layers * (20 * d * d + 20 * da * da + 4 * d * da + 4 * da * da)  # attentions and feed-forwards of both streams
    activations = sum(
        PASSES * len(stream.groups(block, Point.CROSS)) * tokens * width
        for block in range(config.layers)
        for stream, tokens, width in ((legs.video, video, d), (legs.audio, audio, da))
        if stream is not None and stream.enabled
    )
    return float(itemsize * (weights + activations))


def _self_attention(stream: StreamSchedule, block: int, tokens: int, width: int, heads: int) -> Flops:
    entering, leaving = stream.groups(block, Point.ENTRY), stream.groups(block, Point.TEXT)
    square, gate = width * width, width * heads
    perturbed = block in stream.perturbed and Leg.STG in stream.legs
    alone = sum(group == (Leg.STG,) for group in entering) if perturbed else 0  # rows that need their values only
    full = len(entering) - alone
    out = len(leaving) if perturbed else len(entering)  # elsewhere legs part only after the residual
    products = full * 3 * square + alone * square + len(entering) * gate + out * square
    return Flops(2.0 * tokens * products, 4.0 * full * tokens * tokens * width)


def _text_attention(stream: StreamSchedule, block: int, tokens: int, width: int, heads: int, text: int) -> Flops:
    rows = len(stream.groups(block, Point.TEXT))
    sides = len({leg is Leg.UNCOND for leg in stream.legs})
    products = rows * tokens * (2 * width * width + width * heads) + sides * text * 2 * width * width
    return Flops(2.0 * products, 4.0 * rows * tokens * text * width)


def tower_flops(config: TowerConfig, tokens: int) -> Flops:
    """The Gemma tower over `tokens` valid tokens of one prompt; causal attention counted as the half it needs."""
    linear = attention = 0.0
    for full in config.full:
        queries = config.heads * (config.full_head_dim if full else config.head_dim)
        keys = config.full_kv_heads * config.full_head_dim if full else config.kv_heads * config.head_dim
        values = 0 if full else keys  # a full layer's values are its keys
        seen = tokens if full else min(tokens, config.window)
        linear += 2.0 * tokens * config.hidden * (2 * queries + keys + values + 3 * config.intermediate)
        attention += 4.0 * queries * (tokens * seen - seen * (seen - 1) / 2)
    return Flops(linear, attention)


def projection_flops(config: TowerConfig, connector: ConnectorConfig, tokens: int) -> Flops:
    """All states of each token to both contexts' widths."""
    return Flops(2.0 * tokens * config.states * config.hidden * (connector.video.width + connector.audio.width), 0.0)


def connector_flops(config: ConnectorConfig, text: int) -> Flops:
    """Both connectors over the `text` tokens (with registers) of one prompt."""
    return _connector(config.video, text) + _connector(config.audio, text)


def _connector(stream: ConnectorStream, text: int) -> Flops:
    products = 12 * stream.width * stream.width + stream.width * stream.heads  # q, k, v, out; feed-forward; gate
    return Flops(2.0 * stream.layers * text * products, 4.0 * stream.layers * text * text * stream.width)


def upscale_flops(config: UpscalerConfig, latent: VideoLatentShape) -> Flops:
    """One clip's latent enlarged by the spatial upscaler."""
    small, large = (prod(grid) for grid in ((latent.frames, latent.height, latent.width), config.size(latent.frames, latent.height, latent.width)))
    blocks = 2 * config.blocks * 27 * config.width**2
    ends = 27 * config.channels * config.width
    enlarging = 9 * (config.width * config.space.numerator) ** 2  # frame by frame
    return Flops(2.0 * (small * (ends + blocks + enlarging) + large * (blocks + ends)), 0.0)


def video_decode_flops(config: ConvDecoderConfig | DiffusionDecoderConfig, latent: VideoLatentShape) -> Flops:
    """One clip through the video decoder, untiled."""
    return _conv_decode(config, latent) if isinstance(config, ConvDecoderConfig) else _diffusion_decode(config, latent)


def _conv_decode(config: ConvDecoderConfig, latent: VideoLatentShape) -> Flops:
    taps = 27  # 3 x 3 x 3
    grid, width = (latent.frames, latent.height, latent.width), config.bottleneck
    products = prod(grid) * config.latent_channels * width * taps
    for block in config.blocks:
        if isinstance(block, ResStack):
            products += 2 * block.layers * prod(grid) * width * width * taps
        else:
            products += prod(grid) * width * (width * prod(block.stride) // block.multiplier) * taps
            grid, width = _upsampled(grid, block), width // block.multiplier
    products += prod(grid) * width * 3 * config.patch**2 * taps
    return Flops(2.0 * products, 0.0)


def _diffusion_decode(config: DiffusionDecoderConfig, latent: VideoLatentShape) -> Flops:
    """Context stages with the two ghost frames they append, then the denoising steps of the last stage."""
    ghosts = config.kernels[0][0] // 2 * 2
    grid = (latent.frames + ghosts, latent.height, latent.width)
    total = Flops(2.0 * prod(grid) * config.latent_channels * config.channels[0], 0.0)
    last = len(config.channels) - 1
    for stage in range(last):
        width, up = config.channels[stage], config.upsamples[stage]
        total += _neighbourhood(grid, width, config.kernels[stage], 16 * width * width) * config.depths[stage]
        total += Flops(2.0 * prod(grid) * width * (width * prod(up.stride) // up.multiplier), 0.0)
        grid = _upsampled(grid, up)
    pixels = latent.pixels(config.compression)
    grid, width, patch = (pixels.frames, grid[1], grid[2]), config.channels[last], 3 * config.patch**2
    step = _neighbourhood(grid, width, config.kernels[last], 17 * width * width) * config.depths[last]
    return total + (step + Flops(2.0 * prod(grid) * 2 * width * patch, 0.0)) * config.steps


def _neighbourhood(grid: tuple[int, ...], width: int, kernel: tuple[int, int, int], products: int) -> Flops:
    """One block: `products` multiply-adds per token, and each token reads one window of keys."""
    window = prod(min(k, n) for k, n in zip(kernel, grid, strict=True))
    return Flops(2.0 * prod(grid) * products, 4.0 * prod(grid) * window * width)


def _upsampled(grid: tuple[int, ...], block: Resample) -> tuple[int, ...]:
    """Upsampling in time drops the first frame it makes."""
    t, h, w = (n * s for n, s in zip(grid, block.stride, strict=True))
    return (t - (block.stride[0] - 1), h, w)


def audio_decode_flops(config: AudioConfig, latent: AudioLatentShape) -> Flops:
    """One soundtrack: mel decoder, vocoder, bandwidth stage."""
    vae, taps = config.vae, 9
    rows, columns = latent.frames, vae.latent_bins
    width = vae.width * vae.multipliers[-1]
    products = rows * columns * vae.latent_channels * width * taps + 4 * rows * columns * width * width * taps
    for level in reversed(range(len(vae.multipliers))):
        wanted = vae.width * vae.multipliers[level]
        for _ in range(vae.blocks + 1):
            products += rows * columns * (width * wanted + wanted * wanted) * taps
            products += rows * columns * width * wanted * (width != wanted)
            width = wanted
        if level:
            rows, columns = 2 * rows - 1, 2 * columns
            products += rows * columns * width * width * taps
    products += rows * columns * width * 2 * taps
    mel = latent.mel_frames
    products += _generator(config.vocoder, mel)
    frames = mel * SAMPLES_PER_MEL * config.bandwidth.input_rate // config.bandwidth.output_rate // config.bandwidth.hop
    return Flops(2.0 * (products + _generator(config.bandwidth.generator, frames)), 0.0)


def _generator(config: GeneratorConfig, frames: int) -> float:
    """Multiply-adds of one vocoder-like stack; both channels are its inputs and outputs."""
    width, samples = config.channels, frames
    products = samples * config.inputs * width * 7
    for rate, kernel in zip(config.rates, config.up_kernels, strict=True):
        products += samples * width * (width // 2) * kernel
        samples, width = samples * rate, width // 2
        for taps, dilations in zip(config.block_kernels, config.dilations, strict=True):
            products += samples * 2 * len(dilations) * width * width * taps
            products += samples * 2 * len(dilations) * width * 2 * 2 * 12  # up and down around each activation
    return products + samples * width * 2 * 7
