"""What a clip is told, through the whole engine on the tiny checkpoint: what is kept is kept to the bit, the rest is made."""

from dataclasses import dataclass, replace

import pytest
import torch
from comfyui_ltx25.ltx25.conditions import (
    AttentionStrength,
    Frozen,
    HeldTo,
    Image,
    KeyframeIndex,
    KeyframeSlots,
    Reference,
    ReferenceAudio,
    TemporalRegions,
)
from comfyui_ltx25.ltx25.engine import Engine, Files, Options, SampleJob
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.guidance import OFF, Bins
from comfyui_ltx25.ltx25.guidance_text import by_sigma
from comfyui_ltx25.ltx25.image import prepare_images
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.latents import Noise, audio_positions, video_draft, video_positions
from comfyui_ltx25.ltx25.moments import fit_latent, fit_wave
from comfyui_ltx25.ltx25.preparing import prepare
from comfyui_ltx25.ltx25.schedule import DISTILLED_STAGE2
from comfyui_ltx25.ltx25.shapes import AudioLatentShape, VideoLatentShape
from comfyui_ltx25.tests.support.tiny import tiny_files

CPU = torch.device("cpu")
SIGMAS = (1.0, 0.6, 0.3, 0.0)


@pytest.fixture(scope="module")
def engine():
    tiny = tiny_files()
    files = Files(tiny.distilled, tiny.text_encoder, tiny.video_vae, tiny.audio_vae)
    return Engine.open(files, Options("auto", "auto", "auto", "memory"), CPU)


@pytest.fixture(scope="module")
def job(engine):
    """A clip of 17 frames of 96 x 64 px with sound; its latents are given content, as a retake or second stage has."""
    generator = torch.Generator().manual_seed(0)
    return SampleJob(
        video=torch.randn(1, 128, 3, 2, 3, generator=generator),
        audio=torch.randn(1, 8, 18, 16, generator=generator),
        video_mask=None,
        audio_mask=None,
        frame_rate=24.0,
        seed=5,
        positive=engine.encode("A lighthouse.", Watch()),
        negative=None,
        video_guidance=Bins.constant(OFF),
        audio_guidance=Bins.constant(OFF),
        sigmas=SIGMAS,
        schedule=None,
        sampler="euler_ancestral",
        eta=1.0,
        conditions=(),
        add_noise=True,
    )


@dataclass(frozen=True)
class Untouched:
    """A sampler that gives back the state it was handed."""

    uncond = False
    standard_noise = False
    unscaled = True

    def calls(self, sigmas):
        return ()

    def run(self, predict, x, sigmas, draw):
        return x


def grid(engine, seed, latent):
    draft = video_draft(latent, 24.0, engine.compression, 128)
    return draft.grid(Noise(seed, {"video": draft}, CPU).draw()["video"])


def test_f8_stage_two_touches_only_what_its_mask_and_first_sigma_allow(engine, job):
    """The picture's frame is clean, every other cell is the upscaled latent moved to noise by 0.909375."""
    sigma = DISTILLED_STAGE2[0]
    picture = torch.randn(1, 128, 1, 2, 3)
    asked = replace(job, audio=None, sigmas=DISTILLED_STAGE2, sampler=Untouched(), conditions=(Image(picture, 0, 1.0),))
    state = engine.sample(asked, Watch()).video
    want = torch.lerp(job.video, grid(engine, job.seed, job.video), sigma)
    assert torch.equal(state[:, :, :1], picture)
    torch.testing.assert_close(state[:, :, 1:], want[:, :, 1:], atol=1e-6, rtol=0)


def test_a_file_that_cannot_tell_slots_from_the_clip_makes_no_keyframes(engine, job):
    """Files of others may lack the mark: slots would be tokens like any other, and cost what they cost for nothing."""
    asked = replace(job, conditions=(KeyframeSlots((5,), None),))
    bare = replace(engine.opened, dit=replace(engine.opened.dit, keyframe_embedding=False))
    assert prepare(asked, engine.opened, False, ()) and prepare(job, bare, False, ())
    with pytest.raises(InputError, match="has no keyframes_abs_pos_embedding, without which no keyframes are made"):
        prepare(asked, bare, False, ())


def test_a_schedule_that_refines_is_no_use_to_an_empty_latent(engine, job):
    empty = replace(job, video=torch.zeros_like(job.video), sigmas=DISTILLED_STAGE2, schedule="distilled_stage2")

    def told(asked):
        return [notice for notice in prepare(asked, engine.opened, False, ()).notices if "as for a clip that is refined" in notice]

    assert told(empty) == ["the noise levels begin at 0.909, as for a clip that is refined, and the video of the latent is empty: connect a latent that holds it, or begin at 1, with schedule ltx2 or distilled."]
    assert "the video and the audio of the latent are empty: connect a latent that holds them, or" in told(replace(empty, audio=torch.zeros_like(job.audio)))[0]
    (silent,) = told(replace(empty, video=job.video, audio=torch.zeros_like(job.audio)))  # a video to be changed, whose levels are no mistake
    assert "the audio of the latent is empty: connect a latent that holds it, or" in silent
    kept = replace(job, sigmas=DISTILLED_STAGE2, audio=torch.zeros_like(job.audio), conditions=(Frozen("audio"),))
    (pale,) = told(replace(empty, video=job.video, conditions=(KeyframeSlots((5,), None),)))
    assert pale.endswith("its keyframe slots start from nothing: connect the keyframes of the first stage to LTX-2.5 Keyframe Slots.")
    seeded = replace(empty, video=job.video, conditions=(KeyframeSlots((5,), torch.ones(1, 128, 1, 2, 3)),))
    for fine in (seeded, replace(empty, video=job.video), replace(empty, sigmas=SIGMAS, schedule=None), replace(job, sigmas=DISTILLED_STAGE2, add_noise=False), kept):
        assert not told(fine)


def test_two_stages_make_exactly_twice_the_size_and_keep_the_picture(engine, job):
    """r3: picture, latent and sizes agree in both stages."""
    picture = torch.rand(1, 91, 37, 4)

    def encoded(height, width):
        return engine.encode_video(prepare_images(picture, height, width, 18), Watch())

    first = engine.sample(replace(job, video=torch.zeros_like(job.video), conditions=(Image(encoded(64, 96), 0, 1.0),)), Watch())
    large = engine.upscale(first.video, tiny_files().spatial_upscaler, Watch())
    assert large.shape == (1, 128, 3, 4, 6)
    full = encoded(128, 192)
    second = engine.sample(replace(job, video=large, audio=first.audio, sigmas=DISTILLED_STAGE2, sampler="euler", conditions=(Image(full, 0, 1.0),)), Watch())
    assert torch.equal(second.video[:, :, :1], full) and engine.video_shape(second.video) == engine.video_shape(large)
    assert not torch.equal(second.video[:, :, 1:], large[:, :, 1:])


def test_a9_kept_stretches_of_sound_are_equal_to_the_bit(engine, job):
    """Kept on [0, 0.2) and [0.5, end): only tokens that [0.2, 0.5) touches are made."""
    made = engine.sample(replace(job, conditions=(TemporalRegions("audio", ((0.2, 0.5),)),)), Watch()).audio
    start, end = audio_positions(AudioLatentShape(8, 18, 16))[0].unbind(-1)
    touched = (end > 0.2) & (start < 0.5)
    assert torch.equal(made[:, :, ~touched], job.audio[:, :, ~touched])
    assert all(not torch.equal(made[:, :, i], job.audio[:, :, i]) for i in touched.nonzero().flatten())


def test_stretches_and_masks_combine(engine, job):
    """What either of them keeps is kept, in space and in time."""
    mask = torch.ones(1, 1, 3, 2, 3)
    mask[..., 0] = 0
    made = engine.sample(replace(job, video_mask=mask, conditions=(TemporalRegions("video", ((0.4, 9.0),)),)), Watch()).video
    assert torch.equal(made[..., 0], job.video[..., 0]) and torch.equal(made[:, :, :2], job.video[:, :, :2])
    assert not torch.equal(made[:, :, 2, :, 1:], job.video[:, :, 2, :, 1:])


def test_several_stretches_are_one_mask(engine, job):
    made = engine.sample(replace(job, conditions=(TemporalRegions("audio", ((0.0, 0.02), (0.6, 0.7))),)), Watch()).audio
    assert torch.equal(made[:, :, 3:14], job.audio[:, :, 3:14])
    assert not torch.equal(made[:, :, :1], job.audio[:, :, :1]) and not torch.equal(made[:, :, 16:], job.audio[:, :, 16:])


@pytest.mark.parametrize("stream, other", [("audio", "video"), ("video", "audio")])
def test_a10_a_kept_stream_is_equal_to_the_bit_and_still_seen(engine, job, stream, other):
    kept = engine.sample(replace(job, conditions=(Frozen(stream),)), Watch())
    assert torch.equal(getattr(kept, stream), getattr(job, stream))
    changed = replace(job, conditions=(Frozen(stream),), **{stream: getattr(job, stream) * 0.5})
    assert not torch.equal(getattr(engine.sample(changed, Watch()), other), getattr(kept, other))


@pytest.mark.parametrize(
    "item",
    [
        Image(torch.randn(1, 128, 1, 2, 3), -1, 1.0),
        KeyframeIndex(torch.randn(1, 128, 2, 2, 3), 8, 0.8, 9),
        Reference(torch.randn(1, 128, 3, 1, 3), 1.0, 2, 1),
        AttentionStrength(Reference(torch.randn(1, 128, 2, 2, 3), 1.0, 1, 2), 0.5),
        ReferenceAudio(torch.randn(1, 8, 7, 16), 1.0),
        KeyframeSlots((4, 12), None),
    ],
    ids=lambda item: type(item).__name__,
)
def test_f7_what_is_shown_beside_the_clip_is_gone_from_it_and_inputs_stay(engine, job, item):
    before = job.video.clone(), job.audio.clone()
    made, plain = engine.sample(replace(job, conditions=(item,)), Watch()), engine.sample(job, Watch())
    assert made.video.shape == job.video.shape and made.audio.shape == job.audio.shape
    changed = getattr(made, item.stream), getattr(plain, item.stream)
    assert not torch.equal(*changed)
    assert torch.equal(job.video, before[0]) and torch.equal(job.audio, before[1])
    assert (made.keyframes is not None) == isinstance(item, KeyframeSlots)


def test_strength_0_at_frame_0_is_no_picture_at_all(engine, job):
    shown = engine.sample(replace(job, conditions=(Image(torch.randn(1, 128, 1, 2, 3), 0, 0.0),)), Watch())
    plain = engine.sample(job, Watch())
    assert torch.equal(shown.video, plain.video) and torch.equal(shown.audio, plain.audio)


@pytest.mark.parametrize(
    "of, shape",
    [
        (lambda latent: Image(latent, 9, 0.0), (1, 128, 1, 2, 3)),
        (lambda latent: KeyframeIndex(latent, 0, 0.0, 9), (1, 128, 2, 2, 3)),
        (lambda latent: Reference(latent, 0.0, 1, 1), (1, 128, 3, 2, 3)),
        (lambda latent: ReferenceAudio(latent, 0.0), (1, 8, 7, 16)),
    ],
    ids=["picture", "guide", "reference", "voice"],
)
def test_strength_0_beside_the_clip_shows_nothing_but_what_is_made_there_is_seen(engine, job, of, shape):
    """As officially: the tokens stay, so the clip differs from one without; their content does not count."""
    item, other = of(torch.randn(shape)), of(torch.randn(shape))
    made, again, plain = (engine.sample(replace(job, conditions=told), Watch()) for told in ((item,), (other,), ()))
    assert torch.equal(made.video, again.video) and torch.equal(made.audio, again.audio)
    assert not torch.equal(getattr(made, item.stream), getattr(plain, item.stream))


def two_parts(engine, job, at=0.6, **between):
    """The job's sampling cut where its sigmas are `at`, and the first part."""
    cut = job.sigmas.index(at)
    first = engine.sample(replace(job, sigmas=job.sigmas[: cut + 1]), Watch())
    return engine.sample(replace(job, video=first.video, audio=first.audio, sigmas=job.sigmas[cut:], add_noise=False, **between), Watch()), first


@pytest.mark.parametrize("told", ["nothing", "a mask", "a picture", "a faint picture", "something beside it", "its sound"])
def test_a_sampling_in_two_parts_is_the_same_as_in_one(engine, job, told):
    """What is kept is kept, and what is shown beside the clip is shown in both parts; only sums are rounded otherwise."""
    picture = torch.randn(1, 128, 1, 2, 3)
    changes = {
        "nothing": {},
        "a mask": {"video_mask": torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1, 1).expand(1, 1, 3, 2, 3)},
        "a picture": {"conditions": (Image(picture, 0, 1.0),)},
        "a faint picture": {"conditions": (Image(picture, 0, 0.3),)},
        "something beside it": {"conditions": (Image(picture, 9, 1.0), ReferenceAudio(job.audio[:, :, :5], 1.0))},
        "its sound": {"conditions": (Frozen("audio"),)},
    }[told]
    whole = replace(job, sampler="euler", **changes)
    wanted, (got, first) = engine.sample(whole, Watch()), two_parts(engine, whole)
    for one, other in ((got.video, wanted.video), (got.audio, wanted.audio)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert any("noise levels end at 0.6: that much noise is left" in notice for notice in first.notices)
    assert not any("noise levels end" in notice for notice in (*got.notices, *wanted.notices))
    again = engine.sample(replace(whole, video=first.video, audio=first.audio, sigmas=whole.sigmas[1:]), Watch())
    assert not torch.allclose(again.video, wanted.video, atol=0.05), "with add_noise it is another clip"


def test_what_is_left_is_what_the_hosts_samplers_leave(engine, job):
    """x / (1 - sigma): at the end of no step, x is noise and latent by their shares."""
    left = engine.sample(replace(job, sampler=Untouched(), sigmas=(0.75, 0.5)), Watch()).video
    torch.testing.assert_close(left, (0.25 * job.video + 0.75 * grid(engine, job.seed, job.video)) / (1 - 0.5))


def test_keyframes_are_not_made_in_parts(engine, job):
    told = replace(job, conditions=(KeyframeSlots((8,), None),))
    for part in (replace(told, sigmas=(1.0, 0.5)), replace(told, sigmas=(0.5, 0.0), add_noise=False)):
        with pytest.raises(InputError, match="keyframes are made in one sampling: let the noise levels end with 0 and add_noise on"):
            engine.sample(part, Watch())


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_a_mask_between_0_and_1_is_continued_with_what_it_holds_to_and_not_without(engine, job, stream):
    """What was left is noisy: taken for the clip it is held to, half of that noise would stay in the result."""
    grid = getattr(job, stream)
    soft = replace(job, sampler="euler", **{f"{stream}_mask": torch.linspace(0, 1, grid.shape[2]).view(1, 1, -1, *[1] * (grid.ndim - 3))})
    told = replace(soft, conditions=(HeldTo(stream, grid), Image(torch.randn(1, 128, 1, 2, 3), 0, 0.5)))
    wanted, (got, first) = engine.sample(replace(told, conditions=told.conditions[1:]), Watch()), two_parts(engine, told)
    for one, other in ((got.video, wanted.video), (got.audio, wanted.audio)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=f"the noise mask of the {stream} has values between 0 and 1.*let LTX-2.5 Sampler run the first part"):
        engine.sample(replace(soft, video=first.video, audio=first.audio, sigmas=(0.6, 0.0), add_noise=False), Watch())


def test_what_a_stream_is_held_to_fits_it_or_goes_with_it(engine, job):
    longer = HeldTo("video", torch.zeros(1, 128, 4, 2, 3))
    with pytest.raises(InputError, match="was 4 latent frames long when noise was left in it and is 3 now"):
        engine.facts(replace(job, conditions=(longer,), video_mask=torch.full((1, 1, 1, 1, 1), 0.5)))
    engine.facts(replace(job, conditions=(longer,)))  # nothing is held
    engine.facts(replace(job, audio=None, conditions=(HeldTo("audio", job.audio),)))


def test_a_second_part_without_a_first_is_refused(engine, job):
    """All zeros at the first level: it would be sampled to something that no noise was ever in."""
    with pytest.raises(InputError, match="the noise levels begin at 1, where nothing of a latent is left"):
        engine.sample(replace(job, add_noise=False), Watch())
    for stream in ("video", "audio"):
        empty = replace(job, sigmas=(0.6, 0.0), add_noise=False, **{stream: torch.zeros_like(getattr(job, stream))})
        with pytest.raises(InputError, match=f"the {stream} of the latent is empty"):
            engine.sample(empty, Watch())
    engine.facts(replace(empty, conditions=(Frozen("audio"),)))  # silence that is kept is no part to go on with


@pytest.mark.parametrize("start, end, told", [(1.0, 0.0, False), (0.55, 0.35, True), (0.6, 0.3, False), (0.2, 0.0, True)])
def test_guidance_between_two_noise_levels_is_a_notice(engine, job, start, end, told):
    bins = by_sigma(replace(OFF, modality=3.0), "video", "", start, end)
    made = engine.sample(replace(job, video_guidance=bins, sigmas=(1.0, 0.6, 0.3, 0.0)), Watch())
    assert any("guidance of the video has no effect, because no step" in notice for notice in made.notices) == told
    assert (made.forwards == 3) == told


@pytest.mark.parametrize(
    "start, end, levels, told",
    [
        (1.0, 0.5, (0.45, 0.2, 0.0), False),  # guidance is over when the second part begins,
        (0.3, 0.0, (1.0, 0.6, 0.4), False),  # or not there yet in the first
        (1.0, 0.95, DISTILLED_STAGE2, False),
        (0.55, 0.5, (1.0, 0.6, 0.4), True),
    ],
)
def test_guidance_for_another_part_of_the_sampling_is_no_notice(engine, job, start, end, levels, told):
    bins = by_sigma(replace(OFF, modality=3.0), "video", "", start, end)
    notices = prepare(replace(job, video_guidance=bins, sigmas=levels), engine.opened, False, ()).notices
    assert any("has no effect, because no step" in notice for notice in notices) == told


def test_b1_pictures_of_a_batch_belong_to_their_items(engine, job):
    """Item 1 of a batch of two, each with its picture, equals a run alone with seed + 1 (1e-5: other matrix shapes)."""
    pictures = torch.randn(2, 128, 1, 2, 3)
    twice = replace(job, video=job.video.repeat(2, 1, 1, 1, 1), audio=job.audio.repeat(2, 1, 1, 1), conditions=(Image(pictures, -1, 1.0),))
    both = engine.sample(twice, Watch())
    alone = engine.sample(replace(job, seed=job.seed + 1, conditions=(Image(pictures[1:], -1, 1.0),)), Watch())
    torch.testing.assert_close(both.video[1:], alone.video, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.audio[1:], alone.audio, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("second", [0.1, 0.4, 0.7])
def test_a11_sound_and_picture_of_a_moment_stand_at_the_same_time(engine, second):
    """An impulse in the wave is in the audio token, a flash in the frames in the video token, whose times hold that second."""
    rate, frames = 48000, 17
    quiet, loud = torch.zeros(1, 2, rate), torch.zeros(1, 2, rate)
    loud[..., round(second * rate)] = 1.0
    black, flash = torch.zeros(frames, 64, 96, 3), torch.zeros(frames, 64, 96, 3)
    flash[min(frames - 1, round(second * 24))] = 1.0

    def first_changed(a, b):
        return int((a != b).flatten(3).any(-1).flatten(0, 1).any(0).nonzero()[0]) if a.ndim == 4 else int((a != b)[0].flatten(2).any(-1).any(0).nonzero()[0])

    sound = [fit_latent(engine.encode_audio(fit_wave(wave, rate, frames, 24.0), rate, Watch()), frames, 24.0) for wave in (quiet, loud)]
    video = [engine.encode_video(images, Watch()) for images in (black, flash)]
    audio_at = audio_positions(AudioLatentShape(8, sound[0].shape[2], 16))[0, first_changed(*sound)]
    cell = video_positions(VideoLatentShape(128, 3, 1, 1), engine.compression, 24.0)[0, first_changed(*video)]
    # the window of the mel transform (64 ms) sees an impulse half its length early
    assert audio_at[0] <= second <= audio_at[1] + 0.04 and cell[0] - 1e-6 <= second + 1 / 48 and second - 1 / 24 <= cell[1]


def test_files_for_other_latents_or_contexts_are_refused(engine, tmp_path):
    from comfyui_ltx25.tests.support.files import write_published
    from comfyui_ltx25.tests.support.golden import Golden

    with pytest.raises(FileError, match="4 channels and this model's have 128"):
        engine.upscale(torch.zeros(1, 128, 1, 2, 2), Golden("upscale").folder / "upsampler_spatial_x2.bf16.safetensors", Watch())
    head = write_published("ltx-2.5-duration-head-bf16", tmp_path)
    with pytest.raises(FileError, match="4096 and 2048"):
        prompt = engine.encode("A lighthouse.", Watch())
        engine.predict_seconds(prompt, head, Watch())
    with pytest.raises(FileError, match="wanted a latent upscaler"):
        engine.upscale(torch.zeros(1, 128, 1, 2, 2), tiny_files().duration_head, Watch())


def test_duration_of_a_prompt_is_some_seconds_and_the_same_again(engine):
    prompt = engine.encode("A lighthouse.", Watch())
    seconds = engine.predict_seconds(prompt, tiny_files().duration_head, Watch())
    assert 0.1 < seconds < 100 and engine.predict_seconds(prompt, tiny_files().duration_head, Watch()) == seconds


def test_optional_parts_leave_the_device_with_the_engine(engine):
    engine.upscale(torch.zeros(1, 128, 1, 2, 2), tiny_files().temporal_upscaler, Watch())
    engine.encode_video(torch.zeros(1, 64, 96, 3), Watch())
    names = {part.name for part in engine.parts if part.loaded}
    assert "video encoder" in names and any(name.startswith("upscaler") for name in names)
    engine.detach()
    assert not any(part.loaded for part in engine.parts)
