import pytest
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, VideoShape
from comfyui_ltx25.ltx25.video.diffusion_plan import SLACK, choose, diffusion_plans, reach_cells
from comfyui_ltx25.ltx25.video.tiling import spans
from comfyui_ltx25.tests.support.files import write_published
from comfyui_ltx25.tests.support.golden import Golden
from hypothesis import given
from hypothesis import strategies as st

GOLDEN = Golden("video_vae")
# Official plans cut time as well and blend what overlaps; ours cuts height and width alone, and keeps only what is exact.
NOT_OURS = {"tiling/trapezoid", "tiling/splits", "tiling/conv_auto", "tiling/diffusion_auto"}
GIB = 1 << 30


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = write_published("ltx-2.5-video-vae-bf16", tmp_path_factory.mktemp("published"))
    return read_video_config(read_header(path)).decoder


def plans(config, width, height, frames, tiled=True):
    shape = VideoShape(frames, height, width).latent(PUBLISHED_COMPRESSION)
    return diffusion_plans(config, shape, frames, 2, tiled)


def test_no_official_case_is_left_out():
    elsewhere = {"tiling/latent_floor"}  # test_diffusion_decoder.py
    assert set(GOLDEN.names("tiling/")) == NOT_OURS | elsewhere


@given(length=st.integers(7, 300), count=st.integers(1, 8), reach=st.integers(1, 6))
def test_t1_t2_kept_parts_cover_the_axis_once_and_are_far_from_every_cut(length, count, reach):
    try:
        cut = spans(length, count, reach)
    except ValueError:
        return
    assert len(cut) == count and len({span.stop - span.start for span in cut}) == 1
    assert [cell for span in cut for cell in range(span.first, span.last)] == list(range(length))
    for span in cut:
        assert span.start >= 0 and span.stop <= length
        assert span.start == 0 or span.first - span.start >= reach
        assert span.stop == length or span.stop - span.last >= reach


def test_t3_tiles_reach_beyond_what_they_keep_by_the_whole_receptive_field(config):
    """8 blocks x 5 cells x 4 px and 2 blocks x 2 cells x 8 px: 192 px; upstream's own defaults overlap by less."""
    assert reach_cells(config) * 32 == 192
    assert any(plan.tiles > 1 for plan in plans(config, 1920, 1088, 121))


@pytest.mark.parametrize("frames", [121, 241, 481])
def test_n1_every_plan_covers_the_clip_and_no_tensor_of_a_slab_reaches_2_31_elements(config, frames):
    for plan in plans(config, 1920, 1088, frames):
        for row in plan.rows:
            for column in plan.columns:
                tokens = (row.stop - row.start) * (column.stop - column.start) * 64
                assert (plan.slab + 11) * tokens * 256 < 2**31
        for cut, length in ((plan.rows, 34), (plan.columns, 60)):
            assert [cell for span in cut for cell in range(span.first, span.last)] == list(range(length))
        assert plan.units == plan.tiles * len(plan.chunks)
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
        assert plan.bytes * SLACK <= free * GIB
        return plan

    assert chosen(768, 448, 25, 3).tiles == 1
    assert chosen(1280, 704, 121, 18).tiles == 1
    assert chosen(1920, 1088, 121, 23).tiles == 1
    assert chosen(1920, 1088, 121, 11).tiles > 1
    assert chosen(1920, 1088, 481, 23).slab >= 4


def test_memory_hardly_grows_with_the_length_of_the_clip(config):
    short, long = (choose(plans(config, 1280, 704, frames), None) for frames in (121, 961))
    assert short.slab == long.slab and long.bytes < 1.8 * short.bytes
