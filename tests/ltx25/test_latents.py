from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.latents import (
    STEP_SEED,
    Noise,
    attend,
    audio_draft,
    audio_positions,
    empty_latents,
    mask_tokens,
    video_draft,
    video_positions,
)
from comfyui_ltx25.ltx25.shapes import (
    PUBLISHED_COMPRESSION,
    AudioLatentShape,
    Compression,
    VideoLatentShape,
    VideoShape,
    evenly_spaced_frames,
    seconds_to_frames,
    sounding_latents,
)
from comfyui_ltx25.tests.support import golden_dit as golden
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")
VIDEO, AUDIO = VideoLatentShape(12, 3, 2, 4), AudioLatentShape(8, 18, 2)


def drafts(batch=1, masks=(None, None)):
    return {
        "video": video_draft(torch.zeros(batch, 12, 3, 2, 4), 24.0, PUBLISHED_COMPRESSION, 12, masks[0]),
        "audio": audio_draft(torch.zeros(batch, 8, 18, 2), 8, 2, masks[1]),
    }


def test_counts_are_the_official_ones():
    """geometry/counts: latent frames, audio tokens, snapping, evenly spaced keyframes, seconds to frames."""
    assert golden.names("geometry/") == ["geometry/counts"]
    want = golden.outputs("geometry/counts")
    for frames, fps, latent, audio in want["latent_counts"]:
        assert VideoShape(frames, 32, 32).latent(PUBLISHED_COMPRESSION).frames == latent
        assert AudioLatentShape.of_clip(frames, fps).frames == audio
    for frames, snapped in want["snap_frames_to_grid"]:
        assert PUBLISHED_COMPRESSION.snap(frames) == snapped
    for count, frames, places in want["evenly_spaced_keyframes"]:
        assert list(evenly_spaced_frames(count, frames)) == places
    for seconds, fps, frames, least, most in want["seconds_to_frames"]:
        assert seconds_to_frames(seconds, fps, least, most, PUBLISHED_COMPRESSION) == frames


@settings(deadline=None)
@given(st.floats(0.0, 40.0), st.sampled_from([12.0, 24.0, 29.97, 60.0]), st.integers(9, 60), st.integers(100, 600))
def test_seconds_to_frames_stays_in_its_limits(seconds, fps, least, most):
    frames = seconds_to_frames(seconds, fps, least, PUBLISHED_COMPRESSION.snap(most), PUBLISHED_COMPRESSION)
    assert least <= frames <= most and frames % 8 == 1


def test_more_keyframes_than_frames_are_refused():
    with pytest.raises(InputError, match="do not fit"):
        evenly_spaced_frames(8, 9)


def test_empty_latents():
    video, audio = empty_latents(VideoShape(121, 512, 768), 24.0, 2, PUBLISHED_COMPRESSION)
    assert video.shape == (2, 128, 16, 16, 24) and audio.shape == (2, 8, 126, 16)
    assert not video.any() and not audio.any()


def test_r1_off_grid_size_names_the_nearest_legal_ones():
    with pytest.raises(InputError) as error:
        empty_latents(VideoShape(10, 100, 100), 24.0, 1, PUBLISHED_COMPRESSION)
    assert "use 96 or 128" in str(error.value) and "use 9 or 17" in str(error.value)


def test_empty_batch_is_refused():
    with pytest.raises(InputError, match="the least is 1"):
        empty_latents(VideoShape(9, 64, 64), 24.0, 0, PUBLISHED_COMPRESSION)


def test_positions_by_hand():
    """Seconds of an 8-frame latent after a first one of a single frame; pixels; audio at 25 latents a second after 0.01 s."""
    positions = video_positions(VideoLatentShape(1, 3, 2, 2), PUBLISHED_COMPRESSION, 24.0)
    assert positions[0, ::4].mul(24).round().tolist() == [[0, 1], [1, 9], [9, 17]]
    assert positions[1, :4].tolist() == [[0, 32], [0, 32], [32, 64], [32, 64]]
    assert positions[2, :4].tolist() == [[0, 32], [32, 64], [0, 32], [32, 64]]
    assert audio_positions(AudioLatentShape(8, 4, 16))[0].tolist() == pytest.approx(torch.tensor([[0, 0.01], [0.01, 0.05], [0.05, 0.09], [0.09, 0.13]]))


def test_positions_follow_the_compression_of_the_file():
    positions = video_positions(VideoLatentShape(1, 2, 1, 2), Compression(frames=4, side=16), 10.0)
    assert positions[0].mul(10).round().tolist() == [[0, 1], [0, 1], [1, 5], [1, 5]]
    assert positions[2].tolist() == [[0, 16], [16, 32], [0, 16], [16, 32]]


def test_noise_of_a_seed_is_the_hosts():
    """comfy.sample.prepare_noise: one CPU generator, float32, the video grid and then the audio grid."""
    drawn = Noise(7, drafts(), CPU).draw()
    generator = torch.manual_seed(7)
    video, audio = torch.randn(1, 12, 3, 2, 4, generator=generator), torch.randn(1, 8, 18, 2, generator=generator)
    assert torch.equal(drafts()["video"].grid(drawn["video"]), video)
    assert torch.equal(drafts()["audio"].grid(drawn["audio"]), audio)


@pytest.mark.parametrize("offset", [0, STEP_SEED])
def test_b1_noise_of_an_item_is_that_of_a_run_of_its_own(offset):
    """Every draw, not only the first."""
    batch, alone = Noise(40, drafts(3), CPU, offset), [Noise(40 + i, drafts(), CPU, offset) for i in range(3)]
    for _ in range(2):
        drawn = batch.draw()
        for i, one in enumerate(alone):
            mine = one.draw()
            assert all(torch.equal(drawn[name][i : i + 1], mine[name]) for name in mine)


def test_step_noise_differs_from_the_start_and_from_draw_to_draw():
    start, steps = Noise(3, drafts(), CPU).draw(), Noise(3, drafts(), CPU, STEP_SEED)
    first, second = steps.draw(), steps.draw()
    for name in start:
        assert not torch.equal(start[name], first[name]) and not torch.equal(first[name], second[name])


def test_n14_noise_of_the_clip_does_not_depend_on_appended_tokens():
    plain = drafts()
    longer = {**plain, "video": plain["video"].append(torch.zeros(1, 5, 12), 0.5, torch.zeros(3, 5, 2))}
    a, b = Noise(3, plain, CPU), Noise(3, longer, CPU)
    for _ in range(2):
        left, right = a.draw(), b.draw()
        assert torch.equal(left["video"], right["video"][:, :24]) and torch.equal(left["audio"], right["audio"])
        assert right["video"].shape == (1, 29, 12) and right["video"][:, 24:].std() > 0.5


def test_seed_wraps_at_64_bits():
    assert torch.equal(Noise(2**64 - 1, drafts(2), CPU).draw()["video"][1], Noise(0, drafts(), CPU).draw()["video"][0])


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=24, max_size=24), st.floats(0.0, 1.0), st.integers(0, 1000))
def test_n14_noising_keeps_masked_tokens_bit_for_bit(mask, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, 12, 3, 2, 4, generator=generator)
    draft = replace(video_draft(latent, 24.0, PUBLISHED_COMPRESSION, 12), mask=torch.tensor(mask))
    noise = torch.randn(1, 24, 12, generator=generator)
    x = draft.noised(noise, scale)
    m = draft.mask[:, None].double()
    want = (1 - m) * draft.clean + m * ((1 - scale) * draft.latent.double() + scale * noise)
    torch.testing.assert_close(x, want.float(), atol=1e-6, rtol=1e-6)
    assert torch.equal(x[:, draft.mask == 0], draft.clean[:, draft.mask == 0])


def test_drafts_never_write_to_their_input():
    latent = torch.zeros(1, 12, 3, 2, 4)
    draft = video_draft(latent, 24.0, PUBLISHED_COMPRESSION, 12)
    draft.latent.add_(1)
    assert not latent.any()


def test_first_latent_frame_is_marked():
    assert drafts()["video"].marked.tolist() == [True] * 8 + [False] * 16
    assert drafts()["audio"].marked is None


def test_frozen_stream_has_mask_zero():
    draft = audio_draft(torch.ones(1, 8, 18, 2), 8, 2, frozen=True)
    assert draft.stream().frozen and not draft.stream().mask.any()
    assert torch.equal(draft.noised(torch.randn(1, 18, 16), 0.0), draft.latent)


@pytest.mark.parametrize(
    "mask, want",
    [
        (torch.tensor([1.0, 0.0, 0.5]).view(1, 1, 3, 1, 1), [1.0] * 8 + [0.0] * 8 + [0.5] * 8),
        (torch.zeros(1, 1, 1, 1, 1), [0.0] * 24),
        (torch.ones(2, 12, 3, 2, 4), [1.0] * 24),
        (torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2).view(1, 1, 2, 4), [1.0, 0, 0, 0] * 6),  # an image mask
        (torch.cat([torch.ones(1, 32, 64), torch.zeros(1, 32, 64)], -1), [1.0, 1, 0, 0] * 6),  # in pixels
        (torch.cat([torch.ones(1, 1, 17, 64, 64), torch.zeros(1, 1, 17, 64, 64)], -1), [1.0, 1, 0, 0] * 6),  # of every frame
    ],
)
def test_video_noise_mask(mask, want):
    assert mask_tokens(mask, VIDEO, PUBLISHED_COMPRESSION).tolist() == want


@pytest.mark.parametrize("shape", [(2, 1, 64, 128), (16, 64, 128), (1, 1, 5, 64, 128)])
def test_a_still_mask_may_be_repeated_as_often_as_one_likes(shape):
    """Say once for each clip of a batch: at no frame does it say anything else."""
    mask = (torch.arange(128) < 64).float().expand(shape)
    assert mask_tokens(mask, VIDEO, PUBLISHED_COMPRESSION).tolist() == [1, 1, 0, 0] * 6


@pytest.mark.parametrize("made, want", [((0,), [1, 0, 0]), ((1,), [0, 1, 0]), ((8,), [0, 1, 0]), ((9, 16), [0, 0, 1]), ((0, 16), [1, 0, 1]), (range(1, 17), [0, 1, 1]), ((17, 18), [0, 0, 0])])
@pytest.mark.parametrize("shape", [(19, 64, 128), (19, 1, 64, 128), (1, 1, 19, 1, 1)])
def test_a_mask_of_every_frame_makes_the_latent_frames_it_touches(made, want, shape):
    """Latent frames hold the frames 0, 1 to 8 and 9 to 16; 17 and 18 were left out when the clip was encoded."""
    mask = torch.zeros(19)
    mask[list(made)] = 1
    mask = mask.view([19 if side == 19 else 1 for side in shape]).expand(shape)
    assert mask_tokens(mask, VIDEO, PUBLISHED_COMPRESSION)[::8].tolist() == want


@pytest.mark.parametrize("frames", [3, 17, 19])
@pytest.mark.parametrize("clips", [2, 3])
def test_a_mask_that_moves_may_be_said_again_for_each_clip_of_a_batch(frames, clips):
    """As Repeat Latent Batch does with the mask of a latent: its frames, then the same ones again."""
    mask = torch.zeros(frames, 1, 64, 128)
    mask[1] = 1  # in pixels and in latent frames of the second latent frame
    assert mask_tokens(mask.repeat(clips, 1, 1, 1), VIDEO, PUBLISHED_COMPRESSION)[::8].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "mask, want",
    [
        (torch.zeros(1, 1, 18, 1), [0.0] * 18),
        (torch.cat([torch.zeros(1, 1, 9, 1), torch.ones(1, 1, 9, 1)], 2), [0.0] * 9 + [1.0] * 9),
        (torch.ones(1, 8, 18, 2), [1.0] * 18),
        (torch.tensor([0.0, 1.0]).view(1, 1, 1, 2), [1.0] * 18),  # a token is one unit
        (torch.cat([torch.zeros(1, 1, 18, 1), torch.ones(1, 1, 18, 1)], 2), [0.0] * 9 + [1.0] * 9),  # twice as long
    ],
)
def test_audio_noise_mask(mask, want):
    assert mask_tokens(mask, AUDIO, None).tolist() == want


@pytest.mark.parametrize(
    "mask, says",
    [
        (torch.full((1, 1, 3, 2, 4), 1.5), "wanted 0"),
        (torch.full((1, 1, 3, 2, 4), float("nan")), "wanted 0"),
        (torch.arange(2.0).view(2, 1, 1, 1, 1), "differs between the items"),
        (torch.ones(3), "fits no video latent"),
        (torch.ones(1, 1, 1, 3, 2, 4), "fits no video latent"),
        (torch.arange(4.0).view(1, 1, 4, 1, 1).expand(1, 1, 4, 2, 4) / 4, "has 4 frames and the video 17, or 3 latent ones"),
        (torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 64, 128), "has 2 frames and the video 17"),
        ((torch.arange(16) < 8).float().view(16, 1, 1).expand(16, 64, 128), "has 16 frames and the video 17"),
        (torch.arange(2.0).view(1, 1, 2, 1, 1), "has 2 frames and the video 17"),
        ((torch.arange(34) < 17).float().view(34, 1, 1, 1), "has 34 frames and the video 17"),  # of two clips, one kept
        ((torch.arange(32) % 16 < 8).float().view(32, 1, 1, 1), "has 32 frames and the video 17"),  # of another length, twice
    ],
)
def test_masks_that_cannot_be_used_are_refused(mask, says):
    with pytest.raises(InputError, match=says):
        mask_tokens(mask, VIDEO, PUBLISHED_COMPRESSION)


@pytest.mark.parametrize("latent, says", [(torch.zeros(1, 16, 3, 2, 4), "1 x 16 x 3 x 2 x 4, wanted"), (torch.zeros(1, 12, 2, 4), "wanted"), (torch.full((1, 12, 3, 2, 4), torch.inf), "288 values of 288")])
def test_video_latents_that_cannot_be_used_are_refused(latent, says):
    with pytest.raises(InputError, match=says):
        video_draft(latent, 24.0, PUBLISHED_COMPRESSION, 12)


@pytest.mark.parametrize("latent, says", [(torch.zeros(1, 16, 3, 2), "wanted"), (torch.zeros(1, 8, 3, 16), "wanted"), (torch.full((1, 8, 3, 2), torch.nan), "not finite")])
def test_audio_latents_that_cannot_be_used_are_refused(latent, says):
    with pytest.raises(InputError, match=says):
        audio_draft(latent, 8, 2)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan")])
def test_frame_rates_that_cannot_be_used_are_refused(fps):
    with pytest.raises(InputError, match="frame_rate"):
        video_draft(torch.zeros(1, 12, 3, 2, 4), fps, PUBLISHED_COMPRESSION, 12)


def test_attention_grows_by_blocks():
    grown = attend(attend(torch.ones(3, 3), 3, torch.tensor([0.5, 0.25])), 3, torch.tensor([1.0]))
    want = torch.ones(6, 6)
    want[:3, 3], want[3, :3], want[:3, 4], want[4, :3] = 0.5, 0.5, 0.25, 0.25
    want[3:5, 5], want[5, 3:5] = 0, 0
    assert torch.equal(grown, want)


def test_attention_becomes_a_logarithm():
    draft = replace(drafts()["video"], attention=torch.eye(24) * 0.5 + 0.5)
    bias = draft.stream().bias
    assert bias[0, 0] == 0 and bias[0, 1] == pytest.approx(-0.6931472)
    assert replace(draft, attention=torch.eye(24)).stream().bias[0, 1] == torch.finfo(torch.float32).min


@pytest.mark.parametrize("samples", [1, 480, 481, 960, 18000, 34000, 82000])
def test_the_sound_of_so_many_samples_is_in_the_least_latents_that_make_them(samples):
    count = sounding_latents(samples)
    assert AudioLatentShape(8, count, 16).samples >= samples and (count == 1 or AudioLatentShape(8, count - 1, 16).samples < samples)
