"""The video decoder at its published size on a CUDA device, random weights, bf16."""

import copy
import logging
import threading

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.shapes import VideoLatentShape
from comfyui_ltx25.ltx25.video import build_decoder
from comfyui_ltx25.ltx25.video.output import FrameOutput, Part
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.given_noise import GivenNoise
from comfyui_ltx25.tests.support.random_weights import fill_random
from comfyui_ltx25.tests.support.video_oracle import published_conv_vae, share_conv_decoder

log = logging.getLogger(__name__)

NAME = "ltx-2.5-video-vae-conv-bf16"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return read_video_config(read_header(write_published(NAME, tmp_path_factory.mktemp("published"))))


def test_diffusers_at_the_published_size_takes_every_weight_of_ours(config):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        ours, oracle = build_decoder(config.decoder), published_conv_vae()
    share_conv_decoder(oracle, ours)
    assert sum(p.numel() for p in oracle.decoder.parameters()) == sum(p.numel() for p in ours.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_bf16_frames_are_as_close_to_float64_as_diffusers_in_bf16(config):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        ours, oracle = build_decoder(config.decoder), published_conv_vae()
    fill_random(ours, "cuda", torch.bfloat16)
    statistics = ours.per_channel_statistics
    statistics._buffers["mean-of-means"].zero_()  # the oracle's caller applies them: here there is nothing to apply
    statistics._buffers["std-of-means"].fill_(1.0)
    share_conv_decoder(oracle, ours)
    exact = copy.deepcopy(oracle.decoder).double()  # the truth is not computed by our own code
    latent = torch.randn(1, config.decoder.latent_channels, 3, 4, 6, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    truth = exact(latent.double())
    theirs = oracle.decoder(latent).double()
    mine = torch.cat([frames for _, frames in ours.stream(latent, 8)]).permute(3, 0, 1, 2)[None].double()
    own, peer = rms(mine - truth) / rms(truth), rms(theirs - truth) / rms(truth)
    log.info("conv decode: relative rms error %.2e, diffusers %.2e", own, peer)
    assert own <= 2 * peer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_diffusion_frames_in_bf16_are_as_close_to_float64_as_the_plain_twin_in_bf16(tmp_path, monkeypatch):
    config = read_video_config(read_header(write_published("ltx-2.5-video-vae-bf16", tmp_path))).decoder
    with torch.device("meta"):
        decoder = build_decoder(config)
    fill_random(decoder, "cuda", torch.bfloat16)
    plain, exact = copy.deepcopy(decoder), copy.deepcopy(decoder).double()
    latent = torch.randn(1, config.latent_channels, 4, 12, 12, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    mine = frames_of(decoder, latent)
    monkeypatch.setenv("LTX25_KERNELS", "reference")
    theirs, truth = frames_of(plain, latent), frames_of(exact, latent.double())
    own, twin = rms(mine - truth) / rms(truth), rms(theirs - truth) / rms(truth)
    log.info("diffusion decode: relative rms error %.2e, plain bf16 %.2e", own, twin)
    assert own <= 2 * twin


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("frames", [1, 7, 40])
def test_frames_leave_a_card_whole_while_it_goes_on(frames, monkeypatch):
    """Parts are made slowly, their memory is taken again at once, and buffers are smaller than a part."""
    monkeypatch.setattr("comfyui_ltx25.ltx25.video.output._SLOT_BYTES", 1 << 18)
    out, weight = torch.full((4 * frames, 64, 96, 3), float("nan")), torch.randn(8192, 8192, device="cuda")
    want, threads = [], threading.active_count()
    with FrameOutput(out, torch.device("cuda")) as output:
        for number in range(4):
            values = torch.rand(frames, 64, 96, 3, device="cuda") * 2.4 - 1.2
            want.append(values.cpu())
            slow = weight
            for _ in range(4):
                slow = slow @ weight * 1e-2
            pixels = values + 0 * slow[0, 0].clamp(-1, 1)
            output.put(Part(number * frames, 0, 0, pixels))
            del pixels, values
            torch.full((frames, 64, 96, 3), float("nan"), device="cuda")
        assert output.finish()
    torch.testing.assert_close(out, (torch.cat(want) * 0.5 + 0.5).clamp(0, 1), rtol=0, atol=1e-6)
    assert threading.active_count() == threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_decode_that_breaks_off_leaves_no_thread_and_no_copy_behind():
    out, threads = torch.zeros(8, 64, 96, 3), threading.active_count()
    with pytest.raises(KeyboardInterrupt), FrameOutput(out, torch.device("cuda")) as output:
        output.put(Part(0, 0, 0, torch.zeros(4, 64, 96, 3, device="cuda")))
        raise KeyboardInterrupt
    assert threading.active_count() == threads and torch.equal(out[:4], torch.full((4, 64, 96, 3), 0.5))


def frames_of(decoder, latent):
    """Frames before they are clipped to a picture's range, (F, H, W, 3) float64; the same noise whatever the dtype."""
    clip = VideoLatentShape(*latent.shape[1:]).pixels(decoder.compression)
    noise = torch.randn(3, clip.frames, clip.height, clip.width, generator=torch.Generator().manual_seed(7)).bfloat16().to(latent)
    plan = decoder.plan(VideoLatentShape(*latent.shape[1:]), "off", None)
    return torch.cat([part.pixels for part in decoder.stream(latent, GivenNoise(noise), plan, lambda: None)]).double()


def rms(x):
    return float(x.square().mean().sqrt())
