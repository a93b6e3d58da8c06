import itertools
import math

import pytest
import torch
from comfyui_ltx25.ltx25 import guidance, schedule
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.schedule import check_sigmas, ltx2, sigmas_of
from comfyui_ltx25.tests.support import golden_dit as golden
from hypothesis import given, settings
from hypothesis import strategies as st

# What the official repository has beside the two schedules its pipelines use.
NOT_BUILT = {"schedule/unused_by_default": "linear-quadratic and beta schedules, which no pipeline uses"}


def test_every_case_is_tested_or_named():
    tested = {"schedule/ltx2", "schedule/ltx2_parameters", "schedule/distilled", "schedule/defaults_by_version"}
    assert set(golden.names("schedule/")) == tested | set(NOT_BUILT)


def test_ltx2_is_the_official_one():
    case = golden.inputs("schedule/ltx2")
    for steps, tokens in case["steps_and_tokens"]:
        got = ltx2(steps) if tokens is None else ltx2(steps, tokens)
        golden.check("schedule/ltx2", f"steps_{steps}_tokens_{tokens or 'default'}", torch.tensor(got))


def test_ltx2_parameters():
    case = golden.inputs("schedule/ltx2_parameters")
    for index, parameters in enumerate(case["parameters"]):
        golden.check("schedule/ltx2_parameters", f"set_{index}", torch.tensor(ltx2(case["steps"], **parameters)))


def test_n3_distilled_sigmas_bit_for_bit():
    want = golden.outputs("schedule/distilled")
    for name, sigmas in (("distilled", sigmas_of("distilled", 30)), ("stage_2", sigmas_of("distilled_stage2", 30))):
        assert torch.equal(torch.tensor(sigmas), want[name])
        assert torch.tensor(sigmas, dtype=torch.float64).tolist() == want[name].double().tolist()  # exact in float32 already
    assert torch.equal(torch.tensor(schedule.DISTILLED_TILED_STAGE2), want["tiled_stage_2"])
    assert sigmas_of("distilled", 30)[-4:] == sigmas_of("distilled_stage2", 8)  # so text keys and values can be shared


def test_n4_shift_follows_the_tokens_only_when_asked():
    """The report wants the shift to depend on the clip; the official pipelines schedule every clip for 4096 tokens."""
    assert sigmas_of("ltx2", 15) == sigmas_of("ltx2", 15, 4096)
    assert sigmas_of("ltx2", 15, 24) != sigmas_of("ltx2", 15, 6144)


def test_defaults_are_those_of_the_published_version():
    want = golden.outputs("schedule/defaults_by_version")["defaults"]
    for row, steps, video, audio in (
        ("2.4 and 2.5", schedule.STEPS, guidance.VIDEO, guidance.AUDIO),
        ("hq preset", schedule.HQ_STEPS, guidance.HQ_VIDEO, guidance.HQ_AUDIO),
    ):
        assert want[row]["steps"] == steps
        for stream, ours in (("video", video), ("audio", audio)):
            official = want[row][stream]
            assert (ours.cfg, ours.stg, ours.rescale, ours.modality, ours.skip_step) == tuple(
                official[name] for name in ("cfg_scale", "stg_scale", "rescale_scale", "modality_scale", "skip_step")
            )
            assert ours.stg_blocks == frozenset(official["stg_blocks"])


def test_one_step_is_one_step():
    assert sigmas_of("ltx2", 1) == (1.0, 0.0)  # the official one is NaN


@pytest.mark.parametrize("steps, tokens", [(2, 45_000), (50, 56_000), (50, 10_000_000), (3, 10**9)])
def test_float32_collapse_of_the_official_order_is_gone(steps, tokens):
    sigmas = ltx2(steps, tokens)
    assert all(later < earlier for earlier, later in itertools.pairwise(sigmas))
    assert sigmas[-2] == pytest.approx(0.1, abs=1e-6)


def test_the_official_float32_order_is_off_by_as_much_as_is_said():
    def official(steps, tokens):
        even, odds = torch.linspace(1, 0, steps + 1)[:-1], math.exp(0.95 + (tokens - 1024) * 1.1 / 3072)
        rest = 1 - odds / (odds + (1 / even - 1))
        return 1 - rest / (rest[-1] / 0.9)

    off = {tokens: max((official(n, tokens) - torch.tensor(ltx2(n, tokens)[:-1])).abs().max().item() for n in range(8, 61)) for tokens in (10_000, 20_000, 30_000, 40_000)}
    assert off[10_000] < 1e-6
    assert [off[tokens] for tokens in (20_000, 30_000, 40_000)] == pytest.approx([2e-5, 9e-4, 2e-2], rel=0.2)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200_000))
def test_ltx2_falls_from_one_to_zero(steps, tokens):
    sigmas = ltx2(steps, tokens)
    assert len(sigmas) == steps + 1 and sigmas[0] == 1.0 and sigmas[-1] == 0.0
    assert all(later < earlier for earlier, later in itertools.pairwise(sigmas))


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_is_refused(steps):
    with pytest.raises(InputError, match="the least is 1"):
        sigmas_of("ltx2", steps)


def test_unknown_schedule_is_refused():
    with pytest.raises(InputError, match="ltx2, distilled, distilled_stage2"):
        sigmas_of("karras", 30)


@pytest.mark.parametrize(
    "sigmas, says",
    [
        ([], "a step needs two"),
        ([1.0], "a step needs two"),
        ([14.6, 1.0, 0.0], "sigma 0 is 14.6, wanted 0 to 1"),
        ([1.0, -0.1], "sigma 1 is -0.1"),
        ([1.0, math.nan, 0.0], "sigma 1 is nan"),
        ([0.5, 0.7, 0.0], "must fall"),
        ([1.0, 0.5, 0.5, 0.0], "must fall"),
        ([0.0, 1.0], "must fall"),
    ],
)
def test_sigmas_that_cannot_be_used_are_refused_in_one_sentence(sigmas, says):
    with pytest.raises(InputError, match=says) as error:
        check_sigmas(sigmas)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_sigmas_may_end_above_zero():
    assert check_sigmas(torch.tensor([1.0, 0.5, 0.25])) == (1.0, 0.5, 0.25)
