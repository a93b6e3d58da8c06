import contextlib
import logging
from itertools import count

import pytest
import torch
from comfyui_ltx25.ltx25.config.video_layout import ConvDecoderConfig, DiffusionDecoderConfig, Resample, ResStack
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.hdr import CURVES
from comfyui_ltx25.ltx25.instrument import Sink, Watch
from comfyui_ltx25.ltx25.video import ConvDecoder, DiffusionDecoder, decode_video
from comfyui_ltx25.tests.support.memory import OutOfMemoryAt, peak_bytes_held
from comfyui_ltx25.tests.support.random_weights import fill_random

TINY = ConvDecoderConfig(latent_channels=4, width=3, patch=2, blocks=(ResStack(1), Resample((2, 2, 2), 2), ResStack(1)))
GATED = DiffusionDecoderConfig(
    latent_channels=3,
    patch=2,
    head_dim=8,
    channels=(8, 8),
    depths=(1, 1),
    kernels=((1, 1, 1), (1, 1, 1)),
    upsamples=(Resample((1, 2, 2), 1),),
    time_width=8,
    time_scale=1000.0,
    steps=1,
    output="x0",
    gates=True,
)


class Seen(Sink):
    """Keeps what was reported; cancels at tick `cancel_at`."""

    def __init__(self, cancel_at=None):
        self.ticks, self.texts, self.cancel_at, self.error = [], [], cancel_at, None

    def check(self):
        if self.cancel_at is not None and len(self.ticks) >= self.cancel_at:
            raise KeyboardInterrupt

    def ticked(self, phase):
        self.ticks.append((phase.done, phase.total))
        self.texts.append(phase.text)

    def closed(self, phase):
        self.error, self.name = phase.error, phase.name


class Reluctant(ConvDecoder):
    """Runs out of memory whenever a chunk is longer than `most` frames."""

    most = 8

    def stream(self, latent, chunk_frames):
        for first, frames in super().stream(latent, chunk_frames):
            if chunk_frames > self.most and first:  # after some frames are out already
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            yield first, frames


def made(kind=ConvDecoder):
    """In float64, so that chunk lengths cannot show in the float32 frames."""
    with torch.device("meta"):
        module = kind(TINY)
    return fill_random(module, "cpu", torch.float64)


def decode(decoder, latent, seen=None, **settings):
    settings = {"tiling": "auto", "seed": 0, "free": None} | settings
    return decode_video(decoder, latent, watch=Watch([seen] if seen else []), **settings)


def latent(b=1, t=13, h=2, w=3):
    return torch.randn(b, 4, t, h, w, generator=torch.Generator().manual_seed(0))


def test_images_are_float32_on_the_cpu_between_0_and_1_in_clip_order():
    decoder, z = made(), latent(b=2, t=5)
    images = decode(decoder, z)
    assert images.shape == (2 * 9, 8, 12, 3) and images.dtype == torch.float32 and images.is_contiguous()
    for item in range(2):
        want = torch.cat([frames for _, frames in decoder.stream(z[item : item + 1], 1000)])
        torch.testing.assert_close(images[item * 9 : item * 9 + 9], ((want + 1) / 2).clamp(0, 1).float(), atol=2e-6, rtol=0)
    assert images.min() >= 0 and images.max() <= 1


@pytest.mark.parametrize("t, h, w", [(1, 1, 1), (2, 3, 1), (3, 1, 5)])
def test_one_frame_and_odd_sizes_decode(t, h, w):
    assert decode(made(), latent(t=t, h=h, w=w)).shape == (2 * (t - 1) + 1, 4 * h, 4 * w, 3)


def test_h1_progress_is_told_per_chunk_and_ends_at_the_total():
    seen = Seen()
    decode(made(), latent(b=2, t=22), seen)  # 43 frames: 6 chunks of 8 per item
    assert [done for done, _ in seen.ticks] == list(range(1, 13))
    assert {total for _, total in seen.ticks} == {12}
    assert seen.texts[0] == "chunk 1 of 12" and seen.texts[-1] == "chunk 12 of 12"
    assert seen.name == "decode.video" and seen.error is None


def test_h1_a_cancel_takes_effect_at_the_next_chunk_and_the_decoder_works_afterwards():
    decoder, z, seen = made(), latent(t=22), Seen(cancel_at=2)
    with pytest.raises(KeyboardInterrupt):
        decode(decoder, z, seen)
    assert len(seen.ticks) == 2 and isinstance(seen.error, KeyboardInterrupt)
    assert torch.equal(decode(decoder, z), decode(made(), z))


def test_m1_out_of_memory_goes_on_with_smaller_chunks_and_says_so(caplog):
    decoder, z, seen = made(Reluctant), latent(b=2, t=22), Seen()
    decoder.most = 2
    before = z.clone()
    with caplog.at_level(logging.WARNING):
        images = decode(decoder, z, seen)
    torch.testing.assert_close(images, decode(made(), z), atol=2e-6, rtol=0)
    assert torch.equal(z, before)
    assert [record.getMessage() for record in caplog.records] == [
        "decode.video ran out of memory with 8 frames at a time; going on with 4 frames at a time.",
        "decode.video ran out of memory with 4 frames at a time; going on with 2 frames at a time.",
    ]
    assert "out of memory with 8 frames at a time, going on with 4 frames at a time" in seen.texts
    done = [done for done, _ in seen.ticks]
    assert done == sorted(done) and seen.ticks[-1][0] == seen.ticks[-1][1]


def test_m1_out_of_memory_at_the_smallest_chunk_names_the_way_out_and_keeps_the_latent():
    decoder, z = made(Reluctant), latent(t=5)
    decoder.most, before = 0, z.clone()
    with pytest.raises(torch.OutOfMemoryError, match="does not fit .* even with 1 frames at a time; unload other models"):
        decode(decoder, z)
    assert torch.equal(z, before)


@pytest.mark.parametrize(("kind", "config"), [(ConvDecoder, TINY), (DiffusionDecoder, GATED)])
def test_m1_memory_that_runs_out_while_weights_are_prepared_changes_no_frame(kind, config):
    """At whichever operation: what a weight became before it stays, and is not done to it again."""

    def fresh():
        with torch.device("meta"):
            module = kind(config)
        return fill_random(module, "cpu", torch.float32)

    z = torch.randn(1, config.latent_channels, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    want = decode(fresh(), z)
    for number in count():
        decoder = fresh()
        with OutOfMemoryAt(number) as memory, contextlib.suppress(torch.OutOfMemoryError):
            decoder._prepare()
        if not memory.reached:
            break
        assert torch.equal(decode(decoder, z), want), f"after operation {number}"
    assert number > 10


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    decoder = made()
    decoder.decoder.conv_in.conv.bias = None
    decoder.decoder.conv_in.conv.weight.data = torch.zeros(3, 3, 3, 3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="channels"):
        decode(decoder, latent())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_is_refused(bad):
    z = latent()
    z[0, 1, 2, 0, 0] = bad
    with pytest.raises(InputError, match="decode.video got a latent with values that are not finite"):
        decode(made(), z)


def test_frames_that_are_not_finite_are_an_error_that_names_the_phase():
    decoder = made()
    decoder.decoder.conv_out.conv.bias.data[0] = float("inf")
    with pytest.raises(InputError, match="decode.video made values that are not finite"):
        decode(decoder, latent())


@pytest.mark.parametrize("shape", [(1, 16, 2, 2, 2), (4, 2, 2, 2), (1, 4, 0, 2, 2)])
def test_a_latent_of_another_shape_is_refused_with_both_shapes(shape):
    with pytest.raises(InputError, match=r"has shape \(.*\), and this video VAE decodes \(batch, 4, frames, height, width\)"):
        decode(made(), torch.zeros(shape))


def test_an_unknown_tiling_is_refused():
    with pytest.raises(InputError, match="tiling is 'on', wanted 'auto' or 'off'"):
        decode(made(), latent(), tiling="on")


@pytest.mark.parametrize("curve", CURVES)
def test_linear_light_is_the_curve_of_the_signal_by_its_published_formula(curve):
    """Written out in float64 from AMPAS S-2016-001 and ARRI's LogC3 for EI 800, on the frames of a plain decode."""
    decoder, z = made(), 3 * latent(t=5)
    signal = decode(decoder, z).double()
    assert (signal == 0).any() and (signal == 1).any()
    if curve == "ACEScct":
        light = torch.where(signal > 0.155251141552511, 2 ** (17.52 * signal - 9.72), (signal - 0.0729055341958355) / 10.5402377416545)
        to_709 = [[1.70505, -0.62179, -0.08326], [-0.13026, 1.1408, -0.01055], [-0.024, -0.12897, 1.15297]]
        light = light @ torch.tensor(to_709, dtype=torch.float64).T
    else:
        log = (10 ** ((signal - 0.385537) / 0.247190) - 0.052272) / 5.555556
        light = torch.where(signal >= 5.367655 * 0.010591 + 0.092809, log, (signal - 0.092809) / 5.367655)
    got = decode(decoder, z, transfer=curve)
    assert got.dtype == torch.float32 and got.is_contiguous() and got.shape == signal.shape
    torch.testing.assert_close(got.double(), light.clamp(min=0), rtol=1e-4, atol=1e-5)
    assert got.min() >= 0 and got.max() > 50


def test_a_transfer_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="transfer 'hlg' does not exist"):
        decode(made(), latent(), transfer="hlg")


def test_m7_a_queue_of_decodes_holds_no_more_memory_than_one():
    decoder, z = made(), latent(t=22)

    def queue(times):
        for _ in range(times):
            yield decode(decoder, z)

    decode(decoder, z)  # weights are re-ordered on the first use
    one, five = (peak_bytes_held(lambda n=n: queue(n)) for n in (1, 5))
    assert five <= one + 43 * 8 * 12 * 3 * 4  # the frames of the decode before are still held by the loop
