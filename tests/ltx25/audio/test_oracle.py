"""Mel VAE and vocoder against diffusers: weights made there, written under official names, loaded by our loader."""

import pytest
import torch
from comfyui_ltx25.ltx25.audio.decode import decode_audio
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.tests.support.audio import MEL_BINS, load_decoder, load_encoder, oracles, write_oracle_file

pytest.importorskip("diffusers")
TOLERANCE = 1e-5


def silent():
    pass


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    vae, vocoder = oracles()
    return vae, vocoder, write_oracle_file(tmp_path_factory.mktemp("audio") / "oracle.safetensors", vae, vocoder)


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_mel_decoder_equals_diffusers(pair, frames):
    vae, _, path = pair
    latent = torch.randn(2, 4, frames, MEL_BINS // 4, generator=torch.Generator().manual_seed(frames))
    with torch.no_grad():
        want = vae.decode(latent).sample
        got = load_decoder(path).audio_vae.decoder.decode(latent, silent)
    assert got.shape == want.shape == (2, 2, 4 * frames - 3, MEL_BINS)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("frames", [1, 4, 33])
def test_mel_encoder_equals_diffusers(pair, frames):
    vae, _, path = pair
    mel = torch.randn(2, 2, frames, MEL_BINS, generator=torch.Generator().manual_seed(frames))
    with torch.no_grad():
        want = vae.encode(mel).latent_dist.mean
        got = load_encoder(path).audio_vae.encoder.encode(mel, silent)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("frames", [1, 13])
def test_vocoder_equals_diffusers_below_clipping(pair, frames):
    _, vocoder, path = pair
    mel = torch.randn(2, 2, frames, MEL_BINS, generator=torch.Generator().manual_seed(frames))
    with torch.no_grad():
        first = vocoder.vocoder(mel)
        want = vocoder(mel)
    assert 0.01 < first.abs().max() < 1, (
        "diffusers lacks the official clamp after stage 1: compare where it does nothing"
    )
    ours = load_decoder(path).vocoder
    assert (ours.narrow(mel, silent) - first).abs().max() <= TOLERANCE
    got = ours(mel, silent)
    assert got.shape == want.shape == (2, 2, 480 * frames)
    assert want.std() > 0.01 and (got - want).abs().max() <= TOLERANCE


def test_latent_to_wave_equals_diffusers(pair):
    vae, vocoder, path = pair
    latent = torch.randn(1, 4, 5, MEL_BINS // 4, generator=torch.Generator().manual_seed(1))
    mean, std = (t.view(1, 4, 1, MEL_BINS // 4) for t in (vae.latents_mean, vae.latents_std))
    with torch.no_grad():
        want = vocoder(vae.decode(latent * std + mean).sample)
    assert (decode_audio(load_decoder(path), latent, Watch()) - want).abs().max() <= TOLERANCE
