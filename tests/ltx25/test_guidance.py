import math
from dataclasses import replace

import pytest
import torch
from comfyui_ltx25.ltx25.dit import Leg
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.guidance import (
    AUDIO,
    OFF,
    VIDEO,
    Bins,
    Guidance,
    TextRule,
    check_guidance,
    check_negative,
    combine,
    parse_stg_blocks,
    plan_legs,
)
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.denoise_cases import guidance_of
from hypothesis import given, settings
from hypothesis import strategies as st

LEGS = {"cond": Leg.COND, "uncond": Leg.UNCOND, "ptb": Leg.STG, "mod": Leg.ISOLATED}
COMBINE = golden.names("guidance/combine_")


def formula(c, u, p, m, cfg, stg, modality, rescale):
    """The formula again, in float64, sample by sample."""
    results = []
    for i in range(len(c)):
        g = c[i] + (cfg - 1) * (c[i] - u[i]) + stg * (c[i] - p[i]) + (modality - 1) * (c[i] - m[i])
        results.append(g * (rescale * c[i].std() / g.std() + 1 - rescale) if rescale else g)
    return torch.stack(results)


def test_every_case_is_tested():
    assert set(golden.names("guidance/")) == {*COMBINE, "guidance/decisions"}


@pytest.mark.parametrize("name", COMBINE)
def test_combine_is_the_official_one(name):
    case, want = golden.inputs(name), golden.outputs(name)
    params = guidance_of(case["params"])
    legs = {LEGS[leg]: case[leg] for leg in LEGS if leg in case}
    got = combine(params, legs)
    golden.check(name, "guided", got.to(want["guided"].dtype))
    if "legs_run" in want:
        params = replace(params, stg_blocks=frozenset({2}))
        run = plan_legs(params, params, 0).legs
        assert {leg: LEGS[leg] in run for leg in want["legs_run"]} == want["legs_run"]


def test_decisions():
    case, want = golden.inputs("guidance/decisions"), golden.outputs("guidance/decisions")
    for skip, row in want["skip_table"].items():
        assert [replace(OFF, skip_step=int(skip)).skips(step) for step in range(len(row))] == row
    bins = Bins.of({float(bound): replace(OFF, cfg=cfg) for bound, cfg in case["sigma_bins"].items()})
    assert [bins.at(sigma).cfg for sigma in case["probe_sigmas"]] == want["cfg_at_probe"]
    for at, uncond, stg in want["runs_uncond_runs_stg_at_value"]:
        guidance = replace(OFF, cfg=at, stg=at)
        assert (guidance.needs_uncond, guidance.needs_stg) == (uncond, stg)


def test_n6_a_negative_prompt_that_any_stream_needs_is_missed_before_the_streams_are_known():
    """One of them alone may be kept, or not be there, and then nothing reads its guidance."""
    guided, own = Bins.constant(replace(OFF, cfg=3.0)), Bins.constant(OFF)
    for video, audio in ((own, own), (guided, own), (own, guided)):
        check_negative(video, audio)
    with pytest.raises(InputError, match="video_cfg is 3 but there is no negative prompt; connect `negative`"):
        check_negative(guided, guided)


@settings(deadline=None)
@given(
    st.floats(0, 10), st.floats(-2, 4), st.floats(0, 10), st.sampled_from([0.0, 0.45, 0.7, 1.0]), st.integers(1, 3), st.integers(0, 10**6)
)
def test_n5_combination_equals_the_formula(cfg, stg, modality, rescale, batch, seed):
    c, u, p, m = torch.randn(4, batch, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    guidance = Guidance(cfg, stg, modality, rescale, frozenset({1}), 0)
    got = combine(guidance, {Leg.COND: c, Leg.UNCOND: u, Leg.STG: p, Leg.ISOLATED: m})
    torch.testing.assert_close(got, formula(c, u, p, m, cfg, stg, modality, rescale), atol=1e-8, rtol=1e-6)


def test_b1_item_of_a_batch_is_guided_as_alone():
    x0 = {leg: torch.randn(3, 6, 5) for leg in Leg}
    whole = combine(VIDEO, x0)
    for item in range(3):
        alone = combine(VIDEO, {leg: value[item : item + 1] for leg, value in x0.items()})
        torch.testing.assert_close(whole[item : item + 1], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("knob, leg", [("cfg", Leg.UNCOND), ("stg", Leg.STG), ("modality", Leg.ISOLATED), ("rescale", None)])
@pytest.mark.parametrize("stream", ["video", "audio"])
def test_n6_every_knob_changes_the_plan_or_the_result(knob, leg, stream):
    off, on = {"video": OFF, "audio": OFF}, replace(OFF, **{knob: 2.0}, stg_blocks=frozenset({28}))
    plan = plan_legs(**{**off, stream: on}, step=0)
    assert plan.legs == ((Leg.COND, leg) if leg else (Leg.COND,))
    x0 = {leg: torch.randn(1, 6, 5) for leg in Leg}
    if knob == "rescale":
        on, other = replace(VIDEO, rescale=0.0), replace(VIDEO, rescale=0.7)
        assert not torch.equal(combine(on, x0), combine(other, x0))
    else:
        assert not torch.equal(combine(on, x0), x0[Leg.COND])


scale = st.sampled_from([0.0, 0.5, 1.0, 3.0])
blocks = st.sampled_from([frozenset(), frozenset({28}), frozenset({0, 3})])
guidances = st.builds(Guidance, scale, scale, scale, st.just(0.7), blocks, st.integers(0, 3))


@settings(deadline=None)
@given(guidances | st.none(), guidances | st.none(), st.integers(0, 7), st.booleans())
def test_plan_runs_exactly_the_legs_somebody_uses(video, audio, step, uncond):
    here = [g for g in (video, audio) if g is not None]
    active = [g for g in here if not g.skips(step)]
    plan = plan_legs(video, audio, step, uncond)
    if not active:
        assert plan is None
        return
    assert plan.legs[0] is Leg.COND
    assert (Leg.UNCOND in plan.legs) == (uncond or any(g.cfg != 1 for g in active))
    assert (Leg.STG in plan.legs) == any(g.stg != 0 and g.stg_blocks for g in active)
    assert (Leg.ISOLATED in plan.legs) == (len(here) == 2 and any(g.modality != 1 for g in active))
    if Leg.ISOLATED in plan.legs:
        streams = {"video": video, "audio": audio}
        assert plan.isolated == {name for name, g in streams.items() if g in active and not g.skips(step) and g.modality != 1}
    assert plan.video == (video is None or video in active and not video.skips(step))
    for g, perturbed in ((video, plan.stg_video_blocks), (audio, plan.stg_audio_blocks)):
        assert perturbed == (g.stg_blocks if g is not None and not g.skips(step) and g.stg != 0 else frozenset())


@settings(deadline=None)
@given(guidances, guidances)
def test_a_leg_that_does_not_run_would_not_have_changed_the_result(video, audio):
    plan = plan_legs(replace(video, skip_step=0), replace(audio, skip_step=0), 0)
    values = torch.randn(len(Leg), 1, 4, 3, generator=torch.Generator().manual_seed(0))
    x0 = dict(zip(Leg, values, strict=True))
    if not (plan.stg_video_blocks or plan.stg_audio_blocks):
        x0[Leg.STG] = x0[Leg.COND]  # nothing perturbed: the leg is the conditional one
    for guidance in (video, audio):
        torch.testing.assert_close(combine(guidance, {leg: x0[leg] for leg in plan.legs}), combine(guidance, x0), atol=1e-6, rtol=1e-6)


def test_defaults_run_four_legs():
    plan = plan_legs(VIDEO, AUDIO, 0)
    assert plan.legs == (Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED)
    assert plan.stg_video_blocks == plan.stg_audio_blocks == {28}


@pytest.mark.parametrize("video, audio", [(VIDEO, None), (None, AUDIO)])
def test_a_single_stream_has_nothing_to_isolate_from(video, audio):
    assert plan_legs(video, audio, 0).legs == (Leg.COND, Leg.UNCOND, Leg.STG)


def test_window_of_sigmas():
    bins = Bins.window(VIDEO, 0.9, 0.2)
    assert [bins.at(s) is VIDEO for s in (1.0, 0.95, 0.9, 0.5, 0.21, 0.2, 0.1, 0.0)] == [False, False, True, True, True, False, False, False]
    with pytest.raises(InputError, match="empty window"):
        Bins.window(VIDEO, 0.2, 0.9)
    with pytest.raises(InputError, match="no entries"):
        Bins.of({})


def test_cfg_star_takes_the_negative_prediction_along_the_positive_one():
    c, u = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    got = combine(replace(OFF, cfg=4.0, rule=TextRule.STAR), {Leg.COND: c, Leg.UNCOND: u})
    for i in range(2):
        coefficient = (c[i] * u[i]).sum() / ((u[i] ** 2).sum() + 1e-8)
        torch.testing.assert_close(got[i], c[i] + 3 * (c[i] - coefficient * u[i]))


@pytest.mark.parametrize("eta, limit", [(1.0, 0.0), (0.0, 0.0), (0.5, 2.0), (1.0, 1e9)])
def test_apg_weights_the_part_along_the_prediction(eta, limit):
    c, u = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    got = combine(replace(OFF, cfg=4.0, rule=TextRule.APG, apg_eta=eta, apg_norm=limit), {Leg.COND: c, Leg.UNCOND: u})
    for i in range(2):
        delta = c[i] - u[i]
        if limit:
            delta = delta * min(1.0, limit / float(delta.norm()))
        along = (delta * c[i]).sum() / ((c[i] ** 2).sum() + 1e-8) * c[i]
        torch.testing.assert_close(got[i], c[i] + 3 * (eta * along + delta - along))
    if eta == 1.0 and limit != 2.0:
        torch.testing.assert_close(got, c + 3 * (c - u))


@pytest.mark.parametrize("text, want", [("", set()), ("  ", set()), ("28", {28}), ("0,28", {0, 28}), (" 3 , 3 ", {3}), ("47", {47})])
def test_stg_blocks(text, want):
    assert parse_stg_blocks(text, 48) == want


@pytest.mark.parametrize("text", ["99", "48", "abc", "-1", "1.5", "28,", ",", "28 29", "²"])
def test_stg_blocks_the_model_lacks_are_refused_in_one_sentence(text):
    with pytest.raises(InputError) as error:
        parse_stg_blocks(text, 48)
    assert "wanted numbers from 0 to 47" in str(error.value) and text in str(error.value)
    assert str(error.value).count(". ") == 0


def constant(video, audio):
    return (Bins.constant(video), Bins.constant(audio))


@pytest.mark.parametrize("video, audio, named", [(VIDEO, OFF, "video_cfg is 3"), (OFF, AUDIO, "audio_cfg is 7"), (replace(OFF, cfg=0.5), OFF, "video_cfg is 0.5")])
def test_cfg_without_a_negative_prompt_is_refused_with_the_way_out(video, audio, named):
    with pytest.raises(InputError, match=named) as error:
        check_guidance(*constant(video, audio), negative=False)
    assert "connect `negative`, or set video_cfg and audio_cfg to 1, in bins as well." in str(error.value)


def test_a_frozen_stream_asks_for_no_negative_prompt():
    off, audio = constant(OFF, AUDIO)
    assert check_guidance(off, audio, negative=False, frozen=["audio"]) == []
    assert check_guidance(off, audio, negative=True, frozen=["audio"])  # and has no use for one


def test_e3_e4_negative_prompt_at_cfg_1_is_a_notice():
    (notice,) = check_guidance(*constant(OFF, replace(OFF, modality=3.0)), negative=True)
    assert "negative prompt has no effect" in notice
    assert check_guidance(*constant(OFF, AUDIO), negative=True) == []  # one stream uses it: nothing to say
    assert check_guidance(*constant(OFF, OFF), negative=True, uncond=True) == []  # CFG++ reads it whatever cfg is


def test_stg_without_blocks_is_a_notice_and_no_leg():
    video = replace(VIDEO, stg_blocks=frozenset())
    (notice,) = check_guidance(*constant(video, AUDIO), negative=True)
    assert notice.startswith("video_stg is 1 but stg_blocks is empty")
    assert Leg.STG not in plan_legs(video, replace(AUDIO, stg_blocks=frozenset()), 0).legs


def test_modality_guidance_of_a_single_stream_is_a_notice():
    (notice,) = check_guidance(None, Bins.constant(AUDIO), negative=True)
    assert "audio_modality has no effect" in notice


@pytest.mark.parametrize("bad", [replace(OFF, cfg=math.nan), replace(OFF, stg=math.inf), replace(OFF, skip_step=-1), replace(OFF, apg_eta=math.nan), replace(OFF, apg_norm=math.nan)])
def test_numbers_that_cannot_be_used_are_refused(bad):
    with pytest.raises(InputError):
        check_guidance(*constant(OFF, bad), negative=True)
