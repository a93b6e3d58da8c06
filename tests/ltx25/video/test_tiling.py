import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, VideoShape
from comfyui_ltx25.ltx25.video.diffusion_plan import choose, diffusion_plans, overlap_cells
from comfyui_ltx25.ltx25.video.tiling import spans, trapezoid
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden
from hypothesis import given
from hypothesis import strategies as st

GOLDEN = Golden("video_vae")
# Official plans cut time as well, with ramps that start at zero; ours never cuts time and has its own sizes.
NOT_OURS = {"tiling/splits", "tiling/conv_auto", "tiling/diffusion_auto"}
GIB = 1 << 30


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = write_published("ltx-2.5-video-vae-bf16", tmp_path_factory.mktemp("published"))
    return read_video_config(read_header(path)).decoder


def plans(config, width, height, frames, tiled=True):
    shape = VideoShape(frames, height, width).latent(PUBLISHED_COMPRESSION)
    return diffusion_plans(config, shape, frames, 2, tiled)


def test_ramps_are_the_official_ones():
    wanted = GOLDEN.index["tiling/trapezoid"]["outputs"]
    symmetric = [name for name in wanted if name.endswith("_sym")]
    assert len(symmetric) == 3  # the others start at zero, for cuts in time
    for name in symmetric:
        GOLDEN.check("tiling/trapezoid", name, trapezoid(*(int(n) for n in name.split("_")[:3])))


def test_no_official_case_is_left_out():
    elsewhere = {"tiling/trapezoid", "tiling/latent_floor"}
    assert set(GOLDEN.names("tiling/")) == NOT_OURS | elsewhere


@given(length=st.integers(7, 300), count=st.integers(1, 8), overlap=st.integers(1, 12))
def test_t1_t2_spans_cover_the_axis_and_their_shares_add_up_to_one(length, count, overlap):
    try:
        cut = spans(length, count, overlap)
    except ValueError:
        return
    assert cut[0].start == 0 and cut[-1].stop == length and len(cut) == count
    total = torch.zeros(length * 4)
    for span in cut:
        total[span.start * 4 : span.stop * 4] += span.weights(4)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-6, rtol=0)
    assert all(before.stop - after.start >= overlap for before, after in zip(cut[:-1], cut[1:], strict=True))


def test_t3_tiles_overlap_by_the_whole_receptive_field(config):
    """8 blocks x 5 cells x 4 px and 2 blocks x 2 cells x 8 px: 192 px; upstream's own defaults overlap by less."""
    assert overlap_cells(config) * 32 == 192
    for plan in plans(config, 1920, 1088, 121):
        for cut in (plan.rows, plan.columns):
            assert all(span.lead in (0, *range(6, 999)) and span.trail in (0, *range(6, 999)) for span in cut)


@pytest.mark.parametrize("frames", [121, 241, 481])
def test_n1_every_plan_covers_the_clip_and_no_tensor_of_a_slab_reaches_2_31_elements(config, frames):
    for plan in plans(config, 1920, 1088, frames):
        for row in plan.rows:
            for column in plan.columns:
                tokens = (row.stop - row.start) * (column.stop - column.start) * 64
                assert (plan.slab + 11) * tokens * 256 < 2**31
        for cut, length in ((plan.rows, 34), (plan.columns, 60)):
            shares = torch.zeros(length)
            for span in cut:
                shares[span.start : span.stop] += span.weights(1)
            torch.testing.assert_close(shares, torch.ones(length), atol=1e-6, rtol=0)
        assert plan.chunks[0][0] == 0 and plan.chunks[-1][1] == frames
        assert all(before[1] == after[0] for before, after in zip(plan.chunks[:-1], plan.chunks[1:], strict=True))
        assert all(0 < stop - first <= plan.slab for first, stop in plan.chunks)


def test_plans_need_less_and_less_memory_and_tiles_come_last(config):
    found = plans(config, 1280, 704, 121)
    assert all(before.bytes > after.bytes for before, after in zip(found[:-1], found[1:], strict=True))
    assert [plan.tiles > 1 for plan in found] == sorted(plan.tiles > 1 for plan in found)
    assert all(plan.tiles == 1 for plan in plans(config, 1280, 704, 121, tiled=False))


def test_m1_untiled_wherever_it_fits_and_tiles_on_small_cards(config):
    def chosen(width, height, frames, free):
        plan = choose(plans(config, width, height, frames), int(free * GIB))
        assert plan.bytes <= free * GIB
        return plan

    assert chosen(768, 448, 25, 3).tiles == 1
    assert chosen(1280, 704, 121, 18).tiles == 1
    assert chosen(1920, 1088, 121, 23).tiles == 1
    assert chosen(1920, 1088, 121, 11).tiles > 1
    assert chosen(1920, 1088, 481, 23).slab >= 4


def test_memory_hardly_grows_with_the_length_of_the_clip(config):
    short, long = (choose(plans(config, 1280, 704, frames), None) for frames in (121, 961))
    assert short.slab == long.slab and long.bytes < 1.8 * short.bytes
