"""Audio decoding as a user meets it: lengths, level, errors, progress, cancel, long clips."""

import pytest
import torch
from comfyui_ltx25.ltx25.audio import decoder as decoder_module
from comfyui_ltx25.ltx25.audio.decode import decode_audio
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.shapes import AudioLatentShape, clip_samples
from comfyui_ltx25.tests.support.audio import GOLDEN_FILE, load_decoder


@pytest.fixture(scope="module")
def model():
    return load_decoder(GOLDEN_FILE)


def latent(frames, batch=1, seed=0):
    return torch.randn(batch, 2, frames, 16, generator=torch.Generator().manual_seed(seed))


class Listener(Sink):
    """A sink that keeps what it is told and cancels after `patience` ticks."""

    def __init__(self, patience=None):
        self.patience, self.done, self.error, self.total = patience, [], "open", None

    def check(self):
        if self.patience is not None and len(self.done) >= self.patience:
            raise KeyboardInterrupt

    def opened(self, phase):
        assert phase.name == "decode.audio"
        self.total = phase.total

    def ticked(self, phase):
        self.done.append(phase.done)

    def closed(self, phase):
        self.error = phase.error


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_length_is_480_samples_per_mel_frame(model, frames):
    wave = decode_audio(model, latent(frames), Watch())
    assert wave.shape == (1, 2, AudioLatentShape(2, frames, 16).samples) == (1, 2, 480 * (4 * frames - 3))


def test_a6_sound_is_stereo_float32_on_the_cpu_and_not_silent(model):
    wave = decode_audio(model, latent(5), Watch())
    assert (wave.dtype, wave.device.type, wave.shape[:2]) == (torch.float32, "cpu", (1, 2))
    assert wave.is_contiguous() and wave.std() > 0.01 and not wave.requires_grad and not wave.is_inference()


@pytest.mark.parametrize("frame_rate", [23.976, 29.97, 24.0])
def test_a4_fractional_frame_rates_round_and_the_clip_gets_its_exact_length(model, frame_rate):
    # The report asks for the ceiling; the official model rounds, and that decides what the latent is.
    shape = AudioLatentShape.of_clip(25, frame_rate, channels=2)
    assert shape.frames == round(25 / frame_rate * 25)
    wanted = clip_samples(25, frame_rate)
    wave = decode_audio(model, latent(shape.frames), Watch(), samples=wanted)
    assert wave.shape[-1] == wanted == round(25 / frame_rate * 48000)


def test_samples_cuts_or_pads_the_tail_and_touches_nothing_else(model):
    whole = decode_audio(model, latent(2), Watch())
    assert torch.equal(decode_audio(model, latent(2), Watch(), samples=1000), whole[..., :1000])
    longer = decode_audio(model, latent(2), Watch(), samples=3000)
    assert torch.equal(longer[..., :2400], whole) and longer[..., 2400:].abs().max() == 0
    assert decode_audio(model, latent(2), Watch(), samples=0).shape == (1, 2, 0)


def test_batch_items_sound_as_they_do_alone(model):
    both = decode_audio(model, latent(3, batch=2), Watch())
    assert torch.equal(both[1:], decode_audio(model, latent(3, batch=2)[1:], Watch()))


def test_a12_weights_stored_as_bf16_run_in_float32_on_a_cpu(model):
    assert {p.dtype for p in model.parameters()} | {b.dtype for b in model.buffers()} == {torch.float32}
    wave = decode_audio(model, latent(6, seed=3).bfloat16(), Watch())
    assert wave.isfinite().all() and wave.abs().max() <= 1
    exact = load_decoder(GOLDEN_FILE, torch.float64)
    want = decode_audio(exact, latent(6, seed=3).bfloat16(), Watch())
    noise = 10 * torch.log10(want.square().mean() / (wave - want).square().mean())
    assert noise > 90, "dB against float64"


def test_inputs_are_not_written_to(model):
    z = latent(2)
    before = z.clone()
    decode_audio(model, z, Watch())
    assert torch.equal(z, before)


@pytest.mark.parametrize(("frames", "batch"), [(1, 2), (3, 2), (140, 1)])
def test_every_layer_ticks_and_the_last_tick_is_the_total(model, frames, batch):
    listener = Listener()
    decode_audio(model, latent(frames, batch), Watch([listener]))
    assert listener.done == list(range(1, listener.total + 1))
    assert listener.error is None and listener.total >= batch * (8 + 72 + 72)


def test_cancel_takes_effect_at_the_next_layer_and_the_model_stays_usable(model):
    want = decode_audio(model, latent(2), Watch())
    for patience in (1, 20, 100):
        listener = Listener(patience)
        with pytest.raises(KeyboardInterrupt):
            decode_audio(model, latent(2), Watch([listener]))
        assert len(listener.done) == patience and isinstance(listener.error, KeyboardInterrupt)
    assert torch.equal(decode_audio(model, latent(2), Watch()), want)


@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.zeros(1, 8, 3, 16), r"shape \[1, 8, 3, 16\], wanted \[batch, 2, frames, 16\]"),
        (torch.zeros(1, 2, 0, 16), r"shape \[1, 2, 0, 16\]"),
        (torch.zeros(2, 3, 16), "connect an audio latent"),
        (torch.full((1, 2, 3, 16), float("nan")), "not finite; sample it again"),
        (torch.full((1, 2, 3, 16), float("inf")), "not finite; sample it again"),
    ],
)
def test_latents_that_cannot_be_decoded_are_refused_before_work(model, bad, message):
    listener = Listener()
    with pytest.raises(InputError, match=message):
        decode_audio(model, bad, Watch([listener]))
    assert listener.total is None


def test_damaged_weights_are_told_by_the_phase_that_found_them():
    broken = load_decoder(GOLDEN_FILE)
    broken.vocoder.bwe_generator.conv_post.weight.data[0, 0, 0] = float("nan")
    with pytest.raises(InputError, match="decode.audio made samples that are not finite"):
        decode_audio(broken, latent(1), Watch())


def test_long_clips_in_chunks_equal_the_whole(monkeypatch):
    model = load_decoder(GOLDEN_FILE, torch.float64)  # so that nothing but a missing frame of context could differ
    z = latent(40, seed=2)
    whole = decode_audio(model, z, Watch())
    monkeypatch.setattr(decoder_module, "CHUNK", 7)
    monkeypatch.setattr(model.vocoder, "_frames", 24)
    monkeypatch.setattr(model.vocoder, "_bandwidth_frames", 48)
    listener = Listener()
    chunked = decode_audio(model, z, Watch([listener]))
    assert listener.done[-1] == listener.total > 1000
    assert (chunked - whole).abs().max() <= 1e-7


@pytest.mark.parametrize("part", ["decoder", "vocoder", "bwe_generator"])
def test_context_of_a_chunk_is_wide_enough_and_not_wasteful(model, part):
    """What lies beyond the stated reach changes nothing; what lies at three quarters of it does."""

    def run(frames, reach, changed):
        generator = torch.Generator().manual_seed(1)
        if part == "decoder":
            x = torch.randn(1, 2, frames, 16, generator=generator, dtype=torch.float64)
            x[:, :, changed] += 1
            return exact.audio_vae.decoder(x, lambda: None)[..., 4 * frames // 2 :, :]
        x = torch.randn(1, 2, 64, frames, generator=generator, dtype=torch.float64)
        x[..., changed] += 1
        stage = getattr(exact.vocoder, part)
        middle = stage(x, lambda: None)
        return middle[..., frames // 2 * stage.hop : (frames // 2 + 1) * stage.hop]

    exact = load_decoder(GOLDEN_FILE, torch.float64)
    reach = exact.audio_vae.decoder.reach if part == "decoder" else getattr(exact.vocoder, part).reach
    frames = 4 * reach
    still = run(frames, reach, slice(0, 0))
    assert torch.equal(run(frames, reach, slice(0, frames // 2 - reach)), still)
    if part != "decoder":
        assert torch.equal(run(frames, reach, slice(frames // 2 + reach + 1, None)), still)
    assert not torch.equal(run(frames, reach, slice(0, frames // 2 - 3 * reach // 4)), still)


@pytest.mark.parametrize("frame", [0, 1, 11, 23])
def test_an_impulse_in_the_latent_starts_at_its_own_mel_row(model, frame):
    z = latent(24)
    other = z.clone()
    other[:, :, frame] += 0.5
    mel, changed = (model.audio_vae.decoder.decode(x, lambda: None) for x in (z, other))
    assert (mel != changed).any(dim=3).all(dim=1)[0].nonzero()[0].item() == max(0, 4 * frame - 3)


@pytest.mark.parametrize("frame", [10, 33, 60])
def test_an_impulse_in_the_mel_is_heard_where_it_is(model, frame):
    """Half of the change's energy lies before, half after the 10 ms of its mel frame, to a video frame (1/24 s)."""
    mel = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(0)) - 3
    other = mel.clone()
    other[:, :, frame] += 1
    change = (model.vocoder(other, lambda: None) - model.vocoder(mel, lambda: None)).square().sum(dim=(0, 1))
    middle = (change.cumsum(0) < change.sum() / 2).sum().item() / 48000
    assert change.sum() > 0 and abs(middle - 0.01 * (frame + 0.5)) < 1 / 24
