"""Conditions by their formulas; the official values are in test_denoise.py, case by case."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from comfyui_ltx25.ltx25.conditions import (
    AttentionStrength,
    Frozen,
    Image,
    KeepMask,
    KeyframeIndex,
    KeyframeSlots,
    LatentIndex,
    Reference,
    ReferenceAudio,
    TemporalRegions,
    apply,
    check_together,
    of_clips,
)
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.latents import APPENDED_SEED, Noise, audio_draft, video_draft
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION
from comfyui_ltx25.tests.support import golden_dit as golden
from hypothesis import assume, given, settings
from hypothesis import strategies as st

IMAGE = torch.randn(1, 12, 1, 2, 4)
CLIP = torch.randn(1, 12, 3, 2, 4)


def video(batch=1):
    return video_draft(torch.randn(batch, 12, 3, 2, 4), 24.0, PUBLISHED_COMPRESSION, 12)


def audio(batch=1):
    return audio_draft(torch.randn(batch, 8, 18, 2), 8, 2)


def test_first_frame_goes_in_place_and_stays_marked():
    draft = Image(IMAGE, 0, 0.75).apply(video())
    assert draft.tokens == 24 and draft.mask.tolist() == [0.25] * 8 + [1.0] * 16
    assert torch.equal(draft.clean[:, :8], IMAGE.flatten(2).mT)
    assert draft.marked[:8].all()


@pytest.mark.parametrize("frame, at", [(1, 1), (8, 8), (16, 16), (-1, 16), (-2, 15), (-16, 1)])
def test_f2_image_stands_at_exactly_its_frame(frame, at):
    """Also one that is no multiple of the latent step; negative counts from the clip's end, not from the token list's."""
    draft = Image(CLIP[:, :, :1], frame, 1.0).apply(Image(IMAGE, 5, 1.0).apply(video()))
    assert draft.tokens == 24 + 8 + 8
    torch.testing.assert_close(draft.positions[0, -8:] * 24, torch.tensor([[at, at + 1.0]] * 8))
    assert torch.equal(draft.positions[1:, -8:], draft.positions[1:, :8])  # the clip's own grid
    assert not draft.marked[24:].any() and not draft.mask[24:].any() and not draft.latent[:, 24:].any()


def test_pictures_may_come_in_any_order():
    """The clip's own tokens are the same, and beside it stands the same content at the same places with the same masks."""
    items = [Image(torch.randn(1, 12, 1, 2, 4), frame, strength) for frame, strength in ((0, 1.0), (-1, 0.5), (9, 0.75))]
    clip = video()
    given, other = (apply(order, {"video": clip})["video"] for order in (items, items[::-1]))
    for name in ("clean", "mask", "positions", "latent", "marked"):
        axis = {"mask": 0, "marked": 0}.get(name, 1)
        one, two = (getattr(draft, name) for draft in (given, other))
        own, (last, ninth) = one.narrow(axis, 0, 24), one.narrow(axis, 24, 16).chunk(2, axis)
        assert torch.equal(two, torch.cat([own, ninth, last], axis)), name
    assert torch.equal(given.clean[:, :8], items[0].latent.flatten(2).mT) and given.tokens == 24 + 16


@pytest.mark.parametrize(
    "items, words",
    [
        ((Image(IMAGE, 0, 1.0), Image(IMAGE, 0, 0.5)), "latent frame 0 was given content twice"),
        ((Image(IMAGE, -17, 1.0), Image(IMAGE, 0, 1.0)), "latent frame 0 was given content twice"),
        ((LatentIndex(CLIP[:, :, :2], 1, 1.0), LatentIndex(IMAGE, 2, 1.0)), "latent frame 2 was given content twice"),
    ],
)
def test_two_contents_in_one_place_are_refused_in_any_order(items, words):
    """The one given last would be in the clip, and nothing would say that the other is not."""
    for order in (items, items[::-1]):
        with pytest.raises(InputError, match=words):
            apply(order, {"video": video()})


@pytest.mark.parametrize("frame", [0, 9])
def test_two_pictures_at_one_frame_are_refused_before_they_meet_a_clip(frame):
    with pytest.raises(InputError, match=f"frame {frame} was given 2 pictures and can have one; give each its own frame"):
        check_together((Image(IMAGE, frame, 1.0), Image(IMAGE, 5, 1.0), Image(CLIP[:, :, :1], frame, 0.5)), ["video"])


def test_a_picture_that_has_no_effect_is_in_nobodys_way():
    draft = apply((Image(IMAGE, 0, 1.0), Image(torch.zeros_like(IMAGE), 0, 0.0)), {"video": video()})["video"]
    assert torch.equal(draft.clean[:, :8], IMAGE.flatten(2).mT)


def test_noise_beside_the_clip_is_dealt_by_time_and_place_not_by_the_order_of_conditions():
    """Tokens of one condition have the plain draw."""
    items = {"slots": KeyframeSlots((5, 13), None), "last": Image(IMAGE, -1, 0.5), "guide": KeyframeIndex(CLIP, 0, 0.5, 17), "reference": Reference(CLIP, 0.9, 1, 2)}
    clip = video()

    def noise(kinds):
        """By kind, what its tokens are given."""
        draft = apply([items[kind] for kind in kinds], {"video": clip})["video"]
        counts = [apply([items[kind]], {"video": clip})["video"].tokens - 24 for kind in kinds]
        return dict(zip(kinds, Noise(3, {"video": draft}, torch.device("cpu")).draw()["video"][0, 24:].split(counts), strict=True))

    wanted = noise(tuple(items))
    for order in permutations(items):
        got = noise(order)
        assert all(torch.equal(got[kind], wanted[kind]) for kind in items), order
    for kind in items:
        alone = noise((kind,))[kind]
        assert torch.equal(alone, torch.randn(alone.shape, generator=torch.Generator().manual_seed(3 + APPENDED_SEED)))


def test_negative_frame_that_is_the_first_goes_in_place():
    assert Image(IMAGE, -17, 1.0).apply(video()).tokens == 24


@pytest.mark.parametrize("frame", [17, -18])
def test_frame_outside_the_clip_is_refused(frame):
    with pytest.raises(InputError, match="a clip of 17 frames; use -17 to 16"):
        Image(IMAGE, frame, 1.0).apply(video())


@pytest.mark.parametrize("frame, spans", [(0, [[0, 1], [1, 9]]), (4, [[4, 12], [12, 20]])])
def test_f6_frames_in_the_middle_follow_the_official_rule(frame, spans):
    """Content of several frames has the short first latent frame at the clip's start only, as the official code has it."""
    draft = KeyframeIndex(CLIP[:, :, :2], frame, 1.0, 9).apply(video())
    torch.testing.assert_close(draft.positions[0, 24::8] * 24, torch.tensor(spans, dtype=torch.float32))


def test_reference_time_and_size_factors():
    draft = Reference(torch.randn(1, 12, 2, 1, 2), 1.0, 2, 4).apply(video())
    # frames 0..1 and 1..9 of the reference are four clip frames long each, moved back by three frames, from 0 on
    torch.testing.assert_close(draft.positions[0, 24::2] * 24, torch.tensor([[0.0, 1.0], [1.0, 33.0]]))
    assert draft.positions[1, 24].tolist() == [0, 64] and draft.positions[2, 25].tolist() == [64, 128]


def test_reference_audio_tokens_and_positions_are_the_official_ones():
    case = golden.inputs("denoise/reference_audio")
    (item,) = golden.INDEX["denoise/reference_audio"]["inputs"]["audio_items"]
    draft = ReferenceAudio(case["reference_audio_latent"], 1.0).apply(audio())
    assert torch.equal(draft.clean[:, 18:], golden.value(item["tokens"]))
    assert torch.equal(draft.positions[None, :, 18:], golden.value(item["positions"]))


def test_slots_are_read_back_where_they_were_put():
    draft = KeyframeSlots((5, 13), CLIP[:, :, :2]).apply(Image(IMAGE, 3, 1.0).apply(video()))
    tokens = torch.arange(draft.tokens).float().view(1, -1, 1).expand(1, -1, 12)
    later = Image(IMAGE, 9, 1.0).apply(draft)
    assert draft.marked[32:].all() and draft.mask[32:].min() == 1
    assert torch.equal(draft.latent[:, 32:40], CLIP[:, :, 0].flatten(2).mT)
    assert torch.equal(later.keyframes(torch.cat([tokens, tokens[:, :8]], 1)), draft.keyframes(tokens))
    assert draft.keyframes(tokens)[0, 0].flatten().tolist() == list(range(32, 48))


def test_keep_mask_blends_content_and_mask():
    keep = torch.zeros(3, 2, 4)
    keep[0], keep[1] = 1.0, 0.5
    before = video()
    draft = KeepMask(CLIP, keep, 0.9).apply(before)
    torch.testing.assert_close(draft.mask, torch.tensor([0.1] * 8 + [0.55] * 8 + [1.0] * 8))
    torch.testing.assert_close(draft.clean[:, 8:16], (before.clean + CLIP.flatten(2).mT)[:, 8:16] / 2)


def test_window_of_time_in_both_streams():
    drafts = apply([TemporalRegions("video", ((0.2, 0.3),)), TemporalRegions("audio", ((0.2, 0.3),))], {"video": video(), "audio": audio()})
    assert drafts["video"].mask[::8].tolist() == [0, 1, 0]  # frames 1 to 8, 0.04 to 0.375 s
    touched = [i for i, on in enumerate(drafts["audio"].mask.tolist()) if on]
    assert touched == [5, 6, 7, 8]  # 0.17 to 0.21 up to 0.29 to 0.33 s


def test_a_window_that_begins_within_the_last_token_is_taken():
    assert TemporalRegions("video", ((0.7, 60.0),)).apply(video()).mask[::8].tolist() == [0, 0, 1]


def test_masks_combine():
    """A kept token stays kept, whatever mask comes after it."""
    masked = replace(video(), mask=torch.tensor([0.0] * 8 + [1.0] * 16))
    assert TemporalRegions("video", ((0.0, 0.3),)).apply(masked).mask[::8].tolist() == [0, 1, 0]


@given(st.lists(st.sampled_from(["image", "reference", "slots", "keep", "strength", "window"]), max_size=5, unique=True))
@settings(deadline=None)
def test_appended_tokens_are_removed_exactly_as_added(kinds):
    items = {
        "image": Image(IMAGE, 9, 1.0),
        "reference": Reference(CLIP, 1.0, 1, 1),
        "slots": KeyframeSlots((5,), None),
        "keep": KeepMask(CLIP, torch.ones(3, 2, 4), 1.0),
        "strength": AttentionStrength(Image(IMAGE, 4, 0.5), 0.5),
        "window": TemporalRegions("video", ((0.0, 0.1),)),
    }
    draft = video()
    for kind in kinds:
        draft = items[kind].apply(draft)
    count = 24 + 8 * ("image" in kinds) + 24 * ("reference" in kinds) + 8 * ("slots" in kinds) + 8 * ("strength" in kinds)
    for each in (draft.latent[0], draft.clean[0], draft.mask, draft.positions[0], draft.marked):
        assert each.shape[0] == count
    assert draft.attention is None or draft.attention.shape == (count, count)
    tokens = torch.randn(1, count, 12)
    assert torch.equal(draft.grid(tokens), video().grid(tokens[:, :24]))


def test_inputs_are_never_written_to():
    latent, image, keep = torch.randn(1, 12, 3, 2, 4), IMAGE.clone(), torch.ones(3, 2, 4)
    copies = latent.clone(), image.clone(), keep.clone()
    draft = video_draft(latent, 24.0, PUBLISHED_COMPRESSION, 12)
    held = draft.clean.clone(), draft.mask.clone(), draft.positions.clone()
    for item in (LatentIndex(image, 0, 1.0), KeepMask(latent, keep, 1.0), TemporalRegions("video", ((0.0, 0.1),)), Image(image, 5, 1.0), KeyframeSlots((3,), image), Reference(latent, 1.0, 2, 2)):
        item.apply(draft)
    assert all(torch.equal(a, b) for a, b in zip(copies, (latent, image, keep), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, (draft.clean, draft.mask, draft.positions), strict=True))


def test_one_image_serves_a_batch():
    draft = Image(IMAGE, 5, 1.0).apply(Image(IMAGE, 0, 1.0).apply(video(3)))
    assert draft.clean.shape == (3, 32, 12) and torch.equal(draft.clean[2, :8], draft.clean[0, 24:])


def test_full_attention_needs_no_table_unless_conditions_must_not_see_each_other():
    first = AttentionStrength(Image(IMAGE, 4, 1.0), 1.0).apply(video())
    assert first.attention is None
    second = AttentionStrength(Image(IMAGE, 9, 1.0), 1.0).apply(first)
    assert not second.attention[24:32, 32:].any() and second.attention[:24].min() == 1


def test_who_sees_whom_does_not_depend_on_the_order_of_conditions():
    """What has full attention sees all that has; what has less sees only the clip."""
    items = {"first": Image(IMAGE, 5, 1.0), "weak": AttentionStrength(Image(IMAGE, 9, 1.0), 0.5), "last": Image(IMAGE, -1, 1.0), "weaker": AttentionStrength(Image(IMAGE, 3, 1.0), 0.25)}
    place = {5: "first", 9: "weak", 16: "last", 3: "weaker"}
    for order in permutations(items):
        draft = apply([items[kind] for kind in order], {"video": video()})["video"]
        at = {place[round(float(draft.positions[0, token, 0]) * 24)]: token for token in range(24, 56, 8)}
        seen = {(one, other) for one in at for other in at if draft.attention[at[one], at[other]]}
        assert seen == {("first", "last"), ("last", "first"), *((kind, kind) for kind in at)}, order
        assert [float(draft.attention[0, at[kind]]) for kind in items] == [1.0, 0.5, 1.0, 0.25]


def test_frozen():
    drafts = apply([Frozen("audio")], {"video": video(), "audio": audio()})
    assert drafts["audio"].frozen and not drafts["video"].frozen


PARTS = st.sampled_from(["picture", "weak picture", "free picture", "guide", "first stretch", "last stretch", "keep", "slots", "keep sound"])


@given(st.lists(PARTS, max_size=4, unique=True).flatmap(lambda kinds: st.tuples(st.just(kinds), st.permutations(kinds))), st.booleans())
@settings(deadline=None)
def test_conditions_mean_the_same_in_any_order_and_free_nothing_that_another_keeps(orders, masked):
    """The draft of the clip itself, or the words of the refusal. One picture of the three: two at one frame are in a row."""
    items = {
        "picture": LatentIndex(IMAGE, 0, 1.0),
        "weak picture": Image(IMAGE, 0, 0.25),
        "free picture": Image(IMAGE, -17, 0.0),
        "guide": Image(IMAGE, 9, 0.5),
        "first stretch": TemporalRegions("video", ((0.0, 0.02),)),
        "last stretch": TemporalRegions("video", ((0.5, 0.6),)),
        "keep": Frozen("video"),
        "slots": KeyframeSlots((5,), None),
        "keep sound": Frozen("audio"),
    }
    assume(sum("picture" in kind for kind in orders[0]) < 2)
    clip = video()
    if masked:
        clip = replace(clip, mask=torch.tensor(([0.0] * 4 + [1.0] * 4) * 3))

    def outcome(kinds):
        try:
            return apply([items[kind] for kind in kinds], {"video": clip, "audio": audio()})["video"]
        except InputError as error:
            return str(error)

    one, two = (outcome(kinds) for kinds in orders)
    if isinstance(one, str) or isinstance(two, str):
        assert isinstance(one, str) and isinstance(two, str)
        return
    assert torch.equal(one.mask[:24], two.mask[:24]) and torch.equal(one.clean[:, :24], two.clean[:, :24]) and one.frozen == two.frozen
    assert bool((one.mask[:24] <= clip.mask).all())


@pytest.mark.parametrize(
    "strength, kept, content",
    [(0.0, 0.0, "draft"), (0.5, 0.0, "picture"), (1.0, 0.0, "picture")],
)
def test_a_picture_where_a_mask_keeps_the_frame_stays_as_kept_as_it_was(strength, kept, content):
    """Strength 0 leaves what is there alone; another puts the picture there, and the mask keeps that."""
    masked = replace(video(), mask=torch.tensor([0.0] * 8 + [1.0] * 16))
    draft = apply([Image(IMAGE, 0, strength)], {"video": masked})["video"]
    assert draft.mask[:8].tolist() == [kept] * 8
    assert torch.equal(draft.clean[:, :8], {"draft": masked.clean[:, :8], "picture": IMAGE.flatten(2).mT}[content])


@pytest.mark.parametrize("strength, first", [(0.0, 0.0), (0.25, 0.75), (1.0, 0.0)])
def test_a_stretch_elsewhere_leaves_a_picture_its_strength(strength, first):
    draft = apply([Image(IMAGE, 0, strength), TemporalRegions("video", ((0.5, 0.6),))], {"video": video()})["video"]
    assert draft.mask[::8].tolist() == [first, 0.0, 1.0]


def test_a_second_picture_of_strength_0_takes_nothing_from_the_first():
    clip = {"video": video()}
    one, two = (apply(items, clip)["video"] for items in ([Image(IMAGE, 0, 1.0)], [Image(IMAGE, 0, 1.0), Image(-IMAGE, 0, 0.0)]))
    assert torch.equal(one.mask, two.mask) and torch.equal(one.clean, two.clean)


def test_stretches_of_several_items_are_all_made():
    items = [TemporalRegions("video", ((0.0, 0.02),)), Image(IMAGE, 9, 1.0), TemporalRegions("video", ((0.5, 0.6),))]
    assert apply(items, {"video": video()})["video"].mask[:24:8].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "items, says",
    [
        ([Frozen("video"), Frozen("audio")], "nothing is left to make: the video and the audio are to stay"),
        ([Frozen("video"), Image(IMAGE, 0, 1.0)], "the video is to stay exactly as it is, and a picture is to stand"),
        ([Frozen("video"), Image(IMAGE, -17, 1.0)], "a picture is to stand"),
        ([Frozen("video"), KeepMask(CLIP, torch.ones(3, 2, 4), 1.0)], "parts of it"),
        ([Frozen("video"), KeyframeSlots((5,), None)], "keyframes of it are to be made"),
        ([Frozen("audio"), TemporalRegions("audio", ((0.0, 0.2),))], "the audio is to stay exactly as it is, and stretches of it"),
        ([KeepMask(CLIP, torch.ones(3, 2, 4), 1.0), Frozen("audio")], "masks and conditions keep all of the video and the audio"),
        ([KeyframeSlots((5,), None), KeyframeSlots((9,), None)], "twice"),
    ],
)
def test_what_cannot_both_be_is_refused_in_either_order(items, says):
    for order in (items, items[::-1]):
        with pytest.raises(InputError, match=says) as error:
            apply(order, {"video": video(), "audio": audio()})
        assert str(error.value).count(". ") == 0


def test_a_picture_of_strength_0_does_nothing_to_a_kept_video_either():
    assert apply([Frozen("video"), Image(IMAGE, 0, 0.0)], {"video": video(), "audio": audio()})["video"].frozen


def test_slots_are_made_even_where_all_of_the_clip_is_kept():
    drafts = apply([KeepMask(CLIP, torch.ones(3, 2, 4), 1.0), KeyframeSlots((5,), None)], {"video": video()})
    assert drafts["video"].mask.tolist() == [0.0] * 24 + [1.0] * 8


@pytest.mark.parametrize(
    "item, says",
    [
        (LatentIndex(torch.randn(1, 12, 1, 2, 5), 0, 1.0), "encode it at the size of the clip"),
        (LatentIndex(torch.randn(2, 12, 1, 2, 4), 0, 1.0), r"wanted \(1 or 1"),
        (LatentIndex(CLIP, 1, 1.0), "does not fit a clip of 3"),
        (LatentIndex(IMAGE, -1, 1.0), "does not fit"),
        (LatentIndex(IMAGE, 0, 1.5), "strength 1.5"),
        (Image(torch.full_like(IMAGE, torch.nan), 0, 1.0), "not finite"),
        (Reference(CLIP[:, :4], 1.0, 1, 1), "wanted"),
        (Reference(CLIP, 1.0, 0, 1), "must be 1 or more"),
        (KeyframeSlots((), None), "rising numbers from 0 to 16"),
        (KeyframeSlots((5, 5), None), "rising"),
        (KeyframeSlots((17,), None), "rising"),
        (KeyframeSlots((5,), CLIP), "3 keyframes were given for 1 slots"),
        (KeepMask(CLIP, torch.ones(2, 2, 4), 1.0), "must cover"),
        (TemporalRegions("video", ((0.5, 0.5),)), "empty"),
        (TemporalRegions("video", ((50.0, 60.0),)), "from 50 s to 60 s touches nothing of the video, which ends at 0.71 s"),
        (TemporalRegions("video", ((0.0, 0.2), (0.71, 0.8))), "from 0.71 s to 0.8 s touches nothing"),
        (AttentionStrength(Image(IMAGE, 5, 1.0), 1.5), "wanted 0"),
        (AttentionStrength(Image(IMAGE, 5, 1.0), torch.ones(3)), "for 8 appended tokens"),
        (ReferenceAudio(torch.zeros(1, 8, 3, 2), 1.0), "the latent has no audio"),
    ],
)
def test_conditions_that_do_not_fit_are_refused_in_one_sentence(item, says):
    with pytest.raises(InputError, match=says) as error:
        apply([item], {"video": video()})
    assert str(error.value).count(". ") == 0


BATCH = torch.randn(3, 12, 1, 2, 4)
ONE_EACH = {
    "picture": lambda latent: Image(latent, 0, 1.0),
    "less seen": lambda latent: AttentionStrength(KeyframeIndex(latent, 8, 1.0, 1), 0.5),
    "slots": lambda latent: KeyframeSlots((5,), latent),
}


@pytest.mark.parametrize("make", ONE_EACH.values(), ids=ONE_EACH)
@pytest.mark.parametrize("clips, batch, own", [((2,), 1, [2]), ((1, 2), 2, [1, 2]), ((0, 1, 2), 3, [0, 1, 2]), ((), 2, [0, 1, 2]), ((3,), 1, [0, 1, 2]), ((1, 2), 1, [0, 1, 2]), (None, 6, [0, 1, 2, 0, 1, 2]), (None, 4, [0, 1, 2]), ((0, 1, 2, 0, 1, 2), 6, [0, 1, 2]), (None, 2, [0, 1, 2])])
def test_clips_of_a_batch_have_the_items_that_are_theirs(make, clips, batch, own):
    """All of them where the numbers are not those of these clips: then it is refused for its batch."""
    item = of_clips(make(BATCH), clips, batch)
    item = getattr(item, "item", item)
    assert torch.equal(item.initial if isinstance(item, KeyframeSlots) else item.latent, BATCH[own])


def test_an_item_for_all_clips_is_any_clips_own():
    for item in (Image(IMAGE, 0, 1.0), Frozen("video"), TemporalRegions("video", ((0.1, 0.3),)), KeyframeSlots((5,), None)):
        assert of_clips(item, (2,), 1) is item
