"""Seconds of one prompt at the published size, random weights, bf16, all resident: tower, projections, connectors.

    python tests/bench/text.py [--tokens 200 1024] [--busy]

One JSON line per token count: medians of wall ms from token ids to contexts on the device, at the length a prompt runs at,
by part and together (the parts are waited for one by one, `together` is not); the same with graphs, where the length has
one, and the prompts that run eagerly, are captured and are replayed first; with --busy the share of `together` in which the
device worked. first_s: the process's very first prompt, which compiles and tables are made for.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.config.connector import ConnectorStream  # noqa: E402
from comfyui_ltx25.ltx25.config.text import FeatureConfig  # noqa: E402
from comfyui_ltx25.ltx25.connector import Connector, Connectors  # noqa: E402
from comfyui_ltx25.ltx25.instrument import Phase, Watch  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.ltx25.replay import Replay  # noqa: E402
from comfyui_ltx25.ltx25.text import SHORT, FeatureProjection, Tower, run_length  # noqa: E402
from comfyui_ltx25.tests.bench.busy import busy_share  # noqa: E402
from comfyui_ltx25.tests.bench.program import need_card, program  # noqa: E402
from comfyui_ltx25.tests.support.published import PUBLISHED_TOWER  # noqa: E402
from comfyui_ltx25.tests.support.random_weights import fill_random  # noqa: E402

DEVICE, LENGTH = torch.device("cuda"), 1024


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[200, 1024])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    need_card()
    features = FeatureConfig(PUBLISHED_TOWER.hidden, PUBLISHED_TOWER.states, 4096, 2048)
    with torch.device("meta"):
        modules = [Tower(PUBLISHED_TOWER), FeatureProjection(features)]
        modules += [Connector(ConnectorStream(8, 32, head_dim, 4096, True)) for head_dim in (128, 64)]
    tower, projection, *connectors = (fill_random(module, DEVICE, torch.bfloat16) for module in modules)
    with torch.inference_mode(), Watch().phase("bench", total=1, unit="prompt") as phase:
        first = None
        for tokens in options.tokens:
            ids = torch.arange(run_length(tokens, DEVICE), device=DEVICE)
            line: dict[str, object] = {}
            for graphs in (False, True):
                if graphs and tokens > SHORT:
                    continue
                encode, parts = _text_side(tower, projection, connectors, ids, tokens, graphs, phase)
                calls = [_once(encode) for _ in range(3)]
                first = calls[0] / 1e3 if first is None else first
                found = {f"{name}_ms": _milliseconds(run, options.repeat) for name, run in ({} if graphs else parts).items()}
                found["together_ms"] = _milliseconds(encode, options.repeat)
                if graphs:
                    found |= dict(zip(("eager_ms", "captured_ms", "replayed_ms"), calls, strict=True))
                if options.busy:
                    found["device_busy"] = round(busy_share(encode), 4)
                line |= {f"graph_{name}": value for name, value in found.items()} if graphs else found
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "revision": query(revision)}
            print(json.dumps({"bench": "text", "tokens": tokens, **line, "first_s": round(first, 2), **facts}), flush=True)


def _text_side(
    tower: Tower, projection: FeatureProjection, connectors: list[Connector], ids: torch.Tensor, tokens: int, graphs: bool, phase: Phase
) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """ids to contexts, and its parts one by one."""
    replays = [Replay(name, 1) if graphs else None for name in ("the text encoder", "the connectors")]
    both = Connectors(*connectors, replays[1])

    def rows() -> torch.Tensor:
        packed = replays[0](tower, (ids,), phase.tick, tower.config.layers) if graphs else tower(ids, phase.tick)
        return packed[:tokens]

    def encode() -> object:
        video, audio = (part[None] for part in projection(rows()))
        return both.forward(video, audio, [tokens], LENGTH, phase)

    packed = torch.randn(tokens, projection.config.hidden * projection.config.states, dtype=torch.bfloat16, device=DEVICE)
    video, audio = (torch.randn(1, tokens, connector.width, dtype=torch.bfloat16, device=DEVICE) for connector in connectors)
    parts = {"tower": rows, "project": lambda: projection(packed), "connect": lambda: both.forward(video, audio, [tokens], LENGTH, phase)}
    return encode, parts


def _once(run: Callable[[], object]) -> float:
    """Wall ms of one call that is waited for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - begin), 2)


def _milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Median of calls that are waited for."""
    return round(statistics.median([_once(run) for _ in range(repeat + 3)][3:]), 2)


if __name__ == "__main__":
    program(main)
