"""The duration head: official values, diffusers, the published layout, and frames on the grid."""

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import fill, read_header
from comfyui_ltx25.ltx25.checkpoint.fill import check
from comfyui_ltx25.ltx25.config.duration import DurationConfig, read_duration_config
from comfyui_ltx25.ltx25.duration import DurationHead, frames_of
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.shapes import MAX_FRAMES, PUBLISHED_COMPRESSION
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden

GOLDEN = Golden("upscale")
CASES = [name for name in GOLDEN.names("duration/") if name != "duration/frames"]


@pytest.mark.parametrize("stored", ["bf16", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_official_values(case, stored):
    header = read_header(GOLDEN.folder / f"duration_head.{stored}.safetensors")
    config = read_duration_config(header)
    with torch.device("meta"):
        head = DurationHead(config)
    fill(head, header, config.prefix, torch.device("cpu"), torch.float32, lambda n: None)
    GOLDEN.check(case, "seconds", head(GOLDEN.input(case, "video_tokens"), GOLDEN.input(case, "audio_tokens")))


@pytest.mark.parametrize("row", GOLDEN.output("duration/frames", "table"), ids=lambda row: "-".join(map(str, row)))
def test_official_frames(row):
    seconds, rate, least, most, frames = row
    assert frames_of(seconds, rate, least, most, PUBLISHED_COMPRESSION) == frames


@pytest.mark.parametrize("least", [0.0, 0.01])
def test_a_least_length_below_one_frame_is_one_frame(least):
    """The official code fails here."""
    assert frames_of(0.01, 24.0, least, 20.0, PUBLISHED_COMPRESSION) == 1


@pytest.mark.parametrize("least, most", [(2.0, 1.0), (-1.0, 5.0), (float("nan"), 5.0)])
def test_an_empty_range_is_refused(least, most):
    with pytest.raises(InputError, match="no range"):
        frames_of(3.0, 24.0, least, most, PUBLISHED_COMPRESSION)


@pytest.mark.parametrize(("length", "rate", "frames"), [(1.0, 24.0, 17), (2.0, 24.0, 41), (20.0, 24.0, 473), (20.0, 23.976, 473), (0.1, 24.0, 1)])
def test_a_range_that_holds_no_length_of_the_grid_gives_the_longest_below(length, rate, frames):
    assert frames_of(5.0, rate, length, length, PUBLISHED_COMPRESSION) == frames


def test_no_more_frames_than_a_clip_may_have():
    assert frames_of(3000.0, 240.0, 0.0, 3600.0, PUBLISHED_COMPRESSION) == frames_of(1.0, 240.0, 3600.0, 3600.0, PUBLISHED_COMPRESSION) == MAX_FRAMES


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_an_answer_that_is_no_number_is_refused(seconds):
    with pytest.raises(InputError, match=f"answered {seconds} s"):
        frames_of(seconds, 24.0, 1.0, 20.0, PUBLISHED_COMPRESSION)


def test_published_file_is_filled_whole(tmp_path):
    header = read_header(write_published("ltx-2.5-duration-head-bf16", tmp_path))
    config = read_duration_config(header)
    assert config == DurationConfig("duration_head.", 4096, 2048, 256, 1, 4, 256)
    with torch.device("meta"):
        head = DurationHead(config)
    assert len(check(head, header, config.prefix, ())) == 15
    assert sum(p.numel() for p in head.parameters()) == 1_903_361


def test_agrees_with_diffusers():
    pytest.importorskip("diffusers")
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    torch.manual_seed(0)
    theirs = LTX2DurationHead(video_cross_attention_dim=32, audio_cross_attention_dim=16, pooler_hidden_dim=8, num_queries=1, num_pooler_heads=2, mlp_hidden_dim=8)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = theirs.state_dict()
    stacked = {}
    for kind in ("weight", "bias"):
        parts = [next(state.pop(name) for name in list(state) if name.endswith(f"to_{x}.{kind}")) for x in "qkv"]
        stacked[f"attention_pooler.cross_attn.in_proj_{kind}"] = torch.cat(parts)
    for name, value in state.items():
        where, _, kind = name.rpartition(".")
        stacked[f"attention_pooler.cross_attn.out_proj.{kind}" if "to_out" in where else name] = value
    ours = DurationHead(DurationConfig("", 32, 16, 8, 1, 2, 8))
    ours.load_state_dict({name.replace("attention_pooler.query_tokens.", "attention_pooler.query_tokens"): value for name, value in stacked.items()})
    video, audio = torch.randn(1, 9, 32), torch.randn(1, 7, 16)
    for v, a in ((video, audio), (video, None), (None, audio)):
        torch.testing.assert_close(ours(v, a), theirs(v, a).reshape(1), atol=1e-5, rtol=1e-5)


def test_no_context_at_all_is_refused():
    with pytest.raises(InputError, match="neither"):
        DurationHead(DurationConfig("", 4, 4, 8, 1, 2, 8))(None, None)
