"""The transformer at its published size on a CUDA device, random weights, bf16."""

import copy
import logging
import time

import pytest
import torch
from comfyui_ltx25.kernels.fp8_linear import supported
from comfyui_ltx25.ltx25.dit import KEEP_STORED, Contexts, DiT, Leg, LegPlan, quantise
from comfyui_ltx25.tests.support import diffusers_dit
from comfyui_ltx25.tests.support.clips import clip_streams
from comfyui_ltx25.tests.support.published import PUBLISHED_DIT as PUBLISHED
from comfyui_ltx25.tests.support.random_weights import fill_random
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

log = logging.getLogger(__name__)

GRID, AUDIO, FRAME_RATE, SIGMA, BLOCK = (4, 14, 24), 26, 24.0, 0.6, 28  # 768 x 448 px, 25 frames
ALL = (Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED)


@pytest.fixture(scope="module")
def dit():
    with torch.device("meta"):
        dit = DiT(PUBLISHED)
    started = time.perf_counter()
    fill_random(dit, "cuda", torch.bfloat16, keep=KEEP_STORED)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 30
    return dit


@pytest.fixture(scope="module")
def arguments(dit):
    """(video, audio, geometry, tables, positive, negative) of a small clip."""
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    streams = clip_streams(GRID, AUDIO, FRAME_RATE)
    geometry = dit.prepare(*streams, torch.device("cuda"), torch.bfloat16)
    positive, negative = (Contexts(draw(1, 1024, 4096), draw(1, 1024, 2048)) for _ in range(2))
    return draw(1, 1344, 128), draw(1, AUDIO, 128), geometry, dit.tables(geometry, SIGMA, SIGMA), positive, negative


def plan(legs=ALL):
    return LegPlan(legs, frozenset({BLOCK}), frozenset({BLOCK}), True, True)


def flat(velocities):
    return torch.cat([getattr(v, stream).flatten() for v in velocities.values() for stream in ("video", "audio")])


def nothing(number):
    pass


def test_sequential_legs_equal_separate_forwards_bit_for_bit(dit, arguments):
    together = dit(*arguments, plan(), False, nothing)
    for leg in ALL:
        alone = dit(*arguments, plan((leg,)), False, nothing)
        assert torch.equal(together[leg].video, alone[leg].video) and torch.equal(together[leg].audio, alone[leg].audio)


@pytest.mark.parametrize("batched", [False, True])
def test_forward_never_waits_for_the_device_and_can_be_captured(batched, dit, arguments):
    eager = flat(dit(*arguments, plan(), batched, nothing)).clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = flat(dit(*arguments, plan(), batched, nothing))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flat(dit(*arguments, plan(), batched, nothing))
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("batched", [False, True])
def test_twenty_runs_give_the_same_bits_while_the_allocator_is_kept_busy(batched, dit, arguments):
    """Audio runs in a lane of its own: memory that one lane reuses while the other still reads it would show here."""
    want = flat(dit(*arguments, plan(), batched, nothing)).clone()
    for run in range(20):
        other = torch.full((1 + run, 1 << 20), float("nan"), device="cuda")  # what is free now holds something else
        del other
        assert torch.equal(flat(dit(*arguments, plan(), batched, nothing)), want)


def test_a_cancel_between_blocks_leaves_the_next_forward_untouched(dit, arguments):
    want = flat(dit(*arguments, plan(), True, nothing)).clone()

    class Cancelled(Exception):
        pass

    def pause(number):
        if number == 5:
            raise Cancelled

    for _ in range(3):
        with pytest.raises(Cancelled):
            dit(*arguments, plan(), True, pause)
        assert torch.equal(flat(dit(*arguments, plan(), True, nothing)), want)


@pytest.mark.parametrize("batched", [False, True])
def test_bf16_is_as_close_to_float64_as_diffusers_in_bf16(batched, dit, arguments):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        oracle = diffusers_dit.build(PUBLISHED)
    diffusers_dit.share_weights(oracle, dit)
    video, audio, _, _, text, negative = arguments
    ours, exact = dit(*arguments, plan(), batched, nothing), in_float64(dit, arguments)
    for leg in ALL:
        context = negative if leg is Leg.UNCOND else text
        theirs = diffusers_dit.velocities(
            oracle, video, audio, context, SIGMA, GRID, FRAME_RATE, **diffusers_dit.leg_arguments(leg, BLOCK)
        )
        for stream, peer in zip(("video", "audio"), theirs, strict=True):
            truth = getattr(exact[leg], stream)
            mine, peers = (rms(x.double() - truth) / rms(truth) for x in (getattr(ours[leg], stream), peer))
            log.info("batched %s, %s %s: relative rms error %.2e, diffusers %.2e", batched, leg.value, stream, mine, peers)
            assert mine <= 2 * peers


def rms(x):
    return float(x.square().mean().sqrt())


def in_float64(dit, arguments):
    """The same weights and inputs in float64, one block widened at a time: 152 GB would not fit."""

    class Widened(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.narrow = [block]  # in a list: not a submodule
            for name, table in block.named_parameters(recurse=False):
                self.register_parameter(name, nn.Parameter(table.double(), requires_grad=False))

        def opening(self, modulation):
            return self.narrow[0].opening(modulation)

        def forward(self, *args):
            block = copy.deepcopy(self.narrow[0]).double()
            torch.cuda.synchronize()  # both lanes find it whole,
            try:
                return block(*args)
            finally:
                torch.cuda.synchronize()  # and have read it when it goes

    with torch.device("meta"):
        wide = DiT(PUBLISHED)
    for name, child in dit.named_children():
        if name != "transformer_blocks":
            setattr(wide, name, copy.deepcopy(child).double())
    for name, parameter in dit.named_parameters(recurse=False):
        setattr(wide, name, nn.Parameter(parameter.double(), requires_grad=False))
    wide.transformer_blocks = nn.ModuleList(Widened(block) for block in dit.transformer_blocks)
    video, audio, _, _, *texts = arguments
    geometry = wide.prepare(*clip_streams(GRID, AUDIO, FRAME_RATE), torch.device("cuda"), torch.float64)
    tables = wide.tables(geometry, SIGMA, SIGMA)
    texts = [Contexts(text.video.double(), text.audio.double()) for text in texts]
    return wide(video.double(), audio.double(), geometry, tables, *texts, plan(), False, nothing)


def test_fp8_runs_every_leg_captured_and_near_bf16(dit, arguments):
    """Last: the module's transformer is quantised here."""
    if not supported(torch.device("cuda")):
        pytest.skip("this card has no e4m3 products")
    want = dit(*arguments, plan(), True, nothing)
    size = quantise(dit)
    assert size < 0.55 * 2 * 46 * 330e6  # bytes of bf16: 268.8 M video and 75.7 M audio weights a block, less text attention's
    got = dit(*arguments, plan(), True, nothing)
    for leg in ALL:
        for stream in ("video", "audio"):
            a, b = getattr(got[leg], stream).double(), getattr(want[leg], stream).double()
            log.info("fp8 against bf16, %s %s: relative rms %.2e", leg.value, stream, rms(a - b) / rms(b))
            assert 1e-4 < rms(a - b) / rms(b) < 0.2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flat(dit(*arguments, plan(), True, nothing))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, flat(got))
