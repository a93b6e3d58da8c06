"""Each op of the denoise loop against its plain twin and against what the card can move, at the published widths, bf16.

    python tests/bench/kernels.py [--tokens 1344 7488 ...] [--only qk_norm_rope products ...]

One JSON line per op and token count. bytes: what the op must read and write once; copy_share: how near that is to a plain
copy of as many bytes. `products` are the block's matrix products in their possible layouts, in TFLOP/s.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.kernels import (  # noqa: E402
    fp8_linear,
    gated_residual,
    guided_step,
    head_gate,
    linear_gelu,
    low_rank,
    modulate,
    noise_cells,
    qk_norm_rope,
    quantise,
    rms_adaln,
)
from comfyui_ltx25.kernels.rms_adaln import Norm  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.errors import InputError  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.tests.bench.program import need_card, program  # noqa: E402

DEVICE, D, HEADS, TEXT = torch.device("cuda"), 4096, 32, 1024
Case = tuple[str, Callable[[], object], Callable[[], object] | None, float, float]  # name, op, twin, bytes, FLOP


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1344, 5376, 7488])
    parser.add_argument("--only", nargs="*", default=None, help="parts of case names")
    options = parser.parse_args()
    need_card()
    seen: set[str] = set()
    with torch.inference_mode():
        copied = _copy_rate()
        for tokens in (None, *options.tokens):
            for name, op, twin, moved, flop in (*changes_of_weights(), *noise()) if tokens is None else (*row_ops(tokens), *products(tokens)):
                seen.add(name)
                if options.only and not any(part in name for part in options.only):
                    continue
                seconds = _seconds(op)
                line = {"bench": "kernels", "op": name, "tokens": tokens, "us": round(1e6 * seconds, 1)}
                if twin is not None:
                    line["twin_us"] = round(1e6 * _seconds(twin), 1)
                if flop:
                    line["tflops"] = round(flop / seconds / 1e12)
                else:
                    line["copy_share"] = round(moved / seconds / copied, 3)
                print(json.dumps(line | {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "revision": query(revision)}), flush=True)
    unknown = [part for part in options.only or () if not any(part in name for name in seen)]
    if unknown:
        raise InputError(f"--only {' '.join(unknown)} is no part of a case's name; there are {', '.join(sorted(seen))}.")


def row_ops(tokens: int) -> Iterator[Case]:
    """Ops that read and write whole rows."""
    unit = tokens * D * 2  # bytes of one (N, D) tensor
    x, y = _draw(1, tokens, D), _draw(1, tokens, D)
    table = _draw(1, 5, D)
    norms = [Norm(table[:, 0], table[:, 1], False), Norm(table[:, 2], table[:, 3], False)]
    eight = [norm._replace(quantised=True) for norm in norms]
    gate = table[:, 4]
    for count in (1, 2):
        yield f"rms_adaln {count}", lambda n=norms[:count]: rms_adaln.rms_adaln(x, n, None, 1e-6), lambda n=norms[:count]: rms_adaln.rms_adaln_reference(x, n, None, 1e-6), unit * (1 + count), 0
    for count in (0, 1, 2):
        yield (
            f"gated_residual {count}",
            lambda n=norms[:count]: gated_residual.gated_residual(x, y, gate, n, None, 1e-6),
            lambda n=norms[:count]: gated_residual.gated_residual_reference(x, y, gate, n, None, 1e-6),
            unit * (3 + count),
            0,
        )
    yield "gated_residual 1 e4m3", lambda: gated_residual.gated_residual(x, y, gate, eight[:1], None, 1e-6), None, unit * 3.5, 0
    product = _draw(1, tokens, 3 * D + HEADS)
    q, k, v, logits = product.split((D, D, D, HEADS), dim=-1)
    weight = _draw(2, D)
    place = torch.arange(tokens, device=DEVICE)
    grid = torch.stack((place // (14 * 24), 64 + place // 24 % 14, 96 + place % 24))
    for name, (cos, sin), rows in (
        ("a row per token", torch.randn(2, tokens, D // 2, device=DEVICE), None),
        ("three axes", torch.randn(2, 128, D // 6, device=DEVICE), grid),
    ):
        angles = (cos, sin, rows, HEADS, 1e-6)
        yield (
            f"qk_norm_rope {name}",
            lambda angles=angles: qk_norm_rope.qk_norm_rope_pair(q, k, *weight, *angles),
            lambda angles=angles: [qk_norm_rope.qk_norm_rope_reference(part, w, *angles) for part, w in ((q, weight[0]), (k, weight[1]))],
            unit * 4,
            0,
        )
    o = v.unflatten(-1, (HEADS, -1))
    yield "head_gate", lambda: head_gate.head_gate(o, logits), lambda: head_gate.head_gate_reference(o, logits), unit * 2, 0
    yield "head_gate e4m3", lambda: head_gate.head_gate(o, logits, quantised=True), None, unit * 1.5, 0
    wide = _draw(1, tokens, 4 * D)
    yield "quantise", lambda: quantise.quantise(x), lambda: quantise.quantise_reference(x), unit * 1.5, 0
    yield "gelu", lambda: F.gelu(wide, approximate="tanh"), None, unit * 8, 0
    yield "gelu_quantise", lambda: quantise.gelu_quantise(wide), lambda: quantise.gelu_quantise_reference(wide), unit * 6, 0
    context = _draw(1, TEXT, D)
    yield "modulate text", lambda: modulate.modulate(context, table[:, 0], table[:, 1]), lambda: modulate.modulate_reference(context, table[:, 0], table[:, 1]), TEXT * D * 4, 0
    state, t = torch.randn(1, tokens, 128, device=DEVICE), torch.ones(tokens, 1, device=DEVICE)
    cond, *others = (_draw(1, tokens, 128) for _ in range(4))
    step = (state, t, cond, [(2.0, other) for other in others], 0.7, None, (0.9, 0.8))
    yield "guided_step", lambda: guided_step.guided_step(*step), lambda: guided_step.guided_step_reference(*step), tokens * 128 * 32, 0


def products(tokens: int) -> Iterator[Case]:
    """Does a merged gate pay (32 more columns open another row of tiles)? Does GELU ride along for free? What does fp8 give?"""
    x = _draw(1, tokens, D)
    for name, outer, biased in (("qkvg", 3 * D + HEADS, True), ("qkv", 3 * D, True), ("gate", HEADS, True), ("qg", D + HEADS, True), ("q", D, True), ("up", 4 * D, False)):
        weight, bias = _draw(outer, D) / D**0.5, _draw(outer) if biased else None
        flop = 2.0 * tokens * outer * D
        yield f"products {name}", lambda w=weight, b=bias: F.linear(x, w, b), None, 0, flop
        if name in ("qkvg", "qkv", "up") and fp8_linear.supported(DEVICE):
            rows, stored = quantise.quantise(x), quantise.quantise(weight[None])
            for fast in (False, True):
                yield f"products {name} e4m3 {'fast' if fast else 'float32'} sums", lambda r=rows, s=stored, b=bias, f=fast: _fp8(r, s, b, f), None, 0, flop
    weight = _draw(4 * D, D) / D**0.5
    yield "products up + gelu", lambda: linear_gelu.linear_gelu(x, weight, None), lambda: linear_gelu.linear_gelu_reference(x, weight, None), 0, 2.0 * tokens * 4 * D * D


def changes_of_weights() -> Iterator[Case]:
    """What a LoRA of the published rank costs every time a block comes to the device: the largest weight of a block and a square one."""
    for rows in (4 * D, D):
        for ranks in ((450,), (450, 32)):
            weight = _draw(rows, D)
            pairs = [low_rank.LowRank(_draw(rank, D), _draw(rows, rank) / 1000, 0.5) for rank in ranks]
            name = f"low_rank {rows} x {D} by {' + '.join(map(str, ranks))}"
            yield name, lambda w=weight, p=pairs: low_rank.add_low_rank(w, p), lambda w=weight, p=pairs: low_rank.add_low_rank_reference(w, p), 0, 2.0 * rows * D * sum(ranks)


def noise() -> Iterator[Case]:
    """What a diffusion decode of 1280x704 starts 16 frames from."""
    cells, corner, table = torch.empty(16, 176, 320, 48, device=DEVICE, dtype=torch.bfloat16), noise_cells.Corner(704, 1280, 16, 0, 0), noise_cells.levels().to(DEVICE)
    yield "noise_cells", lambda: noise_cells.noise_cells(cells, corner, 4, 7, table), lambda: noise_cells.noise_cells_reference(cells, corner, 4, 7, table), cells.nbytes, 0


def _fp8(rows: quantise.Quantised, weight: quantise.Quantised, bias: torch.Tensor | None, fast: bool) -> torch.Tensor:
    return torch._scaled_mm(
        rows.values[0], weight.values[0].t(), scale_a=rows.scale[0], scale_b=weight.scale[0].t(), bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def _copy_rate() -> float:
    """Bytes per second that a large device copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(run: Callable[[], object]) -> float:
    """Median device seconds of a call: a captured run of 20, so that the host is not measured; fresh caches are not claimed."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 20e3)
    return statistics.median(times)


if __name__ == "__main__":
    program(main)
