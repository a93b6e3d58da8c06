"""Storage formats against the official values: every case of tests/golden/formats."""

import json

import pytest
import torch
from comfyui_ltx25.kernels.int8_linear import hadamard, int8_linear, multiply, quantise_rows_reference, rotate
from comfyui_ltx25.ltx25.formats import Fp8, Int8, Nvfp4
from comfyui_ltx25.ltx25.formats.nvfp4 import plain_scales, scale_shape
from comfyui_ltx25.tests.support.golden import Golden
from safetensors.torch import load_file

GOLDEN = Golden("formats")
CONVROT = GOLDEN.names("int8_convrot/")
CONVROT.remove("int8_convrot/hadamard")
NVFP4, FP8 = GOLDEN.names("nvfp4/"), GOLDEN.names("fp8/")
CPU = torch.device("cpu")


def test_no_case_is_forgotten():
    assert {*CONVROT, *NVFP4, *FP8, "int8_convrot/hadamard", "int8/tensorwise"} == GOLDEN.index.keys()


def stored(case, name):
    """{role: tensor} of the layer that input `name`, "file: stem.*", refers to."""
    file, stem = GOLDEN.index[case]["inputs"][name].removesuffix(".*").split(": ")
    tensors = load_file(GOLDEN.folder / file)
    return {key.removeprefix(stem + "."): tensor for key, tensor in tensors.items() if key.startswith(stem + ".")}


def int8_of(case):
    layer = stored(case, "triplet")
    mark = json.loads(bytes(layer["comfy_quant"].tolist()))
    assert mark["format"] == "int8_tensorwise"
    group = mark["convrot_groupsize"] if mark.get("convrot") else None
    parts = {"weight": layer["weight"], "scale": layer["weight_scale"]}
    return Int8(group), parts, layer.get("bias")


def product(case, weight, x, bias):
    return weight.product(x, None if bias is None else bias.float(), x.new_empty(0))


@pytest.mark.parametrize("case", CONVROT)
def test_int8_convrot(case):
    format, parts, bias = int8_of(case)
    assert format.group == 256
    x = GOLDEN.input(case, "x")
    GOLDEN.check(case, "dequantised", format.decode(parts, torch.float32))
    GOLDEN.check(case, "y_dequantised", product(case, format.weight([parts], exact=True), x, bias))
    GOLDEN.check(case, "x_rotated", rotate(x, 256))
    values, scale = quantise_rows_reference(rotate(x, 256))
    GOLDEN.check(case, "x_scale", scale)
    # Where x / scale lies on .5 a value may differ by one; with these very values the product must be the official one.
    assert (values.int() - GOLDEN.output(case, "x_int8").int()).abs().max() <= 1
    if torch.equal(values, GOLDEN.output(case, "x_int8")):
        GOLDEN.check(case, "y_int8", product(case, format.weight([parts], exact=False), x, bias))
    sums = multiply(GOLDEN.output(case, "x_int8"), parts["weight"])
    y = sums.double() * GOLDEN.output(case, "x_scale").double() * parts["weight_scale" if "weight_scale" in parts else "scale"].double().t()
    GOLDEN.check(case, "y_int8", (y if bias is None else y + bias.double()).float())


def test_int8_tensorwise():
    format, parts, _ = int8_of("int8/tensorwise")
    assert format.group is None
    GOLDEN.check("int8/tensorwise", "dequantised", format.decode(parts, torch.float32))
    GOLDEN.check("int8/tensorwise", "dequantised", format.weight([parts], exact=True).dense(torch.float32))


def test_hadamard_is_the_regular_one():
    case = "int8_convrot/hadamard"
    GOLDEN.check(case, "h4", hadamard(4, torch.float32, CPU))
    GOLDEN.check(case, "h16", hadamard(16, torch.float32, CPU))
    whole = hadamard(256, torch.float64, CPU)
    assert torch.equal(whole, whole.t()) and torch.equal(whole @ whole, torch.eye(256, dtype=torch.float64))
    for row, name in ((0, "h256_first_row_signs"), (137, "h256_row_137_signs")):
        assert torch.equal(whole[row].sign().to(torch.int8), GOLDEN.output(case, name))
    with pytest.raises(ValueError, match="power of 4"):
        hadamard(128, torch.float32, CPU)


@pytest.mark.parametrize("case", NVFP4)
def test_nvfp4(case):
    layer = stored(case, "layer")
    parts = {"weight": layer["weight"], "scale": layer["weight_scale"], "scale_2": layer["weight_scale_2"]}
    rows, columns = layer["weight"].shape[0], 2 * layer["weight"].shape[1]
    assert list(layer["weight"].shape) == GOLDEN.output(case, "packed_shape")
    assert list(scale_shape(rows, columns)) == GOLDEN.output(case, "scale_shape")
    flat = layer["weight_scale"].contiguous().view(torch.uint8).flatten()
    plain = plain_scales(layer["weight_scale"], rows, columns).view(torch.uint8)
    for row, block, offset in GOLDEN.output(case, "scale_offsets"):
        assert plain[row, block] == flat[offset]
    dense = Nvfp4().decode(parts, torch.float32)
    GOLDEN.check(case, "dequantised", dense)
    bias = layer.get("bias")
    GOLDEN.check(case, "y_dequantised", torch.nn.functional.linear(GOLDEN.input(case, "x"), dense, None if bias is None else bias.float()))
    y = torch.nn.functional.linear(GOLDEN.output(case, "x_dequantised"), dense, None if bias is None else bias.float())
    GOLDEN.check(case, "y_w4a4", y)  # what native products have to give


@pytest.mark.parametrize("case", FP8)
def test_fp8(case):
    layers = load_file(GOLDEN.folder / "fp8.safetensors")
    names = [name.removesuffix(".weight") for name in layers if name.endswith(".weight")]
    number = {12: "0"}[GOLDEN.output(case, "plain_dequantised").shape[0]]
    assert f"plain{number}" in names and f"scaled{number}" in names
    plain = {"weight": layers[f"plain{number}.weight"]}
    scaled = {"weight": layers[f"scaled{number}.weight"], "scale": layers[f"scaled{number}.weight_scale"]}
    rowwise = {"weight": GOLDEN.output(case, "rowwise_bytes").view(torch.float8_e4m3fn), "scale": GOLDEN.output(case, "rowwise_scale")}
    for name, parts in (("plain", plain), ("scaled", scaled), ("rowwise", rowwise)):
        GOLDEN.check(case, f"{name}_dequantised", Fp8().decode(parts, torch.float32))
        GOLDEN.check(case, f"{name}_dequantised", Fp8().weight([parts], exact=True).dense(torch.float32))
    x = GOLDEN.input(case, "x")
    got = Fp8().weight([scaled], exact=True).product(x, None, x.new_empty(0))
    GOLDEN.check(case, "y_dequantised", got)
    # The calibrated product: the same weight, activations quantised with the input scale.
    input_scale = layers[f"scaled{number}.input_scale"].float()
    for name, source in (("x_fp8_bytes", x), ("x_overflow_fp8_bytes", GOLDEN.input(case, "x_overflow"))):
        quantised = (source * (1 / input_scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(quantised.view(torch.uint8), GOLDEN.output(case, name))
    seen = GOLDEN.output(case, "x_fp8_bytes").view(torch.float8_e4m3fn).float() * input_scale
    GOLDEN.check(case, "y_scaled", Fp8().weight([scaled], exact=True).product(seen, None, x.new_empty(0)))


def test_int8_product_in_chunks_equals_the_whole(monkeypatch):
    import comfyui_ltx25.kernels.int8_linear as module

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 700, 64, generator=generator)
    weight, scale = torch.randint(-127, 128, (24, 64), generator=generator, dtype=torch.int8), torch.rand(24, 1, generator=generator)
    whole = int8_linear(x, weight, scale, None, 16, torch.float32)
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 1)
    assert torch.equal(int8_linear(x, weight, scale, None, 16, torch.float32), whole)
    assert whole.shape == (2, 700, 24)
