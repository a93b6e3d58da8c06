import pytest
import torch
from comfyui_ltx25.ltx25.video.frames import Given, Unfolded
from comfyui_ltx25.ltx25.video.shuffle import (
    patch_run_order,
    patchify,
    run_order,
    space_to_depth,
    unfold_runs,
)
from comfyui_ltx25.tests.support.golden import Golden
from einops import rearrange

GOLDEN = Golden("video_vae")


def cases(kind):
    return [case for case in GOLDEN.names("shuffle/") if case.removeprefix("shuffle/").rpartition("_")[0] == kind]


def last(x):
    """(1, C, T, H, W) -> (T, H, W, C)."""
    return x[0].permute(1, 2, 3, 0)


def first(x):
    return x.permute(3, 0, 1, 2)[None]


def unpatchify(cells, patch):
    """(..., h, w, c * column * row) -> (..., H, W, c)."""
    return rearrange(cells, "... h w (c column row) -> ... (h row) (w column) c", row=patch, column=patch)


def test_patches_are_the_official_ones_and_go_back():
    case = "shuffle/patchify4"
    cells = patchify(last(GOLDEN.input(case, "x")), 4)
    GOLDEN.check(case, "y", first(cells))
    GOLDEN.check(case, "back", first(unpatchify(cells, 4)))


@pytest.mark.parametrize("case", cases("space_to_depth"))
def test_folding_is_the_official_one(case):
    x, stride = last(GOLDEN.input(case, "x")), tuple(GOLDEN.input(case, "stride"))
    if stride[0] == 2:
        x = torch.cat((x[:1], x))
    GOLDEN.check(case, "y", first(space_to_depth(x, stride)))


@pytest.mark.parametrize("case", cases("space_to_depth_mean"))
def test_the_folded_skip_is_the_official_one(case):
    x, stride = last(GOLDEN.input(case, "x")), tuple(GOLDEN.input(case, "stride"))
    if stride[0] == 2:
        x = torch.cat((x[:1], x))
    channels = GOLDEN.index[case]["outputs"]["y"]["shape"][1]
    GOLDEN.check(case, "y", first(space_to_depth(x, stride).unflatten(-1, (channels, -1)).mean(-1)))


@pytest.mark.parametrize("case", cases("depth_to_space") + cases("linear_pixel_shuffle"))
@pytest.mark.parametrize("step", [1, 2, 100])
def test_the_unfolding_stage_gives_the_official_frames_in_any_portions(case, step):
    x, stride = GOLDEN.input(case, "x"), tuple(GOLDEN.input(case, "stride"))
    channels_last = "linear" in case
    x = x[0] if channels_last else last(x)
    stage = Unfolded(Given(run_order(x.movedim(-1, 0), stride).movedim(0, -1).contiguous()), stride)
    frames = torch.cat([stage.advance(min(at + step, stage.length), 0, 0) for at in range(0, stage.length, step)])
    GOLDEN.check(case, "y", frames[None] if channels_last else first(frames))


@pytest.mark.parametrize("case", cases("linear_pixel_shuffle"))
def test_unfolding_without_the_drop_is_the_official_one(case):
    x, stride = GOLDEN.input(case, "x")[0], tuple(GOLDEN.input(case, "stride"))
    runs = run_order(x.movedim(-1, 0), stride).movedim(0, -1).contiguous()
    out = torch.empty(GOLDEN.index[case]["outputs"]["y_keep_first"]["shape"][1:])
    unfold_runs(runs, None, stride, out)
    GOLDEN.check(case, "y_keep_first", out[None])


def test_patches_in_run_order_unfold_to_the_same_pixels():
    cells = torch.randn(2, 3, 4, 48)
    runs = patch_run_order(cells.movedim(-1, 0), 4).movedim(0, -1).contiguous()
    out = torch.empty(2, 12, 16, 3)
    unfold_runs(runs, None, (1, 4, 4), out)
    assert torch.equal(out, unpatchify(cells, 4))


def test_every_official_case_of_the_folder_has_a_test():
    shuffles = {case for kind in ("space_to_depth", "space_to_depth_mean", "depth_to_space", "linear_pixel_shuffle") for case in cases(kind)}
    assert shuffles | {"shuffle/patchify4"} == set(GOLDEN.names("shuffle/"))
    families = ("encode/", "conv_decode/", "diffusion_decode/", "na3d/", "rope3d/", "shuffle/", "tiling/")  # each checked where it is tested
    assert {case for family in families for case in GOLDEN.names(family)} == set(GOLDEN.index)
