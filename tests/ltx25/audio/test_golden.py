"""Every official value of the audio parts, each at its own tolerance."""

from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.kernels.snake import factors, snake
from comfyui_ltx25.ltx25.audio.decode import decode_audio
from comfyui_ltx25.ltx25.audio.encode import encode_audio
from comfyui_ltx25.ltx25.audio.mel import log_mel, mel_filters
from comfyui_ltx25.ltx25.audio.resample import resample, sinc_kernel, upsample_held
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.shapes import AudioLatentShape
from comfyui_ltx25.tests.support.audio import GOLDEN_FILE, load_decoder, load_encoder
from comfyui_ltx25.tests.support.golden import Golden

golden = Golden("audio")


def silent():
    pass


def compare(case, **got):
    """All tensor outputs of `case`, none forgotten, at its tolerance."""
    assert got.keys() == {name for name, value in golden.index[case]["outputs"].items() if "value" not in value}
    for name, tensor in got.items():
        golden.check(case, name, tensor)


def wave(case):
    return golden.input(case, "wave_i16").float() / 32768


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(GOLDEN_FILE)


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(GOLDEN_FILE)


def test_every_case_of_the_index_has_a_test():
    tested = [case for family in FAMILIES.values() for case in family]
    assert sorted(tested) == sorted(golden.index)


FAMILIES = {
    "mel": [case for case in golden.names("mel/") if case != "mel/filterbank"],
    "filterbank": ["mel/filterbank"],
    "encode": [case for case in golden.names("encode/") if "mel_T" not in case],
    "encode_mel": golden.names("encode/mel_T"),
    "decode": golden.names("decode/n"),
    "vocoder": golden.names("vocoder/n"),
    "tanh": ["vocoder/tanh_at_final"],
    "activation": ["vocoder/activation1d"],
    "resample": ["vocoder/resample3"],
    "lengths": ["lengths"],
}


@pytest.mark.parametrize("case", FAMILIES["mel"])
def test_log_mel_of_any_rate(case, decoder):
    rate, vae = golden.input(case, "rate"), decoder.config.vae
    resampled = resample(wave(case), rate, vae.rate)
    assert resampled.shape[-1] == golden.output(case, "resampled_samples")
    compare(case, resampled=resampled, log_mel=log_mel(wave(case), rate, vae))


@pytest.mark.parametrize("case", FAMILIES["filterbank"])
def test_filterbank_and_window(case):
    compare(case, fb=mel_filters(513, 64, 16000), window=torch.hann_window(1024))


@pytest.mark.parametrize("case", FAMILIES["encode"])
def test_encode_wave(case, encoder):
    compare(case, latent=encode_audio(encoder, wave(case), golden.input(case, "rate"), Watch()))


@pytest.mark.parametrize("case", FAMILIES["encode_mel"])
def test_encode_mel(case, encoder):
    latent = encoder.audio_vae.encoder.encode(golden.input(case, "log_mel").float(), silent)
    compare(case, latent=encoder.audio_vae.per_channel_statistics.normalize(latent))


@pytest.mark.parametrize("case", FAMILIES["decode"])
def test_decode_to_mel(case, decoder):
    latent = decoder.audio_vae.per_channel_statistics.denormalize(golden.input(case, "latent"))
    compare(case, log_mel=decoder.audio_vae.decoder.decode(latent, silent))


@pytest.mark.parametrize("case", FAMILIES["vocoder"])
def test_vocoder_stage_by_stage(case, decoder):
    vocoder, mel = decoder.vocoder, golden.input(case, "log_mel")
    stage1 = vocoder.narrow(mel, silent)
    bands = vocoder.mel_stft(stage1)
    compare(
        case,
        stage1=stage1,
        bwe_log_mel=bands,
        residual=vocoder.bwe_generator(bands, silent),
        skip=vocoder.skip(stage1),
        wave=vocoder(mel, silent),
    )
    whole = decode_audio(decoder, golden.input(case, "latent"), Watch())
    assert whole.shape[-1] == golden.output(case, "samples")
    assert (whole - vocoder(mel, silent)).abs().max() <= 2e-5 + 5e-5


@pytest.mark.parametrize("case", FAMILIES["tanh"])
def test_tanh_instead_of_the_clamp(case, decoder):
    assert golden.input(case, "config_overrides") == {"vocoder.vocoder.use_tanh_at_final": True}
    config = replace(decoder.config, vocoder=replace(decoder.config.vocoder, final="tanh"))
    vocoder = load_decoder(GOLDEN_FILE, config=config).vocoder
    mel = golden.input(case, "log_mel")
    compare(case, stage1=vocoder.narrow(mel, silent), wave=vocoder(mel, silent))


@pytest.mark.parametrize("case", FAMILIES["activation"])
def test_anti_aliased_activation(case):
    # The filter the published files hold, rounded: a Kaiser window (51 dB) over a sinc of half the band.
    t = torch.arange(-6, 6) + 0.5
    kaiser = torch.kaiser_window(
        12, periodic=False, beta=0.1102 * (2.285 * 5 * torch.pi * 1.2 + 7.95 - 8.7)
    ) * torch.sinc(t / 2)
    kaiser = kaiser / kaiser.sum()
    x, alpha, beta = (golden.input(case, name) for name in ("x", "alpha", "beta"))
    # Upsampling alone: a vanishing periodic part and a downsampling filter that picks one of the two phases.
    off = torch.full_like(beta, 60.0)
    pick = torch.zeros(2, 12)
    pick[0, 5], pick[1, 6] = 1, 1
    even, odd = (snake(x, *factors(alpha, off), kaiser, one) for one in pick)
    up = torch.stack([even, odd], dim=-1).flatten(-2)
    compare(case, y=snake(x, *factors(alpha, beta), kaiser, kaiser), up=up, kaiser12=kaiser)


@pytest.mark.parametrize("case", FAMILIES["resample"])
def test_three_fold_resampling(case):
    kernel, reach = sinc_kernel(16000, 48000)
    y = upsample_held(golden.input(case, "x"), kernel.float(), reach)
    # The official filter is the same one read along time, a third as high, with a last tap of exactly its window's edge.
    taps = kernel.flip(1).T.flatten()[:43] / 3
    compare(case, y=y, filter=taps)


@pytest.mark.parametrize("case", FAMILIES["lengths"])
def test_lengths(case):
    for frames, rate, latents, mel, narrow, wide in golden.output(case, "table"):
        shape = AudioLatentShape.of_clip(frames, rate)
        assert shape.frames == max(1, latents), (
            "0 latents (one frame at 50 frames/s and more) is no sound; ours makes 1"
        )
        assert (shape.mel_frames, shape.samples // 3, shape.samples) == (mel, narrow, wide)
