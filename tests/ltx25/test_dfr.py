"""Diffusion fidelity rendering: canvas, tiles, what each tile is told, and whole rounds on the tiny model."""

from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25 import dfr
from comfyui_ltx25.ltx25.conditions import Image, KeyframeIndex, KeyframeSlots, Reference, apply
from comfyui_ltx25.ltx25.dfr import Canvas, Keyframes, Tile, refine, rounds_of, stitch, tile_conditions, tiles_of
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.guidance import OFF, Bins
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.latents import video_draft
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION
from comfyui_ltx25.tests.support.engine import engine, job
from comfyui_ltx25.tests.support.tiny import tiny_files
from hypothesis import given
from hypothesis import strategies as st

STEP = PUBLISHED_COMPRESSION.frames
UPSCALER = tiny_files().temporal_upscaler


@pytest.mark.parametrize(
    "frames, canvas, segment",
    [(121, 121, 24), (97, 97, 32), (113, 121, 24), (89, 97, 32), (65, 65, 32), (9, 25, 24), (241, 241, 24), (161, 161, 32), (41, 49, 24)],
)
def test_canvas_is_the_least_padding_and_the_longer_segment_where_they_are_equal(frames, canvas, segment):
    made = Canvas.of(frames)
    assert (made.frames, made.segment) == (canvas, segment)
    assert made.keyframes == tuple(range(segment, canvas, segment)) and made.keyframes[-1] == canvas - 1


@given(st.integers(1, 500).map(lambda n: STEP * n + 1))
def test_a_canvas_is_its_own_canvas(frames):
    """So stage 2, which is given the padded clip, finds the same keyframes as stage 1."""
    canvas = Canvas.of(frames)
    assert Canvas.of(canvas.frames) == canvas and 0 <= canvas.frames - frames < 32


def test_a_single_frame_has_no_canvas():
    with pytest.raises(InputError, match="no room for keyframes; the least is 9"):
        Canvas.of(1)


def test_first_round_of_121_frames_is_two_tiles_with_one_segment_of_lead_in():
    """Written out by hand: five segments of 48 frames; the second tile goes back one segment and drops it and the seam."""
    ((one, two),) = rounds_of((24, 48, 72, 96, 120), 1, PUBLISHED_COMPRESSION)
    assert one == Tile(0, 144, 0, 19, (48, 96, 144), (24, 72, 120), 0)
    assert two == Tile(96, 240, 12, 31, (96, 144, 192, 240), (120, 168, 216), 7)


def test_second_round_takes_slots_and_keyframes_of_the_first_as_seams():
    _, tiles = rounds_of((32, 64), 2, PUBLISHED_COMPRESSION)
    assert [(tile.start, tile.end) for tile in tiles] == [(0, 64), (0, 128), (64, 192), (128, 256)]
    assert [tile.anchors for tile in tiles] == [(64,), (64, 128), (64, 128, 192), (128, 192, 256)]
    assert [tile.slots for tile in tiles] == [(32,), (32, 96), (96, 160), (160, 224)]


@given(st.lists(st.integers(2, 6), min_size=1, max_size=9), st.integers(1, 6))
def test_tiles_own_every_latent_frame_once_and_in_order(spans, count):
    seams = [STEP * sum(spans[: i + 1]) for i in range(len(spans))]
    tiles = tiles_of(seams, count, PUBLISHED_COMPRESSION)
    clip = torch.arange(seams[-1] // STEP + 1.0).view(1, 1, -1, 1, 1)
    assert torch.equal(stitch([clip[:, :, tile.first : tile.last] for tile in tiles], tiles), clip)
    assert len(tiles) == min(count, len(spans))
    for tile in tiles:
        assert (tile.first, tile.last) == (tile.start // STEP, tile.end // STEP + 1)
        assert set(tile.anchors) == {seam for seam in seams if tile.start <= seam <= tile.end}
        assert all(tile.start < slot < tile.end for slot in tile.slots)
    owned = [tile.end for tile in tiles]
    assert owned == sorted(set(owned)) and owned[-1] == seams[-1]
    for before, tile in zip(tiles, tiles[1:], strict=False):
        assert tile.first + tile.dropped == before.end // STEP + 1 and tile.start < before.end  # from just behind the shared seam on


@pytest.mark.parametrize("seams", [[], [24, 24], [48, 24], [8, 32], [20, 48]])
def test_seams_that_make_no_tiles_are_refused(seams):
    with pytest.raises(InputError, match="must rise by multiples of 8, 16 at least"):
        tiles_of(seams, 2, PUBLISHED_COMPRESSION)


def test_what_a_tile_is_told_stands_at_its_own_frames_with_the_official_marks_and_masks():
    """Tokens of tile 96..240 of the round above: clip, picture, four keyframes, three slots, in this order."""
    (tile,) = rounds_of((24, 48, 72, 96, 120), 1, PUBLISHED_COMPRESSION)[0][1:]
    draw = torch.Generator().manual_seed(0)
    video = torch.randn(1, 12, tile.last - tile.first, 2, 3, generator=draw)
    known = {frame: torch.randn(1, 12, 1, 2, 3, generator=draw) for frame in (48, 96, 144, 192, 240)}
    pictures = [Image(torch.randn(1, 12, 1, 2, 3, generator=draw), frame, 0.9) for frame in (0, 100, 241)]
    items = tile_conditions(tile, video, known, pictures, PUBLISHED_COMPRESSION)
    draft = apply(items, {"video": video_draft(video, 48.0, PUBLISHED_COMPRESSION, 12)})["video"]
    clip = draft.shape.tokens
    extra = [(4, 5), (0, 1), (48, 49), (96, 97), (144, 145), (24, 25), (72, 73), (120, 121)]
    assert draft.tokens == clip + 6 * len(extra)
    torch.testing.assert_close(draft.positions[0, clip::6] * 48, torch.tensor(extra, dtype=torch.float32))
    torch.testing.assert_close(draft.mask[clip::6], torch.tensor([0.1, *[0.05] * 4, *[1.0] * 3]))
    assert draft.marked[clip:].tolist() == [False] * 30 + [True] * 18
    assert draft.marked[:6].all() and not draft.marked[6:clip].any() and (draft.mask[:clip] == 1).all()
    for place, frame in enumerate(tile.anchors, 1):
        assert torch.equal(draft.clean[0, clip + 6 * place : clip + 6 * place + 6].T.reshape(12, 1, 2, 3), known[frame][0])
    for place, latent in enumerate((3, 9, 15), 5):  # slots start from the latent frame nearest to them
        assert torch.equal(draft.latent[0, clip + 6 * place : clip + 6 * place + 6].T.reshape(12, 2, 3), video[0, :, latent])
    assert not draft.latent[:, clip : clip + 30].any() and not draft.clean[:, clip + 30 :].any()


def test_a_picture_at_the_head_of_a_tile_goes_in_place():
    tile = Tile(48, 96, 6, 13, (48, 96), (72,), 0)
    video = torch.randn(1, 12, 7, 2, 3)
    known = {48: video[:, :, :1], 96: video[:, :, -1:]}
    items = tile_conditions(tile, video, known, [Image(torch.ones(1, 12, 1, 2, 3), 48, 1.0)], PUBLISHED_COMPRESSION)
    draft = apply(items, {"video": video_draft(video, 48.0, PUBLISHED_COMPRESSION, 12)})["video"]
    assert not draft.mask[:6].any() and (draft.clean[:, :6] == 1).all() and draft.tokens == draft.shape.tokens + 3 * 6


@pytest.fixture(scope="module")
def small():
    return engine()


@pytest.fixture(scope="module")
def clip(small):
    """(job, keyframes): 33 frames, padded to 49: seven latent frames of 2 x 3 cells, keyframes at 24 and 48."""
    draw = torch.Generator().manual_seed(3)
    asked = job(small, frames=7, negative=None, video_guidance=Bins.constant(OFF), audio_guidance=Bins.constant(OFF))
    asked = replace(asked, video=torch.randn(1, 128, 7, 2, 3, generator=draw))
    return asked, Keyframes(torch.randn(1, 128, 2, 2, 3, generator=draw), (24, 48))


class Recorded:
    """The engine, with every job it samples kept."""

    def __init__(self, engine):
        self.engine, self.jobs, self.compression = engine, [], engine.compression

    def sample(self, job, watch):
        self.jobs.append((job, made := self.engine.sample(job, watch)))
        return made

    def upscale(self, latent, file, watch):
        return self.engine.upscale(latent, file, watch)


@pytest.fixture(scope="module")
def two_rounds(small, clip):
    """(what was made, every job and its result), with a picture at frame 0 and one at -1: frame 32, the last one asked for."""
    asked, keyframes = clip
    recorded, before = Recorded(small), asked.video.clone()
    told = replace(asked, conditions=(Image(torch.randn(1, 128, 1, 2, 3), -1, 1.0), Image(torch.randn(1, 128, 1, 2, 3), 0, 1.0)))
    made = refine(recorded, told, keyframes, UPSCALER, 2, 33, Watch())
    assert torch.equal(asked.video, before)
    return made, recorded.jobs


def test_rounds_double_the_frames_that_were_asked_for(small, clip, two_rounds):
    made, jobs = two_rounds
    assert small.video_shape(made.video).frames == 4 * 32 + 1 and made.audio is None and made.video.isfinite().all()
    assert len(jobs) == 6 and made.forwards == len(made.seconds) == 24
    asked, keyframes = clip
    none = refine(small, asked, keyframes, UPSCALER, 0, 33, Watch())
    assert torch.equal(none.video, asked.video[:, :, :5]) and none.forwards == 0


def test_every_tile_is_sampled_as_the_official_round_does(clip, two_rounds):
    """Video alone, four steps from 0.975, ancestral with eta 0.5, at most 60 frames/s, each tile with noise of its own."""
    asked, jobs = clip[0], [one for one, _ in two_rounds[1]]
    assert all(one.audio is None and (one.sampler, one.eta, one.schedule) == ("euler_ancestral", 0.5, None) for one in jobs)
    assert {one.sigmas for one in jobs} == {dfr.SIGMAS} and pytest.approx((0.975, 0.909375, 0.725, 0.421875, 0.0)) == dfr.SIGMAS
    assert [one.frame_rate for one in jobs] == [48.0] * 2 + [60.0] * 4
    assert [one.seed - asked.seed for one in jobs] == [1000, 1001, 2000, 2001, 2002, 2003]


def test_a_round_is_its_tiles_joined_and_what_it_makes_is_known_to_the_next(small, clip, two_rounds):
    asked, keyframes = clip
    made, jobs = two_rounds
    first, second = rounds_of(keyframes.frames, 2, small.compression)
    results = [result for _, result in jobs]
    assert torch.equal(made.video, stitch([result.video for result in results[2:]], second)[:, :, :17])
    doubled = small.upscale(asked.video, UPSCALER, Watch())
    for (one, _), tile in zip(jobs, first, strict=False):
        assert torch.equal(one.video, doubled[:, :, tile.first : tile.last])
    again = small.upscale(stitch([result.video for result in results[:2]], first), UPSCALER, Watch())
    # Keyframes of round 2, by frame: the given ones, and those round 1 made, the earlier tile's where two made one.
    bag = {96: keyframes.latent[:, :, :1], 192: keyframes.latent[:, :, 1:]}
    bag |= {2 * frame: results[1].keyframes[:, :, [i]] for i, frame in enumerate(first[1].slots)}
    bag |= {2 * frame: results[0].keyframes[:, :, [i]] for i, frame in enumerate(first[0].slots)}
    assert set(first[0].slots) & set(first[1].slots), "the lead-in repeats a slot"
    for (one, _), tile in zip(jobs[2:], second, strict=True):
        assert torch.equal(one.video, again[:, :, tile.first : tile.last])
        anchors = [item for item in one.conditions if isinstance(item, KeyframeIndex)]
        assert [item.frame + tile.start for item in anchors] == list(tile.anchors)
        assert all(torch.equal(item.latent, bag[frame]) and item.strength == 0.95 for item, frame in zip(anchors, tile.anchors, strict=True))
        (slots,) = [item for item in one.conditions if isinstance(item, KeyframeSlots)]
        assert [frame + tile.start for frame in slots.frames] == list(tile.slots)


def test_f2_a_picture_stays_at_its_moment_through_the_rounds(small, clip, two_rounds):
    """The last one asked for is frame 64 and 128 after one and two rounds, whatever the padding behind it."""
    plans = [(number, tile) for number, tiles in enumerate(rounds_of(clip[1].frames, 2, small.compression), 1) for tile in tiles]
    for (one, _), (number, tile) in zip(two_rounds[1], plans, strict=True):
        frames = {item.frame + tile.start for item in one.conditions if isinstance(item, Image)}
        assert frames == {frame for frame in (0, 32 * 2**number) if tile.start <= frame <= tile.end}


@pytest.mark.parametrize("video, groups", [({"cfg": 3.0, "modality": 3.0}, "cond+uncond"), ({"modality": 3.0}, "cond")])
def test_guidance_of_the_first_stage_that_is_none_of_a_round_is_no_notice(small, clip, video, groups):
    """Its modality, and a negative prompt that only its sound is guided by."""
    asked, keyframes = clip
    guided = {"negative": asked.positive, "video_guidance": Bins.constant(replace(OFF, **video)), "audio_guidance": Bins.constant(replace(OFF, cfg=7.0))}
    made = refine(small, replace(asked, **guided), keyframes, UPSCALER, 1, 49, Watch())
    assert not made.notices and {"+".join(group) for group in made.legs} == {groups}


def test_b1_a_clip_of_a_batch_equals_a_run_alone(small, clip):
    """1e-4: products of another shape, through eight forwards and an upscaler."""
    asked, keyframes = clip
    both = replace(asked, video=torch.cat([asked.video + 1, asked.video]))
    twice = Keyframes(torch.cat([keyframes.latent + 1, keyframes.latent]), keyframes.frames)
    made = refine(small, both, twice, UPSCALER, 1, 49, Watch())
    alone = refine(small, replace(asked, seed=asked.seed + 1), keyframes, UPSCALER, 1, 49, Watch())
    torch.testing.assert_close(made.video[1:], alone.video, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rounds": 3}, "3 rounds, wanted 0 to 2"),
        ({"clip_frames": 57}, "57 frames are wanted of a clip of 49"),
        ({"keyframes": Keyframes(torch.zeros(1, 128, 2, 2, 3), (16, 40))}, r"stand at \[16, 40\] .* the last one must stand at frame 48"),
        ({"keyframes": Keyframes(torch.zeros(1, 128, 2, 4, 6), (24, 48))}, "take them from the sampling"),
        ({"keyframes": Keyframes(torch.zeros(1, 128, 3, 2, 3), (24, 48))}, "take them from the sampling"),
        ({"upscaler": tiny_files().spatial_upscaler}, "use an upscaler that doubles time"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_no_round_can_be_made_of_is_refused_before_anything_is_sampled(small, clip, change, words):
    asked, keyframes = clip
    given = {"keyframes": keyframes, "upscaler": UPSCALER, "rounds": 1, "clip_frames": 33, **change}
    recorded = Recorded(small)
    with pytest.raises(InputError, match=words):
        refine(recorded, asked, given["keyframes"], given["upscaler"], given["rounds"], given["clip_frames"], Watch())
    assert not recorded.jobs


@pytest.mark.parametrize(
    "change, words",
    [({"conditions": (Reference(torch.zeros(1, 128, 7, 1, 1), 1.0, 1, 1),)}, "pictures only, and the clip carries Reference"), ({"frame_rate": 100.0}, r"2 round\(s\) make 400 frames a second of 100, and 240")],
)
def test_a_job_no_round_can_be_made_of_is_refused(small, clip, change, words):
    asked, keyframes = clip
    with pytest.raises(InputError, match=words):
        refine(small, replace(asked, **change), keyframes, UPSCALER, 2, 33, Watch())
