"""File to device: GB/s of reading whole files that the page cache holds, and what the host needs for it.

    python tests/bench/load.py FILE... [--device cuda] [--cold] [--repeat 3]

Every tensor of a file goes to the device in its own dtype, as the engine loads bf16 weights. One JSON line per file and
repeat: bytes, seconds until the last byte is on the device, when the first bytes were told, and the host's peak above what
it held before. --cold: without reading the file into the page cache first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.checkpoint import read_header, read_tensors  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.cli.render import chosen_device  # noqa: E402
from comfyui_ltx25.ltx25.instrument.memory import host_now  # noqa: E402
from comfyui_ltx25.tests.bench.program import program  # noqa: E402
from comfyui_ltx25.tests.support.files import tensor_bytes  # noqa: E402


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    device = chosen_device(options.device)
    for path in options.files:
        read_header(path)  # refuses what is no such file before anything is measured
    for path in options.files:
        for _ in range(options.repeat):
            if not options.cold:
                warm(path)
            print(json.dumps({"bench": "load", "file": path.name, "cold": options.cold, **measure(path, device), **machine(device)}), flush=True)


def warm(path: Path) -> None:
    """The page cache holds the file afterwards, where it fits: loading gives its pages back."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 << 20)
        while file.readinto(buffer):
            pass


def measure(path: Path, device: torch.device) -> dict[str, object]:
    header = read_header(path)
    before = host_now()
    peak, stop = [before], threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            peak.append(host_now())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started, first = time.perf_counter(), []

    def read(n: int) -> None:
        if n and not first:
            first.append(time.perf_counter() - started)

    tensors = {name: torch.empty(info.shape, dtype=info.dtype, device=device) for name, info in header.tensors.items()}
    allocated = time.perf_counter() - started
    read_tensors(header, tensors, read)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    stop.set()
    sampler.join()
    return {
        "gb": round(tensor_bytes(header) / 1e9, 3),
        "seconds": round(seconds, 3),
        "allocating": round(allocated, 3),
        "gb_per_s": round(tensor_bytes(header) / 1e9 / seconds, 2),
        "first_bytes_s": round(first[0], 3) if first else None,
        "host_peak_gib": round((max(peak) - before - (tensor_bytes(header) if device.type == "cpu" else 0)) / (1 << 30), 3),
    }


def machine(device: torch.device) -> dict[str, object]:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__, "revision": run.stdout.strip() or None}


if __name__ == "__main__":
    program(main)
