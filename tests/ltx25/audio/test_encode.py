"""Audio encoding as a user meets it: any layout and rate, level kept, errors, progress, long clips, where things stay."""

import math

import pytest
import torch
from comfyui_ltx25.ltx25.audio import encoder as encoder_module
from comfyui_ltx25.ltx25.audio.encode import encode_audio
from comfyui_ltx25.ltx25.audio.mel import log_mel, stereo
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.tests.support.audio import GOLDEN_FILE, load_encoder


@pytest.fixture(scope="module")
def model():
    return load_encoder(GOLDEN_FILE)


def noise(channels, samples, batch=1):
    return 0.3 * torch.randn(batch, channels, samples, generator=torch.Generator().manual_seed(channels))


def test_a2_half_the_level_is_a_constant_in_the_log_mel(model):
    loud = 3.3 * noise(2, 8000)  # above full scale: still nothing may be normalised
    full, half = (log_mel(wave, 16000, model.config.vae) for wave in (loud, loud / 2))
    audible = half > math.log(1e-5) + 1e-3
    assert audible.float().mean() > 0.9
    assert (full - half)[audible].sub(math.log(2)).abs().max() < 1e-4


def test_a3_mono_is_used_on_both_sides(model):
    mono = noise(1, 6000)
    assert torch.equal(
        encode_audio(model, mono, 16000, Watch()), encode_audio(model, mono.expand(1, 2, 6000), 16000, Watch())
    )


@pytest.mark.parametrize("channels", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_a3_any_layout_and_rate_is_encoded(model, channels, rate):
    latent = encode_audio(model, noise(channels, rate // 8), rate, Watch())
    assert latent.shape == (1, 2, math.ceil((1 + math.ceil(rate // 8 * 16000 / rate) // 160) / 4), 16)
    assert (latent.dtype, latent.device.type) == (torch.float32, "cpu") and latent.isfinite().all()


def test_a3_a_down_mix_keeps_sides_apart_and_never_clips():
    for channels in range(3, 9):
        assert stereo(torch.ones(1, channels, 4)).allclose(torch.ones(1, 2, 4))
    surround = torch.zeros(1, 6, 4)
    surround[:, 4] = 1  # left surround
    assert stereo(surround)[:, 0].min() > 0.2 and stereo(surround)[:, 1].abs().max() == 0
    bass = torch.zeros(1, 6, 4)
    bass[:, 3] = 1
    assert stereo(bass).abs().max() == 0


@pytest.mark.parametrize(
    "bad, rate, message",
    [
        (torch.zeros(1, 2, 0), 16000, r"shape \[1, 2, 0\], wanted .* at least one sample"),
        (torch.zeros(1, 0, 5), 16000, r"shape \[1, 0, 5\]"),
        (torch.zeros(2, 5), 16000, r"shape \[2, 5\]"),
        (torch.full((1, 2, 9), float("nan")), 16000, "not finite"),
        (torch.zeros(1, 2, 9), 0, "sample rate of 0 Hz"),
        (torch.zeros(1, 2, 9), -1, "sample rate of -1 Hz"),
        (torch.zeros(1, 2, 9, dtype=torch.int16), 16000, "of type int16, wanted floating-point"),
    ],
)
def test_a3_audio_that_cannot_be_encoded_is_refused(model, bad, rate, message):
    with pytest.raises(InputError, match=message):
        encode_audio(model, bad, rate, Watch())


@pytest.mark.parametrize("samples", [1, 100, 512, 513])
def test_clips_shorter_than_the_window_are_filled_up_with_silence(model, samples):
    wave = noise(2, samples)
    padded = torch.nn.functional.pad(wave, (0, 513 - samples))
    assert torch.equal(encode_audio(model, wave, 16000, Watch()), encode_audio(model, padded, 16000, Watch()))


def test_input_is_not_written_to_and_batch_items_are_encoded_as_alone(model):
    wave = noise(2, 4000, batch=2)
    before = wave.clone()
    both = encode_audio(model, wave, 44100, Watch())
    assert torch.equal(wave, before)
    assert torch.equal(both[1:], encode_audio(model, wave[1:], 44100, Watch()))


class Listener(Sink):
    def __init__(self):
        self.done, self.total = [], None

    def opened(self, phase):
        self.total = phase.total

    def ticked(self, phase):
        self.done.append(phase.done)

    def closed(self, phase):
        assert phase.error is None


def test_long_clips_in_chunks_equal_the_whole_and_report_every_layer(monkeypatch):
    exact = load_encoder(GOLDEN_FILE, torch.float64)
    wave = noise(2, 48000)
    whole = encode_audio(exact, wave, 16000, Watch())
    monkeypatch.setattr(encoder_module, "CHUNK", 24)
    listener = Listener()
    chunked = encode_audio(exact, wave, 16000, Watch([listener]))
    assert (chunked - whole).abs().max() <= 1e-6  # one float32 rounding of numbers up to 8
    assert listener.done == list(range(1, listener.total + 1)) and listener.total == 13 * exact.audio_vae.encoder.ticks


def test_context_of_a_chunk_is_wide_enough_and_not_wasteful():
    encoder = load_encoder(GOLDEN_FILE, torch.float64).audio_vae.encoder
    frames = 4 * encoder.reach

    def run(changed):
        mel = torch.randn(1, 2, frames, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        mel[:, :, changed] += 1
        return encoder(mel, lambda: None)[:, :, frames // 8 :]

    still = run(slice(0, 0))
    assert torch.equal(run(slice(0, frames // 2 - encoder.reach)), still)
    assert not torch.equal(run(slice(0, frames // 2 - 3 * encoder.reach // 4)), still)


@pytest.mark.parametrize("rate", [16000, 44100, 48000])
def test_an_impulse_stays_where_it_is(model, rate):
    """The click's latent frame is the first one that differs from silence: 40 ms, one frame at 25 frames/s."""
    second = 0.6
    wave = torch.zeros(1, 2, rate)
    wave[..., round(second * rate)] = 1
    silence = encode_audio(model, torch.zeros(1, 2, rate), rate, Watch())
    changed = (encode_audio(model, wave, rate, Watch()) - silence).abs().amax(dim=(0, 1, 3)) > 1e-3
    first = changed.nonzero()[0].item()
    # Latent frame i ends at mel frame 4 i; the centred window of 64 ms looks 32 ms ahead.
    assert second - 0.04 <= first * 0.04 <= second + 0.04
