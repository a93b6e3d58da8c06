"""The transformer against the independent one in diffusers, on weights made there and read from a file by our loader.

diffusers is an oracle for text-to-video with one sigma only: with other timesteps per token, or another sigma per stream,
it is known to differ from the official model (the golden values cover those).
"""

from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import fill, read_header
from comfyui_ltx25.ltx25.dit import Contexts, DiT, Leg, LegPlan
from comfyui_ltx25.tests.support import diffusers_dit
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.clips import clip_streams
from safetensors.torch import save_file

pytest.importorskip("diffusers")

GRID, AUDIO, TEXT, FRAME_RATE, SIGMA = (3, 2, 4), 10, 7, 24.0, 0.6
TOLERANCE = 1e-5  # relative: max|a - b| / max|b|


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    config = replace(golden.config(), in_channels=8, out_channels=8)
    torch.manual_seed(0)
    oracle = diffusers_dit.build(config)
    for name, parameter in oracle.named_parameters():
        with torch.no_grad():
            if name.endswith("weight") and parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0 if "norm_" in name else 0.0, 0.2)
    with torch.device("meta"):
        dit = DiT(config)
    path = tmp_path_factory.mktemp("oracle") / "transformer.safetensors"
    prefix = "model.diffusion_model."
    save_file({prefix + name: tensor for name, tensor in diffusers_dit.official_weights(oracle, dit).items()}, path)
    fill(dit, read_header(path), prefix, torch.device("cpu"), torch.float32, lambda _: None)
    return oracle, dit


@pytest.mark.parametrize("batched", [False, True])
def test_cond_stg_and_isolated_legs_equal_diffusers(batched, models):
    oracle, dit = models
    torch.manual_seed(1)
    streams = clip_streams(GRID, AUDIO, FRAME_RATE)
    video, audio = (torch.randn(1, len(s.mask), n) for s, n in zip(streams, (8, dit.config.audio_in_channels), strict=True))
    text = Contexts(torch.randn(1, TEXT, dit.config.width), torch.randn(1, TEXT, dit.config.audio_width))
    geometry = dit.prepare(*streams, torch.device("cpu"), torch.float32)
    plan = LegPlan((Leg.COND, Leg.STG, Leg.ISOLATED), frozenset({2}), frozenset({2}), True, True)
    got = dit(video, audio, geometry, dit.tables(geometry, SIGMA, SIGMA), text, None, plan, batched, lambda _: None)
    for leg in plan.legs:
        want = diffusers_dit.velocities(
            oracle, video, audio, text, SIGMA, GRID, FRAME_RATE, **diffusers_dit.leg_arguments(leg, 2)
        )
        for stream, expected in zip(("video", "audio"), want, strict=True):
            error = (getattr(got[leg], stream) - expected).abs().max() / expected.abs().max()
            assert error <= TOLERANCE, f"{leg} {stream}: {error}"


def test_weights_can_be_shared_with_the_oracle_without_a_file(models):
    oracle, dit = models
    with torch.device("meta"):
        other = diffusers_dit.build(dit.config)
    diffusers_dit.share_weights(other, dit)
    for (name, ours), (_, want) in zip(other.named_parameters(), oracle.named_parameters(), strict=True):
        assert torch.equal(ours, want), name
