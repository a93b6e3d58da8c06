"""The transformer with its inner blocks in fp8, on the CPU's plain arithmetic."""

import pytest
import torch
from comfyui_ltx25.ltx25.dit import Contexts, Leg, LegPlan, check_fp8, quantise
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.linear import Linear
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.dit_cases import forward_of

PLAN = LegPlan((Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED), frozenset({2}), frozenset({2}), True, True)


@pytest.fixture
def quantised():
    dit = golden.load_dit(golden.header(), torch.float32)
    before = {name: layer.weight.clone() for name, layer in dit.named_modules() if isinstance(layer, Linear)}
    quantise(dit)
    return dit, before


def negative():
    case = golden.inputs("dit/t2v_uncond")
    return Contexts(case["video_context"], case["audio_context"])


def test_inner_blocks_but_text_attention_are_stored_in_e4m3(quantised):
    dit, before = quantised
    last = len(dit.transformer_blocks) - 1
    for name in before:
        _, number, layer = name.split(".", 2)
        inner = 0 < int(number) < last and not layer.startswith(("attn2.", "audio_attn2."))
        assert dit.get_submodule(name).quantised == inner, name


def test_every_leg_is_what_plain_products_of_the_stored_numbers_give_but_for_the_inputs_rounding(quantised):
    """Bounds both ways: fp8 changes the result, by percents and not more."""
    dit, _ = quantised
    forward = forward_of(dit, golden.inputs("dit/two_sigmas"))
    got = forward.run(dit, PLAN, negative())
    want = forward.run(golden.tiny_dit(), PLAN, negative())
    for leg in PLAN.legs:
        for stream in ("video", "audio"):
            a, b = getattr(got[leg], stream), getattr(want[leg], stream)
            assert 1e-4 < (a - b).norm() / b.norm() < 0.2


def test_batched_legs_equal_sequential_ones_within_a_flip_of_e4m3(quantised):
    """A last-bit difference may flip a rounding to eight bits: legs differ by less than fp8 itself does."""
    dit, _ = quantised
    forward = forward_of(dit, golden.inputs("dit/two_sigmas"))
    one, other = (forward.run(dit, PLAN, negative(), batched) for batched in (False, True))
    exact = forward.run(golden.tiny_dit(), PLAN, negative())
    for leg in PLAN.legs:
        for stream in ("video", "audio"):
            a, b, c = (getattr(run[leg], stream) for run in (one, other, exact))
            assert (a - b).norm() < 0.3 * (a - c).norm()


def test_sequential_legs_equal_separate_forwards_bit_for_bit(quantised):
    dit, _ = quantised
    forward = forward_of(dit, golden.inputs("dit/two_sigmas"))
    together = forward.run(dit, PLAN, negative())
    for leg in PLAN.legs:
        alone = forward.run(dit, LegPlan((leg,), frozenset({2}), frozenset({2}), True, True), negative())[leg]
        assert torch.equal(together[leg].video, alone.video) and torch.equal(together[leg].audio, alone.audio)


def test_fp8_is_refused_where_there_is_none():
    with pytest.raises(InputError, match=r"precision fp8 needs a card.*choose precision=bf16\.$"):
        check_fp8(torch.device("cpu"))
