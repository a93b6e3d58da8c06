"""What storage formats cost on a device: products of int8 weights beside bf16, decoding per format, putting a LoRA on.

pytest -s tests/bench/formats.py
"""

import json
import math
import time

import pytest
import torch
import torch.nn.functional as F
from comfyui_ltx25.kernels.int8_linear import int8_linear, rotate
from comfyui_ltx25.ltx25.checkpoint import read_header, write_file
from comfyui_ltx25.ltx25.checkpoint.fill import Slice
from comfyui_ltx25.ltx25.formats import Fp8, Ggml, Int8, Nvfp4
from comfyui_ltx25.ltx25.formats.ggml import BLOCK_TYPES
from comfyui_ltx25.ltx25.formats.nvfp4 import scale_shape
from comfyui_ltx25.ltx25.lora import FactorStore, Lora, Pair, apply
from comfyui_ltx25.ltx25.lora.change import Target
from comfyui_ltx25.tests.bench.by_pytest import refuse
from comfyui_ltx25.tests.support.files import tensor_bytes
from torch import nn

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GIB = 1 << 30


def seconds(run, repeats=20):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(repeats):
        run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1000 / repeats


def tell(case, **numbers):
    print(json.dumps({"case": case, "device": torch.cuda.get_device_name(), "torch": torch.__version__, **numbers}))


@pytest.mark.parametrize("rows", [1536, 6144])
@pytest.mark.parametrize("shape", [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)], ids=str)
def test_int8_product(rows, shape):
    inputs, outputs = shape
    x = torch.randn(rows, inputs, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (outputs, inputs), device=CUDA, dtype=torch.int8)
    scale, bias = torch.rand(outputs, 1, device=CUDA) / 127, torch.zeros(outputs, device=CUDA, dtype=torch.bfloat16)
    wide = torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16)
    tera = 2 * rows * inputs * outputs / 1e12
    int8, bf16 = seconds(lambda: int8_linear(x, weight, scale, bias, 256, x.dtype)), seconds(lambda: F.linear(x, wide, bias))
    turning = seconds(lambda: rotate(x, 256))
    decoding = seconds(lambda: Int8(256).decode({"weight": weight, "scale": scale}, x.dtype))
    tell("int8 product", rows=rows, shape=shape, int8_ms=1e3 * int8, bf16_ms=1e3 * bf16, rotate_ms=1e3 * turning, decode_ms=1e3 * decoding, int8_tops=tera / int8, bf16_tflops=tera / bf16)


def test_decoding():
    rows, columns = 4096, 16384
    weight = torch.randint(0, 256, (rows, columns), device=CUDA, dtype=torch.uint8)
    blocks = torch.randint(0, 100, scale_shape(rows, columns), device=CUDA, dtype=torch.uint8).view(torch.float8_e4m3fn)
    one = torch.tensor(0.01, device=CUDA)
    cases = {
        "nvfp4": (Nvfp4(), {"weight": weight[:, : columns // 2].contiguous(), "scale": blocks, "scale_2": one}),
        "fp8": (Fp8(), {"weight": (weight & 127).view(torch.float8_e4m3fn), "scale": one}),
    }
    for kind in BLOCK_TYPES.values():
        size = columns // kind.weights * kind.size
        cases[kind.name] = (Ggml(kind, (rows, columns)), {"weight": torch.randint(0, 100, (rows, size), device=CUDA, dtype=torch.uint8)})
    for name, (format, parts) in cases.items():
        took = seconds(lambda format=format, parts=parts: format.decode(parts, torch.bfloat16), 5)
        tell("decode", format=name, ms=1e3 * took, weights_per_s=rows * columns / took)


def test_putting_on_a_lora_of_rank_450(tmp_path):
    """32 layers of 16384 x 4096: an eighth of the published LoRA's arithmetic, and its bytes told apart."""
    count, out, inner, rank = 32, 16384, 4096, 450
    model = nn.ModuleDict({f"l{i}": nn.Linear(inner, out, bias=False, device=CUDA, dtype=torch.bfloat16) for i in range(count)})
    model.requires_grad_(False)
    factors = {f"l{i}.a": torch.randn(rank, inner).bfloat16() for i in range(count)} | {f"l{i}.b": torch.randn(out, rank).bfloat16() for i in range(count)}
    write_file(tmp_path / "lora.safetensors", factors, {})
    header = read_header(tmp_path / "lora.safetensors")
    pairs = {f"l{i}.weight": Pair(header.tensors[f"l{i}.a"], header.tensors[f"l{i}.b"], 1.0) for i in range(count)}
    lora = Lora(header, 0.5, pairs, ())
    found = [Target(name, Slice(name, 0, None), ((lora, pair),)) for name, pair in pairs.items()]
    for run in ("first", "again"):
        torch.cuda.synchronize()
        started = time.perf_counter()
        apply(model, found, lambda changes: FactorStore(CUDA).fetch(changes, lambda n: None))
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        arithmetic = 2 * count * out * inner * rank
        tell("lora", run=run, seconds=took, lora_gib=tensor_bytes(header) / GIB, tflop=arithmetic / 1e12, published_estimate_s=took * 8.9e9 / tensor_bytes(header))
    assert math.isfinite(model["l0"].weight.float().sum().item())


if __name__ == "__main__":
    refuse(__file__)
