"""Storage formats against independent implementations: the `gguf` package and comfy-kitchen's plain PyTorch functions."""

import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25.formats import Fp8, Ggml, Int8, Nvfp4, Stacked
from comfyui_ltx25.ltx25.formats.ggml import BLOCK_TYPES


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_gguf_blocks_equal_the_gguf_packages_own(number):
    """Random bytes: every scale, nibble and high bit is used. Factors are kept finite by clearing an exponent bit."""
    gguf = pytest.importorskip("gguf")
    kind = BLOCK_TYPES[number]
    own = gguf.GGMLQuantizationType(number)
    assert own.name == kind.name and gguf.GGML_QUANT_SIZES[own] == (kind.weights, kind.size)
    rows = np.random.default_rng(number).integers(0, 256, (6, 4 * kind.size), dtype=np.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves[kind.name]:
        rows.reshape(-1, kind.size)[:, at + 1] &= 0xBF
    want = torch.from_numpy(gguf.dequantize(rows, own))
    format = Ggml(kind, (6, 4 * kind.weights))
    parts = {"weight": torch.from_numpy(rows)}
    got = format.decode(parts, torch.float32)
    assert torch.isfinite(want).all() and want.abs().max() > 0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
    assert torch.equal(format.weight([parts], exact=True).dense(torch.float32), got)


@pytest.fixture(scope="module")
def eager():
    pytest.importorskip("comfy_kitchen")
    from comfy_kitchen.backends.eager import quantization

    return quantization


@pytest.mark.parametrize("shape", [(24, 512), (7, 1024)])
def test_int8_convrot_equals_comfy_kitchen(eager, shape):
    weight, x, bias = randn(*shape), randn(5, shape[1], seed=1), randn(shape[0], seed=2)
    values, scale = eager.quantize_int8_convrot_weight(weight, 256)
    parts = {"weight": values, "scale": scale}
    format = Int8(256)
    dense = format.decode(parts, torch.float32)
    torch.testing.assert_close(dense, eager.dequantize_int8_convrot_weight(values, scale, 256), rtol=1e-5, atol=2e-6)
    assert (dense - weight).norm() / weight.norm() < 0.01
    got = format.weight([parts], exact=False).product(x, bias, x)
    want = eager.int8_linear(x, values, scale, bias, torch.float32, convrot=True, convrot_groupsize=256)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_int8_without_rotation_equals_comfy_kitchen(eager):
    weight, x = randn(24, 40), randn(5, 40, seed=1)
    values, scale = eager.quantize_int8_tensorwise(weight)
    parts = {"weight": values, "scale": scale}
    assert torch.equal(Int8(None).decode(parts, torch.float32), eager.dequantize_int8_simple(values, scale))
    got = Int8(None).weight([parts], exact=False).product(x, None, x)
    torch.testing.assert_close(got, eager.int8_linear(x, values, scale, None, torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 64), (260, 80)])
def test_nvfp4_equals_comfy_kitchen(eager, shape):
    weight = randn(*shape)
    scale = weight.abs().max() / (448 * 6)
    packed, blocks = eager.quantize_nvfp4(weight, scale, pad_16x=False, hi_first=True)
    got = Nvfp4().decode({"weight": packed, "scale": blocks, "scale_2": scale}, torch.float32)
    want = eager.dequantize_nvfp4(packed, scale, blocks, torch.float32, hi_first=True)[: shape[0], : shape[1]]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert (got - weight).norm() / weight.norm() < 0.12


def test_fp8_equals_comfy_kitchen(eager):
    weight = randn(12, 40)
    scale = weight.abs().max() / 448
    values = eager.quantize_per_tensor_fp8(weight, scale, torch.float8_e4m3fn)
    want = eager.dequantize_per_tensor_fp8(values, scale, torch.float32)
    assert torch.equal(Fp8().decode({"weight": values, "scale": scale}, torch.float32), want)


def test_stacked_weights_are_their_rows(eager):
    """Merged projections: quantised rows with their own scales, tensor-wide ones repeated, beside rows that are not quantised."""
    first, second = (eager.quantize_int8_convrot_weight(randn(rows, 256, seed=rows), 256) for rows in (8, 4))
    format = Int8(256)
    parts = [{"weight": values, "scale": scale} for values, scale in (first, second)]
    whole = torch.cat([format.decode(part, torch.float32) for part in parts])
    assert torch.equal(format.weight(parts, exact=True).dense(torch.float32), whole)
    plain = [{"weight": randn(n, 16, seed=n).to(torch.float8_e4m3fn), **scale} for n, scale in ((3, {}), (5, {"scale": torch.tensor(0.5)}))]
    merged = Fp8().weight(plain, exact=True)
    assert torch.equal(merged.dense(torch.float32), torch.cat([Fp8().decode(part, torch.float32) for part in plain]))
    from comfyui_ltx25.ltx25.formats import Dense

    stack = Stacked([format.weight(parts, exact=False), Dense(randn(2, 256))])
    x, bias = randn(2, 3, 256, seed=9), randn(14, seed=10)
    got = stack.product(x, bias, x)
    assert got.shape == (2, 3, 14) and stack.dense(torch.float32).shape == (14, 256) and stack.rows == 14
    want = torch.nn.functional.linear(x, stack.dense(torch.float32), bias)
    assert (got - want).norm() / want.norm() < 0.02
    torch.testing.assert_close(got[..., 12:], want[..., 12:])
