"""What an audio VAE file says about itself: the mel VAE, the vocoder and the bandwidth stage, from metadata or shapes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from ..checkpoint import Header
from ..errors import FileError
from ..shapes import LATENTS_PER_SECOND, MEL_PER_LATENT, OUTPUT_RATE, AudioLatentShape
from .keys import Keys

log = logging.getLogger(__name__)

CHANNELS = 2  # stereo: the vocoder reads both channels at once

# What shapes do not tell, as published with LTX-2.3 and 2.5. Strides are known by the kernel sizes they came with.
PUBLISHED_RATES = {(11, 4, 4, 4, 4, 4): (5, 2, 2, 2, 2, 2), (12, 11, 4, 4, 4): (6, 5, 2, 2, 2)}
PUBLISHED_DILATIONS = (1, 3, 5)
PUBLISHED_RATE = 16000  # Hz
PUBLISHED_HOP = 160  # samples
PUBLISHED_FFT = 1024  # samples
PUBLISHED_BANDWIDTH_HOP = 80  # samples


@dataclass(frozen=True)
class AudioConfig:
    """One audio VAE file."""

    vae: MelVAEConfig
    vocoder: GeneratorConfig  # log mel -> wave at `vae.rate`
    bandwidth: BandwidthConfig  # that wave -> `output_rate`


@dataclass(frozen=True)
class MelVAEConfig:
    """The 2-D causal convolutional autoencoder between log mel and latent."""

    width: int  # channels at mel resolution
    multipliers: tuple[int, ...]  # of `width`, from mel resolution to latent resolution
    blocks: int  # residual blocks per encoder level; the decoder has one more
    latent_channels: int
    mel_bins: int
    rate: int  # Hz
    hop: int  # samples per mel frame
    fft: int  # samples, also the window's length

    @property
    def latent_bins(self) -> int:
        return self.mel_bins // MEL_PER_LATENT

    def mel_frames(self, latent_frames: int) -> int:
        return AudioLatentShape(self.latent_channels, latent_frames, self.latent_bins).mel_frames


@dataclass(frozen=True)
class GeneratorConfig:
    """A stack of transposed convolutions and anti-aliased residual blocks: log mel frames -> samples."""

    inputs: int  # mel bins of all channels together
    channels: int  # halved by every upsampling
    rates: tuple[int, ...]  # upsampling strides; their product is the samples per frame
    up_kernels: tuple[int, ...]
    block_kernels: tuple[int, ...]  # one residual block each, averaged
    dilations: tuple[tuple[int, ...], ...]  # of each block's layers
    final: str  # "clamp", "tanh" or "none"

    @property
    def values(self) -> int:
        """Of the level that has most, per mel frame: channels times samples."""
        return max((self.channels >> level) * math.prod(self.rates[:level]) for level in range(1, len(self.rates) + 1))


@dataclass(frozen=True)
class BandwidthConfig:
    """The second generator, which adds what lies above the first one's Nyquist frequency."""

    generator: GeneratorConfig
    fft: int  # samples
    hop: int  # samples
    mel_bins: int
    input_rate: int  # Hz
    output_rate: int  # Hz


def read_audio_config(header: Header) -> AudioConfig:
    """The configuration of an audio VAE file; raises FileError for what this engine does not implement.

    A file without metadata is read by its shapes and the published values, which is logged (one line). Shapes that do
    not settle the question are an error.
    """
    if "config" in header.metadata:
        config = _from_metadata(header)
    else:
        config = _from_shapes(header)
        log.warning(
            "%s has no metadata: sizes taken from its tensors, the rest as published with LTX-2.5.", header.name
        )
    return _checked(config, header)


def _from_metadata(header: Header) -> AudioConfig:
    where = f"{header.name}: config"
    root = Keys(header.metadata_json("config"), where)
    audio, sound = root.block("audio_vae"), root.block("vocoder")
    root.done()
    vae = _vae(audio)
    first, second = sound.block("vocoder"), sound.block("bwe")
    sound.done()
    bandwidth = BandwidthConfig(
        fft=second.take("n_fft", int),
        hop=second.take("hop_length", int),
        mel_bins=second.take("num_mels", int),
        input_rate=second.take("input_sampling_rate", int),
        output_rate=second.take("output_sampling_rate", int),
        generator=_generator(second, CHANNELS * vae.mel_bins, bandwidth=True),
    )
    return AudioConfig(vae, _generator(first, CHANNELS * vae.mel_bins, bandwidth=False), bandwidth)


def _vae(keys: Keys) -> MelVAEConfig:
    model, prepare = keys.block("model"), keys.block("preprocessing")
    keys.done()
    params = model.block("params")
    model.done()
    net = params.block("ddconfig")
    rate = params.take("sampling_rate", int, PUBLISHED_RATE)
    params.done()
    mel_bins = net.take("mel_bins", int)
    stft, mel = prepare.block("stft"), prepare.block("mel")
    prepare.inert(["audio"])  # what the training data looked like
    prepare.done()
    config = MelVAEConfig(
        width=net.take("ch", int),
        multipliers=_integers(net, "ch_mult"),
        blocks=net.take("num_res_blocks", int),
        latent_channels=net.take("z_channels", int),
        mel_bins=mel_bins,
        rate=rate,
        hop=stft.take("hop_length", int),
        fft=stft.take("filter_length", int),
    )
    for name, wanted in (
        ("in_channels", CHANNELS),
        ("out_ch", CHANNELS),
        ("double_z", True),
        ("norm_type", "pixel"),
        ("causality_axis", "height"),
        ("attn_resolutions", []),
        ("mid_block_add_attention", False),
    ):
        net.require(name, wanted)
    net.require("resamp_with_conv", True, True)
    net.inert(["resolution", "dropout", "downsample_time", "attn_type"])  # of attention and training only
    net.done()
    stft.require("causal", True, True)
    stft.inert(["win_length"])  # the window is as long as the transform
    stft.done()
    mel.require("n_mel_channels", mel_bins, mel_bins)
    mel.inert(["mel_fmin", "mel_fmax"])  # always 0 to half the rate
    mel.done()
    return config


def _generator(keys: Keys, inputs: int, bandwidth: bool) -> GeneratorConfig:
    keys.require("resblock", "AMP1")
    keys.require("activation", "snakebeta")
    keys.require("stereo", True)
    keys.require("use_bias_at_final", False)
    tanh = keys.take("use_tanh_at_final", bool, True)
    if bandwidth:
        keys.require("apply_final_activation", False, False)
        keys.inert(["win_size"])
    dilations = keys.take("resblock_dilation_sizes", list)
    if not all(isinstance(row, list) and all(isinstance(d, int) for d in row) for row in dilations):
        raise FileError(f"{keys.where}.resblock_dilation_sizes is {dilations!r}, wanted lists of whole numbers.")
    config = GeneratorConfig(
        inputs=inputs,
        channels=keys.take("upsample_initial_channel", int),
        rates=_integers(keys, "upsample_rates"),
        up_kernels=_integers(keys, "upsample_kernel_sizes"),
        block_kernels=_integers(keys, "resblock_kernel_sizes"),
        dilations=tuple(tuple(row) for row in dilations),
        final="none" if bandwidth else "tanh" if tanh else "clamp",
    )
    keys.done()
    return config


def _integers(keys: Keys, name: str) -> tuple[int, ...]:
    values = keys.take(name, list)
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        raise FileError(f"{keys.where}.{name} is {values!r}, wanted whole numbers above 0.")
    return tuple(values)


def _from_shapes(header: Header) -> AudioConfig:
    def shape(name: str) -> tuple[int, ...]:
        if name not in header.tensors:
            raise FileError(
                f"{header.name} has neither metadata nor the tensor {name}; use the file as published by Lightricks."
            )
        return header.tensors[name].shape

    decoder = "audio_vae.decoder."
    width = shape(decoder + "conv_out.conv.weight")[1]
    levels = len(_numbered(header, decoder + "up."))
    latent_channels = shape(decoder + "conv_in.conv.weight")[1]
    statistics = shape("audio_vae.per_channel_statistics.mean-of-means")[0]
    stft = "vocoder.mel_stft."
    vae = MelVAEConfig(
        width=width,
        multipliers=tuple(shape(f"{decoder}up.{i}.block.0.conv1.conv.weight")[0] // width for i in range(levels)),
        blocks=len(_numbered(header, decoder + "up.0.block.")) - 1,
        latent_channels=latent_channels,
        mel_bins=statistics // latent_channels * MEL_PER_LATENT,
        rate=PUBLISHED_RATE,
        hop=PUBLISHED_HOP,
        fft=PUBLISHED_FFT,
    )

    def generator(prefix: str, final: str) -> GeneratorConfig:
        up_kernels = tuple(shape(f"{prefix}ups.{i}.weight")[2] for i in range(len(_numbered(header, prefix + "ups."))))
        rates = PUBLISHED_RATES.get(up_kernels)
        if rates is None:
            raise FileError(
                f"{header.name} has no metadata, and upsampling kernels {list(up_kernels)} under {prefix} do not tell the "
                "strides; use the file as published by Lightricks."
            )
        blocks = len(_numbered(header, prefix + "resblocks.")) // len(rates)
        channels, inputs, _ = shape(prefix + "conv_pre.weight")
        return GeneratorConfig(
            inputs=inputs,
            channels=channels,
            rates=rates,
            up_kernels=up_kernels,
            block_kernels=tuple(shape(f"{prefix}resblocks.{j}.convs1.0.weight")[2] for j in range(blocks)),
            dilations=(PUBLISHED_DILATIONS,) * blocks,
            final=final,
        )

    bandwidth = BandwidthConfig(
        generator=generator("vocoder.bwe_generator.", "none"),
        fft=shape(stft + "stft_fn.forward_basis")[2],
        hop=PUBLISHED_BANDWIDTH_HOP,
        mel_bins=shape(stft + "mel_basis")[0],
        input_rate=PUBLISHED_RATE,
        output_rate=OUTPUT_RATE,
    )
    return AudioConfig(vae, generator("vocoder.vocoder.", "clamp"), bandwidth)


def _numbered(header: Header, prefix: str) -> set[str]:
    """The distinct name parts that follow `prefix`."""
    return {name[len(prefix) :].split(".")[0] for name in header.tensors if name.startswith(prefix)}


def _checked(config: AudioConfig, header: Header) -> AudioConfig:
    """Refuse rates and sizes that contradict each other or the clock of shapes.py."""
    vae, bandwidth = config.vae, config.bandwidth
    wrong = []
    if 2 ** (len(vae.multipliers) - 1) != MEL_PER_LATENT or vae.mel_bins % MEL_PER_LATENT:
        wrong.append(f"{len(vae.multipliers)} levels for {vae.mel_bins} mel bins")
    if vae.rate != vae.hop * LATENTS_PER_SECOND * MEL_PER_LATENT:
        wrong.append(f"hop {vae.hop} at {vae.rate} Hz")
    if math.prod(config.vocoder.rates) != vae.hop:
        wrong.append(f"vocoder strides {config.vocoder.rates} for hop {vae.hop}")
    if (
        bandwidth.input_rate != vae.rate
        or bandwidth.output_rate != OUTPUT_RATE
        or bandwidth.output_rate % bandwidth.input_rate
    ):
        wrong.append(f"bandwidth stage from {bandwidth.input_rate} to {bandwidth.output_rate} Hz")
    elif math.prod(bandwidth.generator.rates) != bandwidth.hop * (bandwidth.output_rate // bandwidth.input_rate):
        wrong.append(f"bandwidth strides {bandwidth.generator.rates} for hop {bandwidth.hop}")
    if vae.hop % bandwidth.hop:
        wrong.append(f"hops {vae.hop} and {bandwidth.hop}")
    if bandwidth.mel_bins != vae.mel_bins:
        wrong.append(f"{vae.mel_bins} and {bandwidth.mel_bins} mel bins")
    for generator in (config.vocoder, bandwidth.generator):
        if len(generator.rates) != len(generator.up_kernels) or any(
            (k - r) % 2 or k < r for k, r in zip(generator.up_kernels, generator.rates, strict=False)
        ):
            wrong.append(f"upsampling kernels {generator.up_kernels} with strides {generator.rates}")
        if len(generator.block_kernels) != len(generator.dilations) or any(k % 2 == 0 for k in generator.block_kernels):
            wrong.append(f"block kernels {generator.block_kernels} with dilations {generator.dilations}")
    if wrong:
        raise FileError(f"{header.name}: this version cannot run an audio VAE with {'; '.join(wrong)}.")
    return config
