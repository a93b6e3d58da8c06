"""Conditions by their formulas; the official values are in test_denoise.py, case by case."""

from dataclasses import replace

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
    TemporalRegion,
    TemporalRegions,
    apply,
)
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.latents import audio_draft, video_draft
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION
from comfyui_ltx25.tests.support import golden_dit as golden
from hypothesis import given, settings
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
    drafts = apply([TemporalRegion("video", 0.2, 0.3), TemporalRegion("audio", 0.2, 0.3)], {"video": video(), "audio": audio()})
    assert drafts["video"].mask[::8].tolist() == [0, 1, 0]  # frames 1 to 8, 0.04 to 0.375 s
    touched = [i for i, on in enumerate(drafts["audio"].mask.tolist()) if on]
    assert touched == [5, 6, 7, 8]  # 0.17 to 0.21 up to 0.29 to 0.33 s


def test_a_window_that_begins_within_the_last_token_is_taken():
    assert TemporalRegion("video", 0.7, 60.0).apply(video()).mask[::8].tolist() == [0, 0, 1]


def test_masks_combine():
    """A kept token stays kept, whatever mask comes after it."""
    masked = replace(video(), mask=torch.tensor([0.0] * 8 + [1.0] * 16))
    assert TemporalRegion("video", 0.0, 0.3).apply(masked).mask[::8].tolist() == [0, 1, 0]


@given(st.lists(st.sampled_from(["image", "reference", "slots", "keep", "strength", "window"]), max_size=5, unique=True))
@settings(deadline=None)
def test_appended_tokens_are_removed_exactly_as_added(kinds):
    items = {
        "image": Image(IMAGE, 9, 1.0),
        "reference": Reference(CLIP, 1.0, 1, 1),
        "slots": KeyframeSlots((5,), None),
        "keep": KeepMask(CLIP, torch.ones(3, 2, 4), 1.0),
        "strength": AttentionStrength(Image(IMAGE, 4, 0.5), 0.5),
        "window": TemporalRegion("video", 0.0, 0.1),
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
    for item in (LatentIndex(image, 0, 1.0), KeepMask(latent, keep, 1.0), TemporalRegion("video", 0.0, 0.1), Image(image, 5, 1.0), KeyframeSlots((3,), image), Reference(latent, 1.0, 2, 2)):
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


def test_frozen():
    assert apply([Frozen("audio")], {"audio": audio()})["audio"].frozen


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
        (TemporalRegion("video", 0.5, 0.5), "empty"),
        (TemporalRegion("video", 50.0, 60.0), "from 50 s to 60 s touches nothing of the video, which ends at 0.71 s"),
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


def test_slots_twice_are_refused():
    with pytest.raises(InputError, match="twice"):
        apply([KeyframeSlots((5,), None), KeyframeSlots((9,), None)], {"video": video()})
