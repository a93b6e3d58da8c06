"""Several legs in one forward: what they share is computed once, and each is what it would be alone."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.dit import Contexts, Leg, LegPlan
from comfyui_ltx25.ltx25.dit import attention as layers
from comfyui_ltx25.ltx25.dit.rows import Point, Rows, schedule
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.dit_cases import forward_of

ALL = (Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED)
# Rows of several legs in one product round differently: about 1e-6 of a velocity near 1 (the golden README says 2e-6).
BATCHED = dict(atol=1e-5, rtol=1e-5)


def plan(legs=ALL, video_blocks=(2,), audio_blocks=(2,), video=True, audio=True):
    return LegPlan(legs, frozenset(video_blocks), frozenset(audio_blocks), video, audio)


@pytest.fixture(scope="module")
def dit():
    return golden.tiny_dit()


@pytest.fixture
def forward(dit):
    return forward_of(dit, golden.inputs("dit/two_sigmas"))


@pytest.fixture
def negative():
    case = golden.inputs("dit/t2v_uncond")
    return Contexts(case["video_context"], case["audio_context"])


def alone(forward, dit, plan, negative):
    """Each leg in a forward of its own."""
    return {leg: forward.run(dit, replace(plan, legs=(leg,)), negative)[leg] for leg in plan.legs}


def assert_velocities(got, want, **tolerance):
    assert got.keys() == want.keys()
    for leg, stream in itertools.product(want, ("video", "audio")):
        a, b = getattr(got[leg], stream), getattr(want[leg], stream)
        assert (a is None) == (b is None)
        if b is None:
            continue
        if tolerance:
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert torch.equal(a, b), f"{leg} {stream}: {(a - b).abs().max()}"


PLANS = {
    "all legs": plan(),
    "first block": plan(video_blocks=(0,), audio_blocks=(0,)),
    "video perturbed first": plan(video_blocks=(1,), audio_blocks=(3,)),
    "audio perturbed first": plan(video_blocks=(3,), audio_blocks=(0, 1)),
    "every block": plan(video_blocks=range(4), audio_blocks=range(4)),
    "last block": plan(video_blocks=(3,), audio_blocks=(3,)),
    "only video perturbed": plan(audio_blocks=()),
    "only audio perturbed": plan(video_blocks=()),
    "nothing perturbed": plan(video_blocks=(), audio_blocks=()),
    "cond": plan((Leg.COND,)),
    "cond, stg": plan((Leg.COND, Leg.STG)),
    "cond, uncond": plan((Leg.COND, Leg.UNCOND)),
    "cond, mod": plan((Leg.COND, Leg.ISOLATED)),
    "uncond, stg, mod": plan((Leg.UNCOND, Leg.STG, Leg.ISOLATED)),
    "video skipped": plan(video=False),
    "audio skipped": plan(audio=False),
    "both skipped": plan(video=False, audio=False),
}


@pytest.mark.parametrize("name", PLANS)
def test_sequential_legs_equal_separate_forwards_bit_for_bit(name, dit, forward, negative):
    assert_velocities(forward.run(dit, PLANS[name], negative), alone(forward, dit, PLANS[name], negative))


@pytest.mark.parametrize("name", PLANS)
def test_batched_legs_equal_separate_forwards_within_rounding(name, dit, forward, negative):
    got = forward.run(dit, PLANS[name], negative, batched=True)
    assert_velocities(got, alone(forward, dit, PLANS[name], negative), **BATCHED)


@pytest.mark.parametrize("batched", [False, True])
def test_legs_differ_from_each_other(batched, dit, forward, negative):
    got = forward.run(dit, plan(), negative, batched)
    for one, other in itertools.combinations(got, 2):
        assert (got[one].video - got[other].video).abs().max() > 1e-2
        assert (got[one].audio - got[other].audio).abs().max() > 1e-2


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_one_stream_alone(stream, batched, dit, negative):
    """Without the other stream the isolated leg is the conditional one, and only this stream's blocks count for STG."""
    case = {name: value for name, value in golden.inputs("dit/t2v_cond").items() if name.startswith(stream)}
    forward = forward_of(dit, case)
    got = forward.run(dit, plan(video_blocks=(2,), audio_blocks=(2,)), negative, batched)
    other = "audio" if stream == "video" else "video"
    assert all(getattr(velocity, other) is None for velocity in got.values())
    assert_velocities(got, alone(forward, dit, plan(), negative), **BATCHED)
    assert torch.equal(getattr(got[Leg.ISOLATED], stream), getattr(got[Leg.COND], stream))
    foreign = plan(**{f"{stream}_blocks": (), f"{other}_blocks": (1,)})
    got = forward.run(dit, foreign, negative, batched)
    assert torch.equal(getattr(got[Leg.STG], stream), getattr(got[Leg.COND], stream))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["all legs", "video skipped", "audio skipped", "first block"])
@pytest.mark.parametrize("contexts", [1, 2])
def test_batch_items_equal_a_batch_of_one(contexts, name, batched, dit, forward, negative):
    """Two latents at once, with one prompt for both or one each; sequential legs still equal their own forwards."""
    torch.manual_seed(0)
    pair = replace(
        forward,
        video=torch.cat((forward.video, torch.randn_like(forward.video))),
        audio=torch.cat((forward.audio, torch.randn_like(forward.audio))),
        positive=widen(forward.positive, contexts),
    )
    got = pair.run(dit, PLANS[name], widen(negative, contexts), batched)
    for item in range(2):
        one = replace(
            pair,
            video=pair.video[item : item + 1],
            audio=pair.audio[item : item + 1],
            positive=pick(pair.positive, item, contexts),
        )
        want = alone(one, dit, PLANS[name], pick(widen(negative, contexts), item, contexts))
        part = {leg: replace(v, video=v.video[item : item + 1], audio=v.audio[item : item + 1]) for leg, v in got.items()}
        assert_velocities(part, want, **BATCHED)
    if not batched:
        assert_velocities(got, alone(pair, dit, PLANS[name], widen(negative, contexts)))


def widen(contexts, count):
    """`count` different prompts in place of one."""
    return Contexts(*(torch.cat([tensor, tensor.flip(1)])[:count] for tensor in (contexts.video, contexts.audio)))


def pick(contexts, item, count):
    item = min(item, count - 1)
    return Contexts(contexts.video[item : item + 1], contexts.audio[item : item + 1])


@pytest.mark.parametrize("batched", [False, True])
def test_prompts_of_different_lengths(batched, dit, forward, negative):
    short = Contexts(negative.video[:, :5], negative.audio[:, :5])
    assert_velocities(forward.run(dit, plan(), short, batched), alone(forward, dit, plan(), short), **BATCHED)


@pytest.mark.parametrize("batched", [False, True])
def test_a_stream_without_a_negative_context_takes_the_positive_one(batched, dit, forward, negative):
    got = forward.run(dit, plan(), Contexts(negative.video, None), batched)
    want = forward.run(dit, plan(), Contexts(negative.video, forward.positive.audio), batched)
    assert_velocities(got, want, **BATCHED)


@pytest.mark.parametrize("batched", [False, True])
def test_masked_self_attention_in_every_leg(batched, dit, negative):
    forward = forward_of(dit, golden.inputs("dit/attention_per_token"))
    assert_velocities(forward.run(dit, plan(), negative, batched), alone(forward, dit, plan(), negative), **BATCHED)


@pytest.mark.parametrize("batched", [False, True])
def test_inputs_are_not_written_to(batched, dit, forward, negative):
    before = [tensor.clone() for tensor in (forward.video, forward.audio, forward.positive.video, negative.audio)]
    forward.run(dit, plan(), negative, batched)
    assert all(map(torch.equal, before, (forward.video, forward.audio, forward.positive.video, negative.audio)))


# What is computed how often, 4 blocks, one leg after the other.


@pytest.fixture
def counted(monkeypatch):
    """Calls of the block-level operations per layer name."""
    calls = Counter()

    def count(cls, method, key):
        original = getattr(cls, method)

        def wrapped(self, *args, **kwargs):
            calls[key, names[self]] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, method, wrapped)

    dit = golden.load_dit(golden.header(), torch.float32)
    names = {module: name.removeprefix("transformer_blocks.") for name, module in dit.named_modules()}
    count(layers.SelfAttention, "_project", "project")
    count(layers.SelfAttention, "_attend", "attend")
    count(layers.CrossAttention, "keys_values", "keys_values")
    count(layers.CrossAttention, "_attend", "attend")
    count(layers.FeedForward, "forward", "forward")
    return dit, calls


def per_block(calls, op, layer):
    return [calls[op, f"{i}.{layer}"] for i in range(4)]


def test_four_legs_compute_what_the_sharing_plan_says(counted, forward, negative):
    """Block 0's self-attention once; the STG leg is the conditional one before block 2; text keys and values twice."""
    dit, calls = counted
    forward.run(dit, plan(), negative)
    for s in ("", "audio_"):
        assert per_block(calls, "project", f"{s}attn1") == [1, 3, 3, 4]
        assert per_block(calls, "attend", f"{s}attn1") == [1, 3, 3, 4]
        assert per_block(calls, "keys_values", f"{s}attn2") == [2, 2, 2, 2]
        assert per_block(calls, "attend", f"{s}attn2") == [2, 3, 4, 4]
        assert per_block(calls, "forward", f"{s}ff") == [3, 3, 4, 4]
    for layer in ("audio_to_video_attn", "video_to_audio_attn"):
        assert per_block(calls, "attend", layer) == per_block(calls, "keys_values", layer) == [2, 2, 3, 3]


def test_a_stream_that_is_not_perturbed_parts_behind_its_text_attention(counted, forward, negative):
    dit, calls = counted
    forward.run(dit, plan(audio_blocks=()), negative)
    assert per_block(calls, "attend", "attn2") == [2, 3, 4, 4]
    assert per_block(calls, "attend", "audio_attn1") == [1, 3, 3, 4]
    assert per_block(calls, "attend", "audio_attn2") == [2, 3, 3, 4]
    assert per_block(calls, "forward", "audio_ff") == [3, 3, 4, 4]


def test_an_unperturbed_stg_leg_and_an_isolated_leg_of_one_stream_cost_nothing(counted, negative):
    dit, calls = counted
    case = {name: value for name, value in golden.inputs("dit/t2v_cond").items() if name.startswith("audio")}
    forward_of(dit, case).run(dit, plan(audio_blocks=()), negative)
    assert per_block(calls, "attend", "audio_attn1") == [1, 2, 2, 2]
    assert per_block(calls, "forward", "audio_ff") == [2, 2, 2, 2]
    used = {name for _, name in calls}
    assert not any(part in name for name in used for part in (".attn", ".ff", "_to_"))


def test_a_skipped_stream_is_only_read(counted, forward, negative):
    dit, calls = counted
    got = forward.run(dit, plan(audio=False), negative)
    for layer in ("audio_attn1", "audio_attn2", "audio_ff", "video_to_audio_attn"):
        assert per_block(calls, "attend", layer) == per_block(calls, "forward", layer) == [0] * 4
    assert per_block(calls, "keys_values", "audio_to_video_attn") == [1] * 4  # the same audio for every leg
    assert all(torch.equal(got[leg].audio, got[Leg.COND].audio) for leg in ALL)


def test_an_isolated_leg_that_one_stream_reads_is_not_run_for_the_other(counted, forward, negative):
    dit, calls = counted
    want = forward.run(dit, plan(), negative)
    calls.clear()
    got = forward.run(dit, replace(plan(), isolated=frozenset({"audio"})), negative)
    assert got[Leg.ISOLATED].video is None
    assert torch.equal(got[Leg.ISOLATED].audio, want[Leg.ISOLATED].audio)
    for leg in (Leg.COND, Leg.UNCOND, Leg.STG):
        assert torch.equal(got[leg].video, want[leg].video) and torch.equal(got[leg].audio, want[leg].audio)
    assert per_block(calls, "attend", "attn1") == [1, 2, 2, 3]
    assert per_block(calls, "attend", "audio_attn1") == [1, 3, 3, 4]
    assert per_block(calls, "forward", "ff") == [2, 2, 3, 3]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("isolated", [("video",), ("audio",)])
@pytest.mark.parametrize("legs", [ALL, (Leg.COND, Leg.ISOLATED)])
def test_an_isolated_leg_of_one_stream_equals_that_of_both(legs, isolated, batched, dit, forward, negative):
    want = forward.run(dit, plan(legs), negative, batched)
    got = forward.run(dit, replace(plan(legs), isolated=frozenset(isolated)), negative, batched)
    for leg, stream in itertools.product(legs, ("video", "audio")):
        mine = getattr(got[leg], stream)
        if leg is Leg.ISOLATED and stream not in isolated:
            assert mine is None
        else:
            torch.testing.assert_close(mine, getattr(want[leg], stream), **BATCHED)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_a_stream_nobody_reads_ends_where_the_other_one_last_reads_it(stream, batched, counted, forward, negative):
    dit, calls = counted
    want = forward.run(dit, plan(), negative, batched)
    calls.clear()
    other = "video" if stream == "audio" else "audio"
    got = forward.run(dit, replace(plan(), read=frozenset({other})), negative, batched)
    for leg in ALL:
        assert getattr(got[leg], stream) is None
        assert torch.equal(getattr(got[leg], other), getattr(want[leg], other))
    prefix, ways = ("", ("audio_to_video_attn", "video_to_audio_attn")) if stream == "video" else ("audio_", ("video_to_audio_attn", "audio_to_video_attn"))
    assert per_block(calls, "forward", f"{prefix}ff")[3] == 0 and per_block(calls, "keys_values", ways[0])[3] == 0
    assert per_block(calls, "forward", f"{prefix}ff")[2] > 0 and per_block(calls, "keys_values", ways[1])[3] > 0


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("case, span", [("dit/i2v_mask0", (8, 24)), ("dit/attention_strength", (0, 24))])
def test_kept_tokens_at_the_ends_are_left_out_of_the_last_feed_forward_and_the_head(case, span, batched, dit, negative, monkeypatch):
    """A first picture, and a reference behind the clip: what is made of the others is what it was."""
    seen, layer = {}, layers.FeedForward.forward

    def forward_seen(self, x):
        seen[self] = x.shape[1]
        return layer(self, x)

    forward = forward_of(dit, golden.inputs(case))
    want = forward.run(dit, plan(), negative, batched)
    monkeypatch.setattr(layers.FeedForward, "forward", forward_seen)
    got = forward.run(dit, replace(plan(), kept=False), negative, batched)
    first, stop = span
    for leg in ALL:
        torch.testing.assert_close(got[leg].video[:, first:stop], want[leg].video[:, first:stop], **BATCHED)
        assert got[leg].video.shape == want[leg].video.shape and torch.equal(got[leg].audio, want[leg].audio)
        assert not got[leg].video[:, :first].any() and not got[leg].video[:, stop:].any()
    assert [seen[block.ff] for block in dit.transformer_blocks] == [forward.video.shape[1]] * 3 + [stop - first]
    assert {seen[block.audio_ff] for block in dit.transformer_blocks} == {18}


@pytest.mark.parametrize("skipped", [plan(), plan(video=False), plan(audio=False)], ids=["none", "video", "audio"])
@pytest.mark.parametrize("case", ["dit/i2v_mask0", "dit/per_token_random"])
def test_kept_tokens_between_others_and_skipped_streams_are_as_they_were(case, skipped, dit, negative):
    forward = forward_of(dit, golden.inputs(case))
    got, want = forward.run(dit, replace(skipped, kept=False), negative), forward.run(dit, skipped, negative)
    first, stop = forward.geometry.video.made if skipped.video else (0, 24)
    for leg in ALL:
        torch.testing.assert_close(got[leg].video[:, first:stop], want[leg].video[:, first:stop], **BATCHED)
        assert torch.equal(got[leg].audio, want[leg].audio)


def test_pause_is_called_after_every_block_and_may_end_the_forward(dit, forward):
    seen = []

    class Cancelled(Exception):
        pass

    def pause(number):
        seen.append(number)
        if number == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        dit(forward.video, forward.audio, forward.geometry, forward.tables, forward.positive, None, plan((Leg.COND,)), False, pause)
    assert seen == [0, 1, 2]


# The schedule by itself.


def test_rows_keep_streams_that_meet_in_front_and_the_positive_text_behind():
    legs = schedule(plan(), True, True).video
    assert legs.groups(0, Point.ENTRY) == ((Leg.UNCOND, Leg.COND, Leg.STG, Leg.ISOLATED),)
    assert legs.groups(0, Point.TEXT) == ((Leg.UNCOND,), (Leg.COND, Leg.STG, Leg.ISOLATED))
    assert legs.groups(0, Point.CROSS) == ((Leg.UNCOND,), (Leg.COND, Leg.STG), (Leg.ISOLATED,))
    assert legs.groups(2, Point.ENTRY) == legs.groups(0, Point.CROSS)
    assert legs.groups(2, Point.TEXT) == ((Leg.UNCOND,), (Leg.COND,), (Leg.STG,), (Leg.ISOLATED,))


def test_groups_only_ever_split():
    choices = [(), (0,), (1, 3), (3,)]
    for video, audio in itertools.product(choices, choices):
        for there in ((True, True), (True, False), (False, True)):
            both = schedule(plan(video_blocks=video, audio_blocks=audio), *there)
            for stream in filter(None, (both.video, both.audio)):
                before = (stream.legs,)
                for number, point in itertools.product(range(4), Point):
                    groups = stream.groups(number, point)
                    assert sorted(leg.value for group in groups for leg in group) == sorted(leg.value for leg in ALL)
                    assert all(any(set(group) <= set(old) for old in before) for group in groups)
                    before = groups


@pytest.mark.parametrize("batched", [False, True])
def test_forked_rows_are_written_on_their_own(batched):
    x = torch.ones(2, 3, 4)
    rows = Rows(((Leg.UNCOND, Leg.COND),), (x,), batched).fork(((Leg.UNCOND,), (Leg.COND,)))
    rows.row(1).add_(1)
    assert torch.equal(rows.row(0), torch.ones(2, 3, 4)) and torch.equal(rows.row(1), 2 * torch.ones(2, 3, 4))
