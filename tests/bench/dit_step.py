"""Seconds of one step of the transformer at its published size, random weights, bf16: ours and, beside it, diffusers'.

    python tests/bench/dit_step.py [--legs 1 4] [--only 768x448x25f ...] [--peer] [--eager] [--fp8] [--busy] [--same]

One JSON line per case: medians of CUDA events over --repeat calls after the warm-up, arithmetic per second, share of the
floor at --peak TFLOP/s, and peak memory. `graph` replays a captured graph, `eager` (--eager) launches every kernel: their
times, queued_ms (the host's share of a call), device_busy (--busy) and peaks decide from which size on graphs pay.
--same counts distinct results of 20 calls: 1 is bit-equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.kernels.attention import choices  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.dit import KEEP_STORED, Contexts, DiT, Leg, LegPlan, check_fp8, quantise  # noqa: E402
from comfyui_ltx25.ltx25.flight import unpaced  # noqa: E402
from comfyui_ltx25.ltx25.graphs import GraphedDiT  # noqa: E402
from comfyui_ltx25.ltx25.instrument.flops import group_flops  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.tests.bench.busy import busy_share  # noqa: E402
from comfyui_ltx25.tests.bench.program import need_card, program  # noqa: E402
from comfyui_ltx25.tests.bench.sizes import DIT, Geometry  # noqa: E402
from comfyui_ltx25.tests.support.clips import clip_streams  # noqa: E402
from comfyui_ltx25.tests.support.published import PUBLISHED_DIT  # noqa: E402
from comfyui_ltx25.tests.support.random_weights import fill_random  # noqa: E402

BLOCK, SIGMA, FRAME_RATE, TEXT = 28, 0.6, 24.0, 1024
LEGS = {1: (Leg.COND,), 4: (Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED)}
DEVICE = torch.device("cuda")


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--legs", type=int, nargs="*", choices=sorted(LEGS), default=sorted(LEGS))
    parser.add_argument("--only", nargs="*", choices=[g.name for g in DIT], default=[g.name for g in DIT])
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of a large bf16 product on this card")
    parser.add_argument("--peer", action="store_true", help="run diffusers on the same weights as well")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of one eager step")
    parser.add_argument("--eager", action="store_true", help="also without graphs")
    parser.add_argument("--fp8", action="store_true", help="inner blocks in row-wise e4m3; without --peer")
    parser.add_argument("--busy", action="store_true", help="also the device-busy share of a run of calls, from a profiler trace")
    parser.add_argument("--same", action="store_true", help="also how many different results 20 calls give")
    options = parser.parse_args()
    need_card()
    with torch.device("meta"):
        dit = DiT(PUBLISHED_DIT)
    fill_random(dit, DEVICE, torch.bfloat16, keep=KEEP_STORED)
    if options.peer and options.fp8:
        parser.error("--peer shares bf16 weights with ours; run it without --fp8")
    precision = "fp8" if options.fp8 else "bf16"
    if options.fp8:
        check_fp8(DEVICE)
        quantise(dit)
        torch.cuda.empty_cache()
    peer = _peer(dit) if options.peer else None
    for geometry in (g for g in DIT if g.name in options.only):
        for legs in options.legs:
            for way, model in (("graph", GraphedDiT(dit)), *([("eager", dit)] if options.eager else [])):
                _report(geometry, legs, way, precision, options.peak, _ours(model, geometry, legs, options))
            if options.profile:
                _ours(_Profiled(dit), geometry, legs, argparse.Namespace(repeat=1, busy=False, same=False))
            if peer is not None:
                _report(geometry, legs, "diffusers", precision, options.peak, _theirs(peer, geometry, legs, options.repeat))
    print(json.dumps({"attention": choices()}), flush=True)


def _inputs(geometry: Geometry, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Contexts, Contexts]:
    generator = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    text = [Contexts(draw(1, TEXT, PUBLISHED_DIT.width), draw(1, TEXT, PUBLISHED_DIT.audio_width)) for _ in range(2)]
    return draw(1, geometry.video_tokens, 128), draw(1, geometry.audio_tokens, 128), *text


@torch.inference_mode()
def _ours(dit, geometry: Geometry, legs: int, options: argparse.Namespace) -> dict[str, object]:
    video, audio, positive, negative = _inputs(geometry, torch.bfloat16)
    streams = clip_streams(geometry.grid, geometry.audio_tokens, FRAME_RATE)
    clip = dit.prepare(*streams, DEVICE, torch.bfloat16)
    tables = dit.schedule_tables(clip, [(SIGMA, SIGMA)])[0]
    blocks = frozenset({BLOCK}) if legs > 1 else frozenset()
    plan = LegPlan(LEGS[legs], blocks, blocks, True, True)

    def step():
        return dit(video, audio, clip, tables, positive, negative if legs > 1 else None, plan, True, unpaced)

    result = _timed(step, options.repeat)
    if options.busy:
        result["device_busy"] = round(busy_share(lambda: [step() for _ in range(3)]), 4)
    if options.same:
        seen = {tuple(_digest(getattr(v, name)) for v in step().values() for name in ("video", "audio")) for _ in range(20)}
        result["different_of_20"] = len(seen)
    if isinstance(dit, GraphedDiT):
        dit.drop()
    return result


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().view(torch.int16).cpu().numpy().tobytes()).digest()


class _Profiled:
    """A DiT whose last call of `_timed` is traced and listed by kernel."""

    def __init__(self, dit: DiT) -> None:
        self._dit = dit
        self._calls = 0
        self.prepare, self.schedule_tables = dit.prepare, dit.schedule_tables

    def __call__(self, *args):
        self._calls += 1
        if self._calls < 4:
            return self._dit(*args)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            result = self._dit(*args)
            torch.cuda.synchronize()
        print(trace.key_averages().table(sort_by="self_device_time_total", row_limit=28, max_name_column_width=90), flush=True)
        return result


def _peer(dit: DiT) -> torch.nn.Module:
    from comfyui_ltx25.tests.support import diffusers_dit

    with torch.device("meta"):
        oracle = diffusers_dit.build(PUBLISHED_DIT)
    diffusers_dit.share_weights(oracle, dit)
    return oracle


@torch.inference_mode()
def _theirs(oracle: torch.nn.Module, geometry: Geometry, legs: int, repeat: int) -> dict[str, object]:
    """Four legs as its pipeline runs them: conditional and negative as a batch of two, then the other two alone."""
    from comfyui_ltx25.tests.support import diffusers_dit

    video, audio, positive, negative = _inputs(geometry, torch.bfloat16)
    both = Contexts(torch.cat([negative.video, positive.video]), torch.cat([negative.audio, positive.audio]))

    def call(text: Contexts, leg: Leg) -> None:
        rows = text.video.shape[0]
        diffusers_dit.velocities(
            oracle,
            video.expand(rows, -1, -1),
            audio.expand(rows, -1, -1),
            text,
            SIGMA,
            geometry.grid,
            FRAME_RATE,
            **diffusers_dit.leg_arguments(leg, BLOCK),
        )

    def step() -> None:
        if legs == 1:
            call(positive, Leg.COND)
        else:
            call(both, Leg.COND)
            call(positive, Leg.STG)
            call(positive, Leg.ISOLATED)

    return _timed(step, repeat)


def _timed(step: Callable[[], object], repeat: int) -> dict[str, object]:
    """Median device and host ms of a call, and peaks: memory in use, and memory held from the device."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds, queued = [], []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = time.perf_counter()
        start.record()
        step()
        end.record()
        queued.append(time.perf_counter() - host)
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "queued_ms": round(1e3 * statistics.median(queued), 2),
        "used_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
    }


def flops(geometry: Geometry, legs: int) -> tuple[float, float]:
    """Of the step, as the plan shares it and with nothing shared: linear products and attention, a multiply-add as 2."""
    n, m, t = geometry.video_tokens, geometry.audio_tokens, TEXT
    blocks = frozenset({BLOCK}) if legs > 1 else frozenset()
    shared = group_flops(PUBLISHED_DIT, LegPlan(LEGS[legs], blocks, blocks, True, True), n, m, t).total
    one = group_flops(PUBLISHED_DIT, LegPlan(LEGS[1], frozenset(), frozenset(), True, True), n, m, t).total
    return shared, legs * one


def _report(geometry: Geometry, legs: int, way: str, precision: str, peak: float, measured: dict[str, object]) -> None:
    shared, unshared = flops(geometry, legs)
    seconds = measured["ms"] / 1e3
    print(
        json.dumps(
            {
                "bench": "dit_step",
                "geometry": geometry.name,
                "tokens": geometry.video_tokens,
                "legs": legs,
                "way": way,
                "precision": precision,
                **measured,
                "tflops_unshared": round(unshared / seconds / 1e12),
                "floor_ms": round(1e3 * shared / (peak * 1e12), 1),  # bf16's, in fp8 too
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "revision": query(revision),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    program(main)
