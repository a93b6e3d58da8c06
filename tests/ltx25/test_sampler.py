"""The loop: official sampler runs on a toy denoiser, progress, cancel, preview, batches, settings it refuses."""

import itertools
import re
import time
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25 import flight, predictor
from comfyui_ltx25.ltx25.conditions import Frozen, Image
from comfyui_ltx25.ltx25.denoise import drafts_of, job_of, run
from comfyui_ltx25.ltx25.dit import Contexts, Leg, timestep_of_tokens
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.guidance import AUDIO, OFF, VIDEO, Bins
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.latents import Noise
from comfyui_ltx25.ltx25.sampler import (
    Euler,
    EulerAncestral,
    EulerCfgPlusPlus,
    GradientEstimation,
    Res2s,
    check_job,
    sampler_of,
)
from comfyui_ltx25.ltx25.schedule import sigmas_of
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.denoise_cases import CPU, TINY, Recorder, Toy, draws_of, run_job, toy_job

LOOPS = golden.names("loop/")
SAMPLERS = [Euler(), EulerAncestral(1.0, 1.0), GradientEstimation(2.0), EulerCfgPlusPlus(1.0, 1.0), Res2s(0.5)]
GUIDED = {"video": Bins.constant(replace(VIDEO, stg_blocks=frozenset({2}))), "audio": Bins.constant(replace(AUDIO, stg_blocks=frozenset({2})))}


def contexts(seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return Contexts(torch.randn(batch, 17, 64, generator=generator), torch.randn(batch, 17, 32, generator=generator))


def clip(batch=1, **kinds):
    video = torch.zeros(batch, 12, 3, 2, 4) if kinds.pop("video", True) else None
    audio = torch.zeros(batch, 8, 18, 2) if kinds.pop("audio", True) else None
    return drafts_of(video, audio, TINY, 24.0, PUBLISHED_COMPRESSION, **kinds)


def job(drafts, steps=3, sampler=SAMPLERS[0], guidance=GUIDED, negative=True, batched=False):
    return job_of(drafts, contexts(1), contexts(2) if negative else None, guidance, sigmas_of("ltx2", steps), sampler, 4, batched)


def sample(drafts, seed=0, sink=None, dit=None, **settings):
    work = job(drafts, **settings)
    with Watch([sink] if sink else []).phase("sample", total=work.forwards, unit="forward") as phase:
        return run(dit or golden.tiny_dit(), work, drafts, seed, phase, CPU, torch.float32)


@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_the_official_one(name):
    case, want = golden.inputs(name), golden.outputs(name)
    work, draw = toy_job(case), draws_of(case)
    toy = Toy({stream: case[f"{stream}_target"] for stream in ("video", "audio")})
    outcome = run_job(toy, work, {stream: case[f"{stream}_latent"] for stream in ("video", "audio")}, draw)
    for stream in ("video", "audio"):
        golden.check(name, f"{stream}_latent", outcome.tokens[stream])
    assert toy.sigmas == pytest.approx(want["sigma_at_call"], rel=1e-6)
    for index, seen in enumerate(toy.seen[1:], 1):
        if f"video_at_call_{index}" in want:
            golden.check(name, f"video_at_call_{index}", seen["video"])
    assert not draw.left


def test_n13_one_step_along_the_velocity():
    """A model that says v everywhere moves the state by v (t - s): flow matching, noise at 1, clip at 0."""
    drafts = clip(audio=False)
    v = torch.randn(1, 24, 12)
    toy = Toy({"video": torch.zeros(1, 24, 12)})
    toy._velocity = lambda name, x, stream, sigma, leg: None if x is None else v
    work = replace(job(drafts, guidance={"video": Bins.constant(OFF)}), sigmas=(0.75, 0.25))
    x = torch.randn(1, 24, 12)
    outcome = run_job(toy, work, {"video": x}, None)
    torch.testing.assert_close(outcome.tokens["video"], x - 0.5 * v)


# Progress


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_forwards_reported_are_forwards_run(sampler):
    sink, toy_calls = Recorder(), []
    dit = golden.tiny_dit()

    class Counting:
        prepare, schedule_tables = dit.prepare, dit.schedule_tables

        def __call__(self, *args):
            result = dit(*args)
            toy_calls.append(len(result))
            return result

    drafts = clip()
    work = job(drafts, sampler=sampler)
    outcome = sample(drafts, sink=sink, dit=Counting(), sampler=sampler).outcome
    counts = [done for done, _ in sink.told]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == work.forwards
    assert sum(toy_calls) == work.forwards == outcome.forwards
    assert [b - a for a, b in itertools.pairwise(counts) if b > a] == toy_calls  # group by group
    assert len(outcome.seconds) == len(outcome.legs) == len(toy_calls)
    assert sink.error is None


def test_progress_reads_as_designed():
    sink = Recorder()
    sample(clip(), steps=30, sink=sink)
    texts = [text for _, text in sink.told]
    assert texts[0] == "step 1/30 - forward 1-4/120 (cond+uncond+stg+mod)"
    third = next(text for done, text in sink.told if done == 12)
    assert re.fullmatch(r"step 3/30 - forward 9-12/120 \(cond\+uncond\+stg\+mod\) - last \S+ m?s - about .* left \(from 2 steps\)", third)


def test_first_word_is_out_before_the_first_forward():
    sink = Recorder()
    toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)}, before=lambda call: seen.append(len(sink.told)))
    seen = []
    sample(clip(), sink=sink, dit=toy)
    assert seen[0] == 1


def test_many_steps_are_prepared_in_pieces_that_are_told_and_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(predictor, "TELL", 0.0)
    dit, ran = golden.tiny_dit(), []

    class Counting:
        prepare, schedule_tables = dit.prepare, dit.schedule_tables

        def __call__(self, *args):
            ran.append(1)
            return dit(*args)

    sink = Recorder(cancel_after=2)
    with pytest.raises(KeyboardInterrupt):
        sample(clip(), steps=200, sink=sink, dit=Counting())
    assert [text for _, text in sink.told] == ["preparing 64/200 steps", "preparing 128/200 steps"] and not ran
    monkeypatch.setattr(predictor, "TELL", 60.0)
    with pytest.raises(KeyboardInterrupt):
        sample(clip(), steps=200, sink=Recorder(cancel_after=0), dit=Counting())
    assert not ran


def test_skipped_steps_run_and_count_nothing():
    guidance = {name: Bins.constant(replace(bins.at(1.0), skip_step=1)) for name, bins in GUIDED.items()}
    sink, drafts = Recorder(), clip()
    outcome = sample(drafts, steps=4, guidance=guidance, sink=sink).outcome
    assert outcome.forwards == 8 and sink.told[-1][0] == 8
    assert [text.split(" - ")[0] for done, text in sink.told if done] == ["step 1/4", "step 3/4"]


@pytest.mark.parametrize("kept, made", [("audio", "video"), ("video", "audio")])
def test_steps_that_all_but_a_kept_stream_skip_run_and_count_nothing(kept, made):
    guidance = {name: Bins.constant(replace(bins.at(1.0), skip_step=1)) for name, bins in GUIDED.items()}
    drafts = clip(conditions=[Frozen(kept)])
    got = sample(drafts, steps=4, guidance=guidance)
    assert got.outcome.forwards == 8 and len(got.outcome.legs) == 2
    assert torch.equal(getattr(got, kept), drafts[kept].grid(drafts[kept].latent)) and getattr(got, made).isfinite().all()


def test_step_that_skips_one_stream_is_named():
    guidance = {**GUIDED, "audio": Bins.constant(replace(AUDIO, stg_blocks=frozenset({2}), skip_step=1))}
    work = job(clip(), steps=2, guidance=guidance)
    assert (work.plans[1].video, work.plans[1].audio) == (True, False)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_cancel_ends_the_loop_at_the_next_group(after):
    sink = Recorder(cancel_after=after)
    toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)})
    with pytest.raises(KeyboardInterrupt):
        sample(clip(), steps=10, sink=sink, dit=toy)
    assert len(toy.seen) <= after
    assert isinstance(sink.error, KeyboardInterrupt)


def test_cancelled_run_leaves_nothing_behind():
    drafts = clip()
    before = sample(drafts)
    with pytest.raises(KeyboardInterrupt):
        sample(drafts, sink=Recorder(cancel_after=2))
    after = sample(drafts)
    assert torch.equal(before.video, after.video) and torch.equal(before.audio, after.audio)


# Groups in flight, with a device of the test's own: a mark is done when the test says so.


class Gpu:
    """Work takes `seconds` per block; the host's clock is `flight.time`, which sleeping moves."""

    def __init__(self, per_block):
        self.now, self.free, self.per_block, self.slept = 0.0, 0.0, per_block, 0.0

    def queue(self):
        self.free = max(self.free, self.now) + self.per_block

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds

    def mark(self, device):
        return Moment(self, max(self.free, self.now))


class Moment:
    def __init__(self, gpu, at):
        self.gpu, self.at = gpu, at

    def done(self):
        return self.gpu.now >= self.at

    def seconds_since(self, earlier):
        return self.at - earlier.at


class OnGpu(Toy):
    """Queues its blocks without waiting; notes how far ahead of the device the host is."""

    def __init__(self, gpu, blocks):
        super().__init__({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)}, blocks)
        self.gpu, self.ahead = gpu, []

    def __call__(self, *args):
        pause = args[8]

        def block_done(block):
            self.gpu.queue()
            self.ahead.append(self.gpu.free - self.gpu.now)
            pause(block)

        self.told_pause = pause
        result = super().__call__(*args[:8], block_done)
        self.pauses[-1] = pause
        return result


def on_gpu(monkeypatch, per_block, steps=6, cancel_after=None, sink=None):
    gpu = Gpu(per_block)
    monkeypatch.setattr(flight, "time", gpu)
    monkeypatch.setattr(flight, "Mark", gpu.mark)
    toy = OnGpu(gpu, blocks=48)
    sink = sink or Recorder(cancel_after=cancel_after)
    sink.clock = gpu.monotonic
    outcome = None
    try:
        drafts = clip()
        work = replace(job(drafts, steps=steps), blocks=48)
        with Watch([sink]).phase("sample", total=work.forwards, unit="forward") as phase:
            outcome = run(toy, work, drafts, 0, phase, CPU, torch.float32)
    except KeyboardInterrupt:
        pass
    return gpu, toy, sink, outcome


def test_fast_groups_run_two_ahead_and_unpaced(monkeypatch):
    """0.24 s a group: the host is at most two groups ahead, sleeps meanwhile, and only the first group is paced."""
    gpu, toy, sink, outcome = on_gpu(monkeypatch, 0.005)
    assert toy.pauses[0] is not flight.unpaced and all(pause is flight.unpaced for pause in toy.pauses[1:])
    assert 0.24 < max(toy.ahead) <= 2 * 0.24 + 0.01
    assert not any("block" in text for _, text in sink.told)
    assert outcome.outcome.seconds[2:] == pytest.approx([0.24] * 4)
    assert gpu.slept == pytest.approx(gpu.now)


def test_a_first_group_that_compiles_does_not_make_the_second_one_slow(monkeypatch):
    """Captured at the second step: what the first forward ever takes says nothing about the next."""
    queue = Gpu.queue

    def compiling(self):
        queue(self)
        self.compiled = getattr(self, "compiled", 0) + 1
        self.free += 3.0 * (self.compiled <= 2)

    monkeypatch.setattr(Gpu, "queue", compiling)
    _, toy, _, outcome = on_gpu(monkeypatch, 0.005)
    assert outcome.outcome.seconds[0] > 6
    assert toy.pauses[0] is not flight.unpaced and all(pause is flight.unpaced for pause in toy.pauses[1:])


def test_reported_only_when_complete(monkeypatch):
    gpu = None

    class Late(Recorder):
        def ticked(self, phase):
            super().ticked(phase)
            if phase.done:
                assert holder[0].now >= phase.done // 4 * 48 * 0.005 - 1e-6

    holder = []
    original = Gpu.__init__

    def keep(self, per_block):
        original(self, per_block)
        holder.append(self)

    monkeypatch.setattr(Gpu, "__init__", keep)
    gpu, _, sink, _ = on_gpu(monkeypatch, 0.005, sink=Late())
    assert sink.told[-1][0] == 24 and gpu is holder[0]


def test_slow_groups_tell_their_block_every_second_and_queue_one_second(monkeypatch):
    """9.6 s a group."""
    gpu, toy, sink, outcome = on_gpu(monkeypatch, 0.2, steps=3)
    blocks = [text for _, text in sink.told if "block" in text]
    assert max(b - a for a, b in itertools.pairwise(sink.at)) <= 1.0
    assert len(blocks) >= 3 * 8 and re.search(r"\) - block \d+/48$", blocks[0])
    assert max(toy.ahead[:48]) <= flight.UNKNOWN_AHEAD * 0.2 + 0.21
    assert max(toy.ahead[48:]) <= flight.SEGMENT + 0.21
    assert outcome.outcome.seconds == pytest.approx([9.6] * 3, abs=0.3)


@pytest.mark.parametrize("per_block", [0.005, 0.02, 0.2])
def test_cancel_acts_within_two_seconds_of_device_time(monkeypatch, per_block):
    gpu, toy, sink, outcome = on_gpu(monkeypatch, per_block, cancel_after=4)
    assert outcome is None
    assert gpu.free - gpu.now <= 2.0


# Numbers


def test_b2_a_seed_fixes_video_and_audio():
    drafts = clip()
    settings = {"sampler": EulerAncestral(1.0, 1.0)}
    first = sample(drafts, seed=5, **settings)
    sample(clip(audio=False), seed=9, guidance={"video": GUIDED["video"]})  # another prompt in between
    again = sample(drafts, seed=5, sink=Recorder(wants_preview=True), **settings)
    assert torch.equal(first.video, again.video) and torch.equal(first.audio, again.audio)
    assert not torch.equal(first.video, sample(drafts, seed=6, **settings).video)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_b1_batch_item_equals_a_run_of_its_own(sampler):
    """Within rounding: matrix products of other shapes."""
    batch = sample(clip(2), seed=11, sampler=sampler)
    for item in range(2):
        alone = sample(clip(), seed=11 + item, sampler=sampler)
        torch.testing.assert_close(batch.video[item : item + 1], alone.video, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(batch.audio[item : item + 1], alone.audio, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("sampler", [*SAMPLERS, EulerAncestral(0.0, 1.0), EulerAncestral(0.5, 1.0)], ids=str)
@pytest.mark.parametrize("sigmas", [None, (1.0, 0.6, 0.3)], ids=["to zero", "to 0.3"])
def test_kept_tokens_come_out_bit_equal(sampler, sigmas):
    latent = torch.randn(1, 12, 3, 2, 4), torch.randn(1, 8, 18, 2)
    video_mask = torch.tensor([0.0, 1.0, 0.5]).view(1, 1, 3, 1, 1)
    audio_mask = (torch.arange(18) >= 9).float().view(1, 1, 18, 1)
    drafts = drafts_of(*latent, TINY, 24.0, PUBLISHED_COMPRESSION, video_mask, audio_mask)
    work = job(drafts, sampler=sampler)
    work = replace(work, sigmas=sigmas or work.sigmas)
    with Watch().phase("sample", total=work.forwards, unit="forward") as phase:
        got = run(golden.tiny_dit(), work, drafts, 0, phase, CPU, torch.float32)
    assert torch.equal(got.video[:, :, 0], latent[0][:, :, 0]) and torch.equal(got.audio[:, :, :9], latent[1][:, :, :9])
    assert (got.video[:, :, 1:] != latent[0][:, :, 1:]).all() and (got.audio[:, :, 9:] != latent[1][:, :, 9:]).all()


@pytest.mark.parametrize("frozen, free", [("audio", "video"), ("video", "audio")])
def test_a10_frozen_stream_comes_out_bit_equal_and_is_seen(frozen, free):
    latents = {"video": torch.randn(1, 12, 3, 2, 4), "audio": torch.randn(1, 8, 18, 2)}
    results = []
    for given in (latents[frozen], latents[frozen] + 1):
        both = {**latents, frozen: given}
        drafts = drafts_of(both["video"], both["audio"], TINY, 24.0, PUBLISHED_COMPRESSION, conditions=[Frozen(frozen)])
        results.append(sample(drafts, seed=3))
        assert torch.equal(getattr(results[-1], frozen), given)
    assert not torch.equal(getattr(results[0], free), getattr(results[1], free))


def test_a10_tokens_of_a_frozen_stream_have_timestep_zero_at_every_step():
    drafts = clip(conditions=[Frozen("audio")])
    dit = golden.tiny_dit()
    geometry = dit.prepare(drafts["video"].stream(), drafts["audio"].stream(), CPU, torch.float32)
    for sigma in sigmas_of("ltx2", 5):
        assert not timestep_of_tokens(geometry.audio, sigma).any() and geometry.audio.sigma(sigma) == 0
        assert (timestep_of_tokens(geometry.video, sigma) == sigma).all()


def test_a9_kept_stretches_of_sound_are_bit_equal_and_the_gap_is_new():
    sound = torch.randn(1, 8, 18, 2)
    mask = torch.zeros(1, 1, 18, 1)
    mask[:, :, 6:12] = 1
    drafts = drafts_of(torch.zeros(1, 12, 3, 2, 4), sound, TINY, 24.0, PUBLISHED_COMPRESSION, audio_mask=mask)
    got = sample(drafts).audio
    kept = mask.expand_as(sound) == 0
    assert torch.equal(got[kept], sound[kept]) and (got[~kept] != sound[~kept]).all()


def test_a11_both_streams_share_one_clock():
    """1.0 s is the middle of the same second in both, whatever the frame rate."""
    for fps in (24.0, 29.97, 12.0):
        drafts = drafts_of(torch.zeros(1, 12, 9, 1, 1), torch.zeros(1, 8, 80, 2), TINY, fps, PUBLISHED_COMPRESSION)
        for draft in drafts.values():
            start, end = draft.positions[0].unbind(-1)
            (at,) = ((start <= 1.0) & (end > 1.0)).nonzero().flatten().tolist()
            if draft.frame_rate is None:
                assert at == 25  # latents per second, the first one a hundredth long
            else:
                assert at == -(-int(fps) // 8)  # the latent frame that holds pixel frame fps * 1.0 s


def test_f7_without_conditions_there_is_nothing_to_remove():
    drafts = clip()
    assert all(draft.tokens == draft.shape.tokens for draft in drafts.values())
    tokens = torch.randn(1, 24, 12)
    assert drafts["video"].grid(tokens).flatten(2).mT.equal(tokens) and drafts["video"].keyframes(tokens) is None


def test_f8_second_stage_touches_only_what_mask_and_sigma_allow():
    """Upsampled video, kept sound, the image again: its frame and the sound are fixed, the rest starts at sigma 0.909375."""
    video, sound, image = torch.randn(1, 12, 3, 2, 4), torch.randn(1, 8, 18, 2), torch.randn(1, 12, 1, 2, 4)
    drafts = drafts_of(video, sound, TINY, 24.0, PUBLISHED_COMPRESSION, conditions=[Image(image, 0, 1.0), Frozen("audio")])
    toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)})
    work = replace(job(drafts, guidance={name: Bins.constant(OFF) for name in GUIDED}), sigmas=sigmas_of("distilled_stage2", 3))
    with Watch().phase("sample", total=work.forwards, unit="forward") as phase:
        got = run(toy, work, drafts, 7, phase, CPU, torch.float32)
    start, noise = toy.seen[0], Noise(7, drafts, CPU).draw()["video"]
    s = work.sigmas[0]
    assert s == pytest.approx(0.909375)
    torch.testing.assert_close(start["video"][:, 8:], ((1 - s) * drafts["video"].latent + s * noise)[:, 8:])
    assert torch.equal(got.video[:, :, :1], image) and torch.equal(got.audio, sound)


def test_sigmas_that_end_above_zero_leave_their_noise():
    drafts = clip()
    work = replace(job(drafts), sigmas=(1.0, 0.6))
    with Watch().phase("sample", total=work.forwards, unit="forward") as phase:
        half = run(golden.tiny_dit(), work, drafts, 0, phase, CPU, torch.float32)
    noise = Noise(0, drafts, CPU).draw()["video"]
    assert torch.corrcoef(torch.stack([drafts["video"].grid(noise).flatten(), half.video.flatten()]))[0, 1] > 0.3


def test_pace_is_known_to_the_next_run():
    """The second run of a kind starts unpaced, so that it can be captured from its first groups on."""
    drafts, known = clip(), {}
    for run_number in range(2):
        toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)})
        work = job(drafts)
        with Watch().phase("sample", total=work.forwards, unit="forward") as phase:
            run(toy, work, drafts, 0, phase, CPU, torch.float32, known=known)
        assert (toy.pauses[0] is flight.unpaced) == (run_number == 1)


def test_frozen_stream_costs_no_leg_of_its_own():
    drafts = clip(conditions=[Frozen("audio")])
    work = job(drafts, guidance={"video": Bins.constant(OFF), "audio": GUIDED["audio"]})
    assert {plan.legs for plan in work.plans} == {(Leg.COND,)}


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_plain_latent_gives_that_stream_alone(kind):
    other = "audio" if kind == "video" else "video"
    drafts = clip(**{other: False})
    got = sample(drafts, guidance={kind: GUIDED[kind]})
    assert getattr(got, other) is None and getattr(got, kind).shape == drafts[kind].grid(drafts[kind].latent).shape
    assert all(Leg.ISOLATED.value not in legs for legs in got.outcome.legs)


def test_n14_noise_of_single_streams_is_their_own():
    """A plain video latent draws what the video half of a pair draws."""
    both, alone = clip(), clip(audio=False)
    toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)})
    sample(both, seed=4, dit=toy)
    sample(alone, seed=4, dit=toy, guidance={"video": GUIDED["video"]})
    assert torch.equal(toy.seen[0]["video"], toy.seen[3]["video"])


def test_result_that_is_not_finite_is_refused_in_one_sentence():
    drafts = clip()
    toy = Toy({"video": torch.full((1, 24, 12), torch.inf), "audio": torch.zeros(1, 18, 16)})
    with pytest.raises(InputError, match="video values of 288 that are not finite") as error:
        sample(drafts, dit=toy, guidance={name: Bins.constant(OFF) for name in GUIDED})
    assert "precision=bf16" in str(error.value)


# Preview


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_v2_preview_is_the_video_half_once_per_step(sampler):
    sink = Recorder(wants_preview=True)
    got = sample(clip(2), steps=3, sampler=sampler, sink=sink)
    assert [tuple(p.shape) for p in sink.previews] == [(3, 2, 4, 12)] * 3
    if isinstance(sampler, EulerAncestral):  # ends on its last prediction
        assert torch.equal(sink.previews[-1], got.video[0].movedim(0, -1))


def test_v2_no_preview_when_nobody_wants_one_or_there_is_no_video():
    sink = Recorder(wants_preview=False)
    sample(clip(), sink=sink)
    assert not sink.previews
    sink = Recorder(wants_preview=True)
    sample(clip(video=False), sink=sink, guidance={"audio": GUIDED["audio"]})
    assert not sink.previews


# Settings


@pytest.mark.parametrize(
    "name, schedule, want",
    [
        ("auto", "distilled", EulerAncestral(1.0, 1.0)),
        ("auto", "distilled_stage2", Euler),
        ("auto", "ltx2", Euler),
        ("auto", None, Euler),
        ("euler", "distilled", Euler),
        ("euler_ancestral", "ltx2", EulerAncestral(1.0, 1.0)),
        ("res_2s", "ltx2", Res2s(0.5)),
        ("gradient_estimation", "ltx2", GradientEstimation(2.0)),
        ("euler_cfg_pp", "ltx2", EulerCfgPlusPlus(1.0, 1.0)),
    ],
)
def test_sampler_of_a_name(name, schedule, want):
    got = sampler_of(name, schedule)
    assert isinstance(got, want) if isinstance(want, type) else got == want


def test_unknown_sampler_is_refused():
    with pytest.raises(InputError, match="'dpmpp' is not one of auto, euler"):
        sampler_of("dpmpp", "ltx2")


@pytest.mark.parametrize("eta", [float("nan"), -0.1, 1.5])
def test_an_eta_that_is_no_share_is_refused_before_a_step_is_run(eta):
    """A host lets NaN through the limits of its widget: all steps ran, and lower guidance was the advice."""
    with pytest.raises(InputError, match=f"eta is {eta:g}, wanted a share of fresh noise from 0 to 1"):
        sampler_of("euler_ancestral", "ltx2", eta)


def test_settings_a_sampler_cannot_run_with_are_refused():
    drafts = clip()
    skipping = {name: Bins.constant(replace(bins.at(1.0), skip_step=1)) for name, bins in GUIDED.items()}
    with pytest.raises(InputError, match="set skip_step to 0"):
        check_job(job(drafts, sampler=EulerCfgPlusPlus(1.0, 1.0), guidance=skipping))
    with pytest.raises(InputError, match="needs a negative prompt"):
        check_job(job(drafts, sampler=EulerCfgPlusPlus(1.0, 1.0), negative=False, guidance={name: Bins.constant(OFF) for name in GUIDED}))
    with pytest.raises(InputError, match="0.0011"):
        check_job(replace(job(drafts, sampler=Res2s(0.5)), sigmas=(1.0, 0.001, 0.0)))
    for sampler in SAMPLERS:
        check_job(job(drafts, sampler=sampler))


def test_latents_that_do_not_belong_together_are_refused():
    with pytest.raises(InputError, match="make both batches equal"):
        drafts_of(torch.zeros(1, 12, 3, 2, 4), torch.zeros(2, 8, 18, 2), TINY, 24.0, PUBLISHED_COMPRESSION)
    with pytest.raises(InputError, match="neither"):
        drafts_of(None, None, TINY, 24.0, PUBLISHED_COMPRESSION)


def test_loop_costs_a_few_ms_a_step():
    """A hundred guided steps of a model that does nothing: what the loop itself adds is small beside any real forward."""
    toy = Toy({"video": torch.zeros(1, 24, 12), "audio": torch.zeros(1, 18, 16)})
    sample(clip(), dit=toy)
    started = time.perf_counter()
    sample(clip(), steps=100, dit=toy)
    assert (time.perf_counter() - started) / 100 < 0.02


@pytest.mark.parametrize("knob", ["video_cfg", "video_stg", "video_modality", "video_rescale", "audio_cfg", "audio_stg", "audio_modality", "audio_rescale", "stg_blocks", "skip_step"])
def test_n6_every_guidance_setting_changes_the_latents(knob):
    drafts = clip()
    before = sample(drafts)
    stream, _, name = knob.partition("_")
    changed = {}
    for which, bins in GUIDED.items():
        guidance = bins.at(1.0)
        if knob == "stg_blocks":
            guidance = replace(guidance, stg_blocks=frozenset({1}))
        elif knob == "skip_step":
            guidance = replace(guidance, skip_step=1)
        elif which == stream:
            guidance = replace(guidance, **{name: getattr(guidance, name) + 0.2})
        changed[which] = Bins.constant(guidance)
    after = sample(drafts, guidance=changed)
    assert not torch.equal(before.video, after.video) and not torch.equal(before.audio, after.audio)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "res_2s", "euler_cfg_pp"])
def test_n6_eta_changes_the_latents(sampler):
    drafts = clip()
    full, half = (sample(drafts, sampler=sampler_of(sampler, "ltx2", eta)) for eta in (1.0, 0.5))
    assert not torch.equal(full.video, half.video)


def test_e3_e4_negative_prompt_matters_exactly_where_cfg_is_on():
    drafts = clip()
    work = job(drafts)
    other = replace(work, negative=contexts(9))
    off = {name: Bins.constant(replace(bins.at(1.0), cfg=1.0)) for name, bins in GUIDED.items()}
    results = []
    for each in (work, other, replace(work, guidance=off), replace(other, guidance=off), replace(work, guidance=off, negative=None)):
        with Watch().phase("sample", total=each.forwards, unit="forward") as phase:
            results.append(run(golden.tiny_dit(), each, drafts, 0, phase, CPU, torch.float32).video)
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3]) and torch.equal(results[2], results[4])


# On a device


class Strict(EulerAncestral):
    """Fails on anything that waits for the device inside the loop."""

    def run(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return super().run(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preview", [False, True])
def test_loop_on_a_gpu_never_waits_and_gives_the_cpus_latents(preview):
    cuda = torch.device("cuda")
    dit = golden.load_dit(golden.header(), torch.float32).to(cuda)
    latents = torch.randn(1, 12, 3, 2, 4), torch.randn(1, 8, 18, 2)
    mask = torch.tensor([0.0, 1.0, 0.5]).view(1, 1, 3, 1, 1)
    drafts = drafts_of(*latents, TINY, 24.0, PUBLISHED_COMPRESSION, mask)
    on_cpu = sample(drafts, sampler=EulerAncestral(1.0, 1.0))
    work = job(drafts, sampler=Strict(1.0, 1.0))
    work = replace(work, positive=Contexts(*(c.to(cuda) for c in (work.positive.video, work.positive.audio))), negative=Contexts(*(c.to(cuda) for c in (work.negative.video, work.negative.audio))))
    for each in (replace(work, sampler=EulerAncestral(1.0, 1.0)), work):  # once for allocations, and for kernels, which check themselves on first use
        sink = Recorder(wants_preview=preview)
        with Watch([sink]).phase("sample", total=work.forwards, unit="forward") as phase:
            got = run(dit, each, drafts, 0, phase, cuda, torch.float32)
    torch.testing.assert_close(got.video, on_cpu.video, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(got.audio, on_cpu.audio, atol=2e-3, rtol=1e-3)
    assert sink.told[-1][0] == work.forwards and all(seconds > 0 for seconds in got.outcome.seconds)
    assert len(sink.previews) == 3 * preview
    if preview:
        assert torch.equal(sink.previews[-1], got.video[0].movedim(0, -1))
