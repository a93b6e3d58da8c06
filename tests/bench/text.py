"""Seconds of one prompt at the published size, random weights, bf16, all resident: tower, projections, connectors.

    python tests/bench/text.py [--tokens 200 1024] [--busy]

One JSON line per token count: medians of wall ms from token ids to contexts on the device, by part and together (the parts
are waited for one by one, `together` is not), and with --busy the share of it in which the device worked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.config.connector import ConnectorStream  # noqa: E402
from comfyui_ltx25.ltx25.config.text import FeatureConfig  # noqa: E402
from comfyui_ltx25.ltx25.connector import Connector, Connectors  # noqa: E402
from comfyui_ltx25.ltx25.instrument import Watch  # noqa: E402
from comfyui_ltx25.ltx25.instrument.header import revision  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import query  # noqa: E402
from comfyui_ltx25.ltx25.text import FeatureProjection, Tower  # noqa: E402
from comfyui_ltx25.tests.bench.busy import busy_share  # noqa: E402
from comfyui_ltx25.tests.support.published import PUBLISHED_TOWER  # noqa: E402
from comfyui_ltx25.tests.support.random_weights import fill_random  # noqa: E402

DEVICE, LENGTH = torch.device("cuda"), 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[200, 1024])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    features = FeatureConfig(PUBLISHED_TOWER.hidden, PUBLISHED_TOWER.states, 4096, 2048)
    with torch.device("meta"):
        modules = [Tower(PUBLISHED_TOWER), FeatureProjection(features)]
        modules += [Connector(ConnectorStream(8, 32, head_dim, 4096, True)) for head_dim in (128, 64)]
    tower, projection, *connectors = (fill_random(module, DEVICE, torch.bfloat16) for module in modules)
    both = Connectors(*connectors)
    with torch.inference_mode(), Watch().phase("bench", total=1, unit="prompt") as phase:
        for tokens in options.tokens:
            ids = torch.arange(tokens, device=DEVICE)
            packed = tower(ids, phase)
            video, audio = (part[None] for part in projection(packed))
            parts = {
                "tower": lambda ids=ids: tower(ids, phase),
                "project": lambda packed=packed: projection(packed),
                "connect": lambda video=video, audio=audio, n=tokens: both.forward(video, audio, [n], LENGTH, phase),
            }

            def together(ids: torch.Tensor = ids, n: int = tokens) -> object:
                video, audio = (part[None] for part in projection(tower(ids, phase)))
                return both.forward(video, audio, [n], LENGTH, phase)

            line = {f"{name}_ms": _milliseconds(run, options.repeat) for name, run in (parts | {"together": together}).items()}
            if options.busy:
                line["device_busy"] = round(busy_share(together), 4)
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "revision": query(revision)}
            print(json.dumps({"bench": "text", "tokens": tokens, **line, **facts}), flush=True)


def _milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Median wall of a call that is waited for."""
    times = []
    for _ in range(repeat + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(times[3:]), 2)


if __name__ == "__main__":
    main()
