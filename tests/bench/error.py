"""What a precision costs in accuracy at the published size, random weights: fp8 against bf16, beside bf16 against float32.

    python tests/bench/error.py [--steps 30]

One JSON line per comparison: relative L2 of the velocities of each leg of one forward, and of the latents after --steps guided
steps of a small clip (512x320x25f: N = 640). All three runs have the same weights (bf16 values) and the same noise. Random
weights spread errors further than trained ones do, so final latents are to be compared with each other, not by themselves.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25 import guidance, steps  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.dit import KEEP_STORED, Contexts, DiT, Leg, LegPlan, quantise  # noqa: E402
from comfyui_ltx25.ltx25.flight import unpaced  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.ltx25.schedule import sigmas_of  # noqa: E402
from comfyui_ltx25.tests.bench.program import need_card, program  # noqa: E402
from comfyui_ltx25.tests.bench.sizes import Geometry  # noqa: E402
from comfyui_ltx25.tests.support.clips import clip_streams  # noqa: E402
from comfyui_ltx25.tests.support.published import PUBLISHED_DIT  # noqa: E402
from comfyui_ltx25.tests.support.random_weights import fill_random  # noqa: E402

DEVICE, CLIP, FRAME_RATE, TEXT, SIGMA = torch.device("cuda"), Geometry(512, 320, 25), 24.0, 1024, 0.6
GUIDANCE = {"video": guidance.VIDEO, "audio": guidance.AUDIO}
Tokens = dict[str, torch.Tensor]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    need_card()
    with torch.device("meta"):
        dit = DiT(PUBLISHED_DIT)
    fill_random(dit, DEVICE, torch.bfloat16, keep=KEEP_STORED)
    runs = {"bf16": run(dit, torch.bfloat16, options.steps)}
    _convert(dit, torch.bfloat16, torch.float32)
    runs["float32"] = run(dit, torch.float32, options.steps)
    _convert(dit, torch.float32, torch.bfloat16)
    quantise(dit)
    runs["fp8"] = run(dit, torch.bfloat16, options.steps)
    for what, against in (("bf16", "float32"), ("fp8", "bf16"), ("fp8", "float32")):
        got, want = runs[what], runs[against]
        errors = {name: f"{_relative(got[name], want[name]):.3e}" for name in want}
        facts = {"tokens": CLIP.video_tokens, "steps": options.steps, "torch": torch.__version__, "revision": query(revision)}
        print(json.dumps({"bench": "error", "of": what, "against": against, **errors, **facts}), flush=True)


@torch.inference_mode()
def run(dit: DiT, dtype: torch.dtype, count: int) -> Tokens:
    """Velocities of one forward by leg and stream, and the latents after `count` guided Euler steps, on the CPU."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:  # rounded to bf16 for every run: the same inputs
        return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()

    config = dit.config
    texts = [Contexts(draw(1, TEXT, config.width).to(dtype), draw(1, TEXT, config.audio_width).to(dtype)) for _ in range(2)]
    x = {"video": draw(1, CLIP.video_tokens, config.in_channels).float(), "audio": draw(1, CLIP.audio_tokens, config.audio_in_channels).float()}
    geometry = dit.prepare(*clip_streams(CLIP.grid, CLIP.audio_tokens, FRAME_RATE), DEVICE, dtype)
    blocks = frozenset(b for b in guidance.VIDEO.stg_blocks if b < config.layers) or frozenset({config.layers - 1})
    plan = LegPlan((Leg.COND, Leg.UNCOND, Leg.STG, Leg.ISOLATED), blocks, blocks, True, True)

    def velocities(x: Tokens, tables) -> dict[Leg, Tokens]:
        out = dit(x["video"], x["audio"], geometry, tables, *texts, plan, True, unpaced)
        return {leg: {name: getattr(velocity, name).float() for name in x} for leg, velocity in out.items()}

    result = {f"{leg.value} {name}": v.cpu() for leg, legs in velocities(x, dit.tables(geometry, SIGMA, SIGMA)).items() for name, v in legs.items()}
    sigmas = sigmas_of("ltx2", count)
    tables = dit.schedule_tables(geometry, [(s, s) for s in sigmas[:-1]])
    for step, (s, t) in enumerate(itertools.pairwise(sigmas)):
        legs = velocities(x, tables[step])
        x0 = {name: guidance.combine(GUIDANCE[name], {leg: x[name] - s * v[name] for leg, v in legs.items()}) for name in x}
        x = {name: steps.euler(x[name], x0[name], s, t) for name in x}
    return result | {f"latents {name}": tokens.cpu() for name, tokens in x.items()}


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _convert(dit: DiT, old: torch.dtype, new: torch.dtype) -> None:
    """One parameter at a time: both whole models would not fit. Tables stay as they are stored."""
    for name, parameter in dit.named_parameters():
        if parameter.dtype == old and "scale_shift_table" not in name:
            parameter.data = parameter.data.to(new)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    program(main)
