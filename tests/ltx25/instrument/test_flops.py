"""Counts against figures published or worked out by hand for the published sizes; units of the tables: TFLOP."""

from fractions import Fraction

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.audio import read_audio_config
from comfyui_ltx25.ltx25.config.text import TowerConfig
from comfyui_ltx25.ltx25.config.transformer import read_transformer
from comfyui_ltx25.ltx25.config.upscaler import UpscalerConfig
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.dit.modality import Leg, LegPlan
from comfyui_ltx25.ltx25.instrument.flops import (
    ONE_LEG,
    audio_decode_flops,
    connector_flops,
    group_flops,
    projection_flops,
    tower_flops,
    upscale_flops,
    video_decode_flops,
)
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, AudioLatentShape, VideoLatentShape, VideoShape
from comfyui_ltx25.ltx25.upscaler import LatentUpscaler
from comfyui_ltx25.tests.support.files import write_published
from torch.utils.flop_counter import FlopCounterMode

TERA = 1e12
FOUR = LegPlan(tuple(Leg), frozenset([28]), frozenset([28]), video=True, audio=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Name of a published file -> its header."""
    folder = tmp_path_factory.mktemp("published")
    return lambda name: read_header(write_published(name, folder))


@pytest.fixture(scope="module")
def transformer(published):
    return read_transformer(published("ltx-2.5-22b-dev-transformer-bf16"))


@pytest.mark.parametrize(
    ("video", "audio", "linear", "attention", "shared"),
    [
        (1344, 26, 39.0, 2.5, 131),
        (4032, 51, 108.5, 16.2, 405),
        (7488, 101, 198.1, 50.8, 813),
        (14080, 126, 368.4, 168.7, 1766),
        (336, 26, 13.0, 0.4, 39),
    ],
)
def test_one_leg_and_the_shared_step_of_four(transformer, video, audio, linear, attention, shared):
    one = group_flops(transformer[0], ONE_LEG, video, audio, 1024)
    assert one.linear / TERA == pytest.approx(linear, abs=0.1)
    assert one.attention / TERA == pytest.approx(attention, abs=0.05)
    assert group_flops(transformer[0], FOUR, video, audio, 1024).total / TERA == pytest.approx(shared, abs=0.6)


def test_legs_that_share_nothing_cost_one_forward_each(transformer):
    cfg = LegPlan((Leg.COND, Leg.UNCOND), frozenset(), frozenset(), video=True, audio=True)
    one, two = (group_flops(transformer[0], plan, 4032, 51, 1024).total for plan in (ONE_LEG, cfg))
    block = 2 * 4032 * (4 * 4096**2 + 4096 * 32) + 4 * 4032**2 * 4096  # block 0's video self-attention, shared
    audio = 2 * 51 * (4 * 2048**2 + 2048 * 32) + 4 * 51**2 * 2048
    heads = 2 * (4032 * 4096 * 256 + 51 * 2048 * 256)
    assert two == pytest.approx(2 * one - block - audio - heads, rel=1e-12)


def test_a_stream_that_is_not_there_costs_nothing(transformer):
    video = group_flops(transformer[0], ONE_LEG, 4032, 0, 1024).total
    audio = group_flops(transformer[0], ONE_LEG, 0, 51, 1024).total
    assert 0 < audio < video < group_flops(transformer[0], ONE_LEG, 4032, 51, 1024).total


def test_text_of_one_prompt(published, transformer):
    tower = TowerConfig.read(published("gemma4-12b-with-proj-ltx-2.5-bf16"))
    whole, short = tower_flops(tower, 1024), tower_flops(tower, 200)
    assert whole.linear / TERA == pytest.approx(22.32, abs=0.01)
    assert whole.attention / TERA == pytest.approx(0.48, abs=0.01)
    assert short.linear / TERA == pytest.approx(4.36, abs=0.01)
    assert projection_flops(tower, transformer[1], 1024).total / TERA == pytest.approx(2.37, abs=0.01)
    connectors = connector_flops(transformer[1], 1024)
    assert connectors.linear / TERA == pytest.approx(4.13, abs=0.01)
    assert connectors.attention / TERA == pytest.approx(0.21, abs=0.01)


@pytest.mark.parametrize(("clip", "tera"), [((25, 448, 768), 21.8), ((121, 576, 1024), 176.3), ((121, 704, 1280), 269.3)])
def test_conv_decoder(published, clip, tera):
    config = read_video_config(published("ltx-2.5-video-vae-conv-bf16")).decoder
    latent = VideoShape(*clip).latent(PUBLISHED_COMPRESSION)
    assert video_decode_flops(config, latent).total / TERA == pytest.approx(tera, rel=0.005)


@pytest.mark.parametrize(
    ("clip", "linear", "attention"), [((25, 448, 768), 15.1, 5.9), ((121, 576, 1024), 109.0, 49.1), ((121, 704, 1280), 166.5, 75.0)]
)
def test_diffusion_decoder(published, clip, linear, attention):
    config = read_video_config(published("ltx-2.5-video-vae-bf16")).decoder
    flops = video_decode_flops(config, VideoShape(*clip).latent(PUBLISHED_COMPRESSION))
    assert flops.linear / TERA == pytest.approx(linear, rel=0.005)
    assert flops.attention / TERA == pytest.approx(attention, rel=0.01)


@pytest.mark.parametrize(("frames", "giga"), [(26, 63 + 155 + 73), (126, 308 + 771 + 362)])
def test_audio_decoder(published, frames, giga):
    config = read_audio_config(published("ltx-2.5-audio-vae-bf16"))
    assert audio_decode_flops(config, AudioLatentShape(8, frames, 16)).total / 1e9 == pytest.approx(giga, rel=0.02)


@pytest.mark.parametrize("space, rational", [(2, False), (Fraction(3, 2), True)])
def test_an_upscale_counts_what_torch_counts(space, rational):
    """Of the rational one all but its blur, a hundredth of a convolution."""
    config = UpscalerConfig(16, 32, 2, Fraction(space), 1, rational)
    with torch.device("meta"):
        model, latent = LatentUpscaler(config), torch.zeros(1, 16, 3, 4, 6)
    with FlopCounterMode(display=False) as counted:
        model(latent)
    assert upscale_flops(config, VideoLatentShape(16, 3, 4, 6)).total == pytest.approx(counted.get_total_flops(), rel=0.02 if rational else 1e-9)
