"""The product in four bits: what surrounds it, with the product itself written out. No card that has it ran this."""

import pytest
import torch
from comfyui_ltx25.kernels import nvfp4_linear as fp4
from comfyui_ltx25.ltx25.formats import Nvfp4, Stacked
from comfyui_ltx25.ltx25.formats.weights import Nvfp4Weight
from comfyui_ltx25.tests.support import nvfp4 as hardware
from comfyui_ltx25.tests.support.golden import Golden
from safetensors.torch import load_file

GOLDEN = Golden("formats")
CASES = GOLDEN.names("nvfp4/")
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts_of(weight, x_scale=None):
    """A weight (N, K) as a file has it, by our own quantiser."""
    scale = fp4.tensor_scale(weight)
    packed, blocks = fp4.quantise_blocks(weight, scale)
    given = {} if x_scale is None else {"input_scale": torch.tensor(x_scale)}
    return {"weight": packed, "scale": fp4.tiled_scales(blocks), "scale_2": scale, **given}


@pytest.fixture
def card(monkeypatch):
    """A pretended card: the CPU, with the product as tensor cores make it; calls are counted."""
    calls = []

    def multiply(x, weight, x_scales, scales, dtype):
        calls.append(tuple(x.shape))
        return hardware.multiply(x, weight, x_scales, scales, dtype)

    monkeypatch.setattr(fp4, "supported", lambda device: True)
    monkeypatch.setattr(fp4, "_multiply", multiply)
    monkeypatch.setattr(fp4._OP, "runs", lambda like: True)
    return calls


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (24, 4), (128, 4), (129, 5), (300, 12)])
def test_block_scales_stand_where_tensor_cores_look(rows, blocks):
    scales = (torch.rand(rows, blocks, generator=torch.Generator().manual_seed(1)) + 0.1).to(torch.float8_e4m3fn)
    tiles = fp4.tiled_scales(scales)
    assert tiles.shape == (fp4.scale_shape(rows, 16 * blocks)[0] * fp4.scale_shape(rows, 16 * blocks)[1],)
    seen = set()
    for row in range(rows):
        for block in range(blocks):
            at = hardware.offset(row, block, blocks)
            assert tiles[at].float() == scales[row, block].float()
            seen.add(at)
    rest = torch.ones(tiles.numel(), dtype=torch.bool)
    rest[list(seen)] = False
    assert len(seen) == rows * blocks and bool((tiles.float()[rest] == 0).all())
    assert torch.equal(fp4.plain_scales(tiles, rows, 16 * blocks).float(), scales.float())


def test_every_number_goes_to_the_nearest_code_and_from_the_middle_to_the_even_one():
    values = torch.tensor(fp4.VALUES)
    middles = (values[:-1] + values[1:]) / 2
    up = torch.nextafter(middles, torch.tensor(9.0))
    down = torch.nextafter(middles, torch.tensor(0.0))
    even = torch.tensor([0, 2, 2, 4, 4, 6, 6])
    x = torch.cat([values, middles, up, down, -values[1:], torch.tensor([6.0, -6.0])])
    want = torch.cat([torch.arange(8), even, torch.arange(1, 8), torch.arange(7), torch.arange(9, 16), torch.tensor([7, 15])])
    x, want = x.view(-1, 1), want.view(-1, 1)
    block = torch.cat([x, torch.full((len(x), 1), 6.0), torch.zeros(len(x), 14)], 1)  # the 6 makes the block's scale 1
    packed, scales = fp4.quantise_blocks(block, torch.ones(()))
    assert bool((scales.float() == 1).all())
    assert torch.equal(packed[:, :1].long() // 16, want) and bool((packed[:, 0] % 16 == 7).all())


def test_zeros_and_what_is_too_large_stay_finite():
    x = torch.zeros(2, 32)
    x[1, 3] = 1e9
    packed, scales = fp4.quantise_blocks(x, torch.tensor(1.0))
    got = fp4.dense(packed, fp4.tiled_scales(scales), torch.tensor(1.0), torch.float32)
    assert torch.equal(got[0], torch.zeros(32)) and got[1, 3] == 6 * 448 and got[1].count_nonzero() == 1


@pytest.mark.parametrize("case", CASES)
def test_activations_and_products_are_the_official_ones(case, card):
    file, stem = GOLDEN.index[case]["inputs"]["layer"].removesuffix(".*").split(": ")
    layer = {key.removeprefix(stem + "."): tensor for key, tensor in load_file(GOLDEN.folder / file).items() if key.startswith(stem + ".")}
    x, x_scale = GOLDEN.input(case, "x"), layer["input_scale"].float().reshape(())
    packed, scales = fp4.quantise_blocks(x, x_scale)
    GOLDEN.check(case, "x_dequantised", fp4.dense(packed, fp4.tiled_scales(scales), x_scale, torch.float32))
    parts = {"weight": layer["weight"], "scale": layer["weight_scale"], "scale_2": layer["weight_scale_2"], "input_scale": layer["input_scale"]}
    weight = Nvfp4().weight([parts], exact=False)
    bias = None if layer.get("bias") is None else layer["bias"].float()
    args = weight.values, weight.scales, weight.scale, weight.x_scale, bias, torch.float32
    GOLDEN.check(case, "y_w4a4", fp4.nvfp4_linear_reference(x, *args))
    GOLDEN.check(case, "y_w4a4", fp4.nvfp4_linear(x, *args))
    assert card
    GOLDEN.check(case, "y_dequantised", Nvfp4().weight([parts], exact=True).product(x, bias, x))


def test_quantised_blocks_equal_comfy_kitchen():
    eager = pytest.importorskip("comfy_kitchen").backends.eager.quantization
    x = randn(40, 96)
    scale = fp4.tensor_scale(x)
    packed, scales = fp4.quantise_blocks(x, scale)
    want, blocks = eager.quantize_nvfp4(x, scale, pad_16x=False, hi_first=True)
    assert torch.equal(packed, want)
    assert torch.equal(fp4.tiled_scales(scales).view(torch.uint8), blocks.flatten().view(torch.uint8))


@pytest.mark.parametrize("x_scale", [None, 0.002])
@pytest.mark.parametrize(("rows", "outer", "inner"), [(1, 16, 32), (7, 272, 96), (300, 128, 160)])
def test_the_product_is_that_of_the_plain_one_whatever_the_shape(card, rows, outer, inner, x_scale):
    """Nibbles are the other way round in hardware, on both sides: sums do not see that, and no weight is rearranged."""
    weight, x, bias = randn(outer, inner, seed=1), randn(2, rows, inner, seed=2), randn(outer, seed=3)
    parts = parts_of(weight, x_scale)
    kept = Nvfp4().weight([parts], exact=False)
    for b in (bias, None):
        want = fp4.nvfp4_linear_reference(x, kept.values, kept.scales, kept.scale, kept.x_scale, b, torch.float32)
        got = kept.product(x, b, x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    exact = torch.nn.functional.linear(x, weight)
    assert 0.02 < (got - exact).norm() / exact.norm() < 0.25 and card


def test_the_product_in_runs_of_rows_is_the_whole(card, monkeypatch):
    x, kept = randn(1, 300, 64), Nvfp4().weight([parts_of(randn(32, 64, seed=1))], exact=False)
    whole = kept.product(x, None, x)
    monkeypatch.setattr(fp4, "_SUMS_AT_ONCE", 1)
    assert torch.equal(kept.product(x, None, x), whole) and card == [(300, 32), (128, 32), (128, 32), (44, 32)]


# When it runs


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "there"),
    [("cuda", (10, 0), None, True), ("cuda", (12, 0), None, True), ("cuda", (9, 0), None, False), ("cuda", (12, 0), "6.4", False), ("cpu", (12, 0), None, False)],
)
def test_nvidia_cards_since_blackwell_have_it(monkeypatch, kind, capability, hip, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert fp4.supported(torch.device(kind)) == there
    monkeypatch.delattr(torch, "float4_e2m1fn_x2", raising=False)
    assert not fp4.supported(torch.device(kind)), "a torch that does not know the type"


def test_widths_it_does_not_take_and_exact_products_are_decoded(card):
    x = randn(1, 5, 48)
    for outer, inner, exact in ((32, 48, False), (24, 32, False), (32, 32, True)):
        kept = Nvfp4().weight([parts_of(randn(outer, inner))], exact=exact)
        assert torch.equal(kept.product(x[..., :inner], None, x), torch.nn.functional.linear(x[..., :inner], kept.dense(torch.float32)))
    assert not card


def test_the_first_use_check_passes_where_the_product_is_right(card):
    for dtype in (torch.float32, torch.bfloat16):
        assert fp4._OP._first_use(CPU, dtype)


def swapped_scales(x, weight, x_scales, scales, dtype):
    return hardware.multiply(x, weight, x_scales, fp4.tiled_scales(fp4.plain_scales(scales, len(weight), 2 * weight.shape[1]).roll(1, 0)), dtype)


def plain_layout(x, weight, x_scales, scales, dtype):
    rows, columns = fp4.scale_shape(len(x), 2 * x.shape[1])
    padded = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
    padded[: len(x), : x.shape[1] // 8] = fp4.plain_scales(x_scales, len(x), 2 * x.shape[1])
    return hardware.multiply(x, weight, padded.flatten(), scales, dtype)


def one_side_swapped(x, weight, x_scales, scales, dtype):
    return hardware.multiply((x << 4) | (x >> 4), weight, x_scales, scales, dtype)


def absent(*_):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("broken", [swapped_scales, plain_layout, one_side_swapped, absent])
def test_a_product_that_is_not_right_is_off_by_name_and_weights_are_decoded(monkeypatch, caplog, broken):
    """The choice as it is made on a card, on a tensor that says it is on one."""
    monkeypatch.setattr(fp4, "supported", lambda device: True)
    monkeypatch.setattr(fp4, "_multiply", broken)
    op = fp4.Op("nvfp4_linear", lambda device, dtype: fp4._check(CPU, dtype))
    monkeypatch.setattr(fp4, "_OP", op)

    class OnCard:
        device, dtype = CARD, torch.bfloat16

    kept = Nvfp4().weight([parts_of(randn(32, 64))], exact=False)
    assert not fp4.runs(kept.values, OnCard) and not fp4.runs(kept.values, OnCard)
    assert caplog.text.count("kernel nvfp4_linear is off for torch.bfloat16") == 1
    x = randn(1, 3, 64, seed=4)
    assert torch.equal(kept.product(x, None, x), torch.nn.functional.linear(x, kept.dense(torch.float32)))


# Merged weights


def test_rows_of_whole_tiles_are_one_product_and_others_one_each(card):
    x = randn(1, 5, 64, seed=9)
    whole = [parts_of(randn(rows, 64, seed=rows), scale) for rows, scale in ((128, 0.001), (256, 0.002))]
    merged = Nvfp4().weight(whole, exact=False)
    assert isinstance(merged, Nvfp4Weight) and merged.rows == 384 and merged.x_scale == torch.tensor(0.002)
    assert torch.equal(merged.dense(torch.float32), torch.cat([Nvfp4().decode(parts, torch.float32) for parts in whole]))
    merged.product(x, None, x)
    assert len(card) == 1
    assert Nvfp4().weight([whole[0], parts_of(randn(128, 64))], exact=False).x_scale is None, "one of them was not calibrated"
    odd = [parts_of(randn(rows, 64, seed=rows)) for rows in (128, 48)]
    apart = Nvfp4().weight(odd, exact=False)
    assert isinstance(apart, Stacked)
    assert torch.equal(apart.dense(torch.float32), torch.cat([Nvfp4().decode(parts, torch.float32) for parts in odd]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "outer", "inner"), [(1, 4096, 4096), (1343, 12288, 4096), (26, 2048, 8192)])
def test_the_product_on_a_card_stays_near_the_plain_one(rows, outer, inner):
    if not fp4.supported(torch.device("cuda")):
        pytest.skip("this card has no nvfp4 products")
    assert fp4._OP._first_use(torch.device("cuda"), torch.bfloat16)
    parts = {role: part.cuda() for role, part in parts_of(randn(outer, inner)).items()}
    kept, x = Nvfp4().weight([parts], exact=False), randn(1, rows, inner, seed=1).bfloat16().cuda()
    got = kept.product(x, None, x)
    want = fp4.nvfp4_linear_reference(x, kept.values, kept.scales, kept.scale, None, None, torch.float64)
    assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()
