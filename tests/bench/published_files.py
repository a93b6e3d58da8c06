"""Write a set of files of the published sizes, names, dtypes and metadata, with random weights: what loading, memory and
whole renders are measured on where the real files are not at hand.

    python tests/bench/published_files.py DIR [--device cuda] [--only transformer text_encoder video_vae audio_vae ...]

The text encoder carries the tiny tokenizer: its ids are legal in the published vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: E402, F401  registers the checkout as comfyui_ltx25
from comfyui_ltx25.ltx25.checkpoint.header import DTYPES  # noqa: E402
from comfyui_ltx25.ltx25.cli.arguments import Parser  # noqa: E402
from comfyui_ltx25.ltx25.cli.render import chosen_device  # noqa: E402
from comfyui_ltx25.ltx25.tiny.tokenizer import tokenizer_json  # noqa: E402
from comfyui_ltx25.ltx25.tiny.weights import make  # noqa: E402
from comfyui_ltx25.tests.bench.program import program  # noqa: E402
from comfyui_ltx25.tests.support.files import fixture  # noqa: E402

WRITERS = 8  # one alone fills fresh pages of a file at 1 to 2 GB/s
FILES = {
    "transformer": ("diffusion_models", "ltx-2.5-22b-dev-transformer-bf16"),
    "distilled": ("diffusion_models", "ltx-2.5-22b-distilled-transformer-bf16"),
    "text_encoder": ("text_encoders", "gemma4-12b-with-proj-ltx-2.5-bf16"),
    "video_vae": ("vae", "ltx-2.5-video-vae-conv-bf16"),
    "video_vae_diffusion": ("vae", "ltx-2.5-video-vae-bf16"),
    "audio_vae": ("vae", "ltx-2.5-audio-vae-bf16"),
    "distilled_lora": ("loras", "ltx-2.5-22b-distilled-lora-450-bf16"),
    "spatial_upscaler": ("latent_upscale_models", "ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0"),
    "temporal_upscaler": ("latent_upscale_models", "ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0"),
}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=FILES, default=["transformer", "text_encoder", "video_vae", "audio_vae"])
    options = parser.parse_args()
    chosen_device(options.device)
    for part in options.only:
        folder, name = FILES[part]
        path = options.folder / folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        size = write(path, name, options.device)
        seconds = time.perf_counter() - started
        print(json.dumps({"file": str(path), "gb": round(size / 1e9, 2), "seconds": round(seconds, 1)}), flush=True)


def write(path: Path, name: str, device: str) -> int:
    """Bytes written. One tensor is in memory at a time."""
    published = fixture(name)
    tensors = {key: (DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["dtype"]) for key, entry in published["tensors"].items()}
    raw = {key: b"{}" for key in tensors if key.startswith("hf_asset__")}
    if "tokenizer_json" in tensors:
        raw["tokenizer_json"] = tokenizer_json()
    table: dict[str, object] = {"__metadata__": published["__metadata__"]}
    end = 0
    for key, (dtype, shape, code) in tensors.items():
        if key in raw:
            shape = (len(raw[key]),)
        size = math.prod(shape) * dtype.itemsize
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(WRITERS) as writers:
        file.write(struct.pack("<Q", len(text)) + text)
        pending: deque[Future[None]] = deque()
        for key, (dtype, shape, _) in tensors.items():
            data = raw[key] if key in raw else _on_host(_value(key, shape, device).to(dtype))
            pending.append(writers.submit(_put, file.fileno(), begin + table[key]["data_offsets"][0], data))
            if len(pending) > 2 * WRITERS:
                pending.popleft().result()
        for write in pending:
            write.result()
    return 8 + len(text) + end


def _on_host(value: torch.Tensor) -> memoryview:
    if value.device.type == "cuda":
        value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def _put(file: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _value(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    try:
        return make(name, shape, 0, device)
    except ValueError:  # parts the tiny set does not have: nothing reads them
        return torch.zeros(shape, device=device)


if __name__ == "__main__":
    program(main)
