"""The two projections: official values, and that only the input is scaled."""

import math

import pytest
import torch
from comfyui_ltx25.ltx25.config.text import FeatureConfig
from comfyui_ltx25.ltx25.text import FeatureProjection
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import load_projection

GOLDEN = Golden("text")


@pytest.mark.parametrize("variant", ["bf16", "f32"])
@pytest.mark.parametrize("case", GOLDEN.names("tower/"))
def test_golden_features(case, variant):
    projection = load_projection(GOLDEN.folder / f"text_encoder.{variant}.safetensors")
    video, audio = projection(GOLDEN.output(case, "packed"))
    GOLDEN.check(case, "video_features", video)
    GOLDEN.check(case, "audio_features", audio)


def test_the_factor_scales_the_rows_and_not_the_bias():
    projection = FeatureProjection(FeatureConfig(hidden=8, states=3, video_width=32, audio_width=2)).double()
    for linear, width, factor in ((projection.video_aggregate_embed, 32, 2.0), (projection.audio_aggregate_embed, 2, 0.5)):
        assert math.sqrt(width / 8) == factor
        rows = torch.randn(5, 24, dtype=torch.float64)
        got = projection(rows)[0 if width == 32 else 1]
        torch.testing.assert_close(got, torch.nn.functional.linear(rows * factor, linear.weight, linear.bias))
        torch.testing.assert_close(projection(rows * 0)[0 if width == 32 else 1], linear.bias.expand(5, -1))
