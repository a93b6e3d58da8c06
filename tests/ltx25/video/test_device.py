"""The video decoder at its published size on a CUDA device, random weights, bf16."""

import copy
import logging

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.video import build_decoder
from comfyui_ltx25.tests.support.files import write_published
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


def rms(x):
    return float(x.square().mean().sqrt())
