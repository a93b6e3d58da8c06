"""What a sample phase is about to do, as facts in its record: the law is fitted to these and to the seconds beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.dit import DiTConfig
from ..dit.modality import Leg, LegPlan
from .flops import group_flops

TERA = 1e12
DENSE = ("bfloat16", "float16", "float32")  # precisions whose weights a LoRA is added to


def sample_work(
    config: DiTConfig, plans: Sequence[LegPlan | None], tokens: Mapping[str, int], text: int, batch: int, **how: Any
) -> dict[str, Any]:
    """`plans` of a denoise's model calls in order (None: no call); `tokens` by stream; `how`: precision, residency,
    batched, graphs, whatever else changes a forward's time but not its arithmetic: `adapted` (see `is_adapted`) and `masked`,
    an attention bias, are told where they are so.

    "work" has one entry per kind of group: legs, kind, how many, TFLOP in matrix products and in attention of one.
    """
    video, audio = tokens.get("video", 0), tokens.get("audio", 0)
    work = []
    for plan, count in Counter(plan for plan in plans if plan is not None).items():
        flops = group_flops(config, plan, video, audio, text) * batch
        work.append(
            {
                "legs": "+".join(leg.value for leg in plan.legs),
                "kind": group_kind(plan),
                "groups": count,
                "linear": flops.linear / TERA,
                "attention": flops.attention / TERA,
            }
        )
    model = f"{config.layers} blocks of {config.width}/{config.audio_width}"
    return {"model": model, "text": text, "batch": batch, "work": work, **how}


def is_adapted(loras: bool, streams: bool, precision: str) -> bool:
    """Whether LoRAs cost every forward something: put on blocks at each turn, or products beside weights kept as stored."""
    return loras and (streams or precision not in DENSE)


def group_kind(plan: LegPlan) -> str:
    """What besides its legs changes a group's cost: a stream that skips the step, or that has no use for the isolated leg."""
    skips = "" if plan.video and plan.audio else "video only" if plan.video else "audio only"
    isolated = f"mod of {next(iter(plan.isolated))}" if Leg.ISOLATED in plan.legs and len(plan.isolated) == 1 else ""
    return ", ".join(part for part in (skips, isolated) if part)
