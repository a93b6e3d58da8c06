"""The ops that work on one row at a time: norms with modulation, residuals, head gates, queries and keys."""

import pytest
import torch
from comfyui_ltx25.kernels import gated_residual, head_gate, modulate, qk_norm_rope, rms_adaln
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")

SHAPES = [(1, 1, 8), (2, 7, 72), (1, 3, 4096)] + ([(1, 1343, 4096), (4, 1344, 4096), (1, 26, 2048), (4, 1, 2048)] if CUDA else [])
LEVELS = [1, 3]


def levels_of(tokens: int, levels: int) -> torch.Tensor | None:
    return None if levels == 1 else torch.arange(tokens) % levels


def on(device, *tensors):
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rms_adaln_stays_within_twice_the_twins_error(device, dtype, shape, levels):
    x = random(shape, dtype, 1, 3.0)
    table = random((levels, 4, shape[2]), dtype, 2)  # rows strided, as the model's are
    pairs = [(table[:, 0], table[:, 1]), (table[:, 2], table[:, 3])]
    index = levels_of(shape[1], levels)
    with poisoned_memory():
        got = rms_adaln._launch(*on(device, x), on(device, *pairs[0]), on(device, *pairs[1]), *on(device, index), 1e-6)
        alone = rms_adaln._launch(*on(device, x), on(device, *pairs[0]), None, *on(device, index), 1e-6)
    twin = rms_adaln.rms_adaln_pair_reference(x, *pairs, index, 1e-6)
    truth = rms_adaln.rms_adaln_pair_reference(x.double(), *[tuple(t.double() for t in pair) for pair in pairs], index, 1e-6)
    for mine, plain, true in zip(got, twin, truth, strict=True):
        assert_no_worse_than(mine, plain, true)
    assert torch.equal(alone[0], got[0])


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gated_residual_updates_in_place_within_twice_the_twins_error(device, dtype, shape, levels):
    x, y = random(shape, dtype, 1), random(shape, dtype, 2)
    gate, scale, shift = random((3, levels, shape[2]), dtype, 3)
    index = levels_of(shape[1], levels)
    both = torch.cat([x, x]).to(device)  # the second half is a row that must not be touched
    mine = both[: shape[0]]
    with poisoned_memory():
        got = gated_residual._launch(mine, *on(device, y, gate), on(device, scale, shift), *on(device, index), 1e-6)
    plain = x.clone()
    twin = gated_residual.gated_residual_rms_adaln_reference(plain, y, gate, scale, shift, index, 1e-6)
    truth = gated_residual.gated_residual_reference(x.double(), y.double(), gate.double(), index)
    assert_no_worse_than(mine, plain, truth)
    # What the norm reads is the rounded stream: its own, wherever that differs from the twin's in the last bit.
    assert_no_worse_than(got, twin, rms_adaln.rms_adaln_reference(mine.cpu().double(), scale.double(), shift.double(), index, 1e-6), 2.0 if torch.equal(mine.cpu(), plain) else 4.0)
    assert torch.equal(both[shape[0] :].cpu(), x)
    again = x.to(device)
    gated_residual._launch(again, *on(device, y, gate), None, *on(device, index), 0.0)
    assert torch.equal(again, mine)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gated_residual_refuses_a_row_it_could_not_write_through(device, dtype):
    x = random((1, 4, 16), dtype, 1).to(device)
    with pytest.raises(ValueError, match="contiguous"):
        gated_residual._launch(x[..., ::2], x[..., ::2], x[0, :1, ::2], None, None, 0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_modulate_stays_within_twice_the_twins_error(device, dtype, shape):
    x = random(shape, dtype, 1)
    scale, shift = random((2, 1, shape[2]), dtype, 2)
    with poisoned_memory():
        got = modulate._launch(*on(device, x, scale, shift))
    assert_no_worse_than(got, modulate.modulate_reference(x, scale, shift), modulate.modulate_reference(x.double(), scale.double(), shift.double()))


HEADS = [(1, 1, 2, 4), (2, 5, 3, 24), (1, 3, 32, 128)] + ([(1, 1343, 32, 128), (3, 1344, 32, 128), (1, 26, 32, 64), (2, 7, 32, 64)] if CUDA else [])


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_head_gate_takes_what_attention_and_a_merged_product_leave(device, dtype, shape):
    rows, tokens, heads, width = shape
    o = random((rows, heads, tokens, width), dtype, 1).transpose(1, 2)
    logits = random((rows, tokens, 3 * heads), dtype, 2, 4.0)[..., 2 * heads :]
    with poisoned_memory():
        got = head_gate._launch(*on(device, o, logits), None)
    out = torch.full((rows + 1, tokens, heads * width), 7.0, dtype=dtype, device=device)
    head_gate._launch(*on(device, o, logits), out[:rows])
    twin, truth = head_gate.head_gate_reference(o, logits), head_gate.head_gate_reference(o.double(), logits.double())
    assert_no_worse_than(got, twin, truth)
    assert torch.equal(out[:rows], got)
    assert bool((out[rows:] == 7).all())


@pytest.mark.parametrize("table", ["own", "shared", "none"])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_qk_norm_rope_stays_within_twice_the_twins_error(device, dtype, shape, table):
    rows, tokens, heads, head = shape
    width = heads * head
    product = random((rows, tokens, 2 * width + heads), dtype, 1, 2.0)
    q, k, _ = product.split((width, width, heads), dim=-1)
    weights = 1 + random((2, width), torch.float32, 2, 0.3)
    weights = weights.to(dtype)
    turns = None if table == "none" else random(((tokens if table == "own" else 2), width // 2), torch.float32, 3, 3.0)
    cos, sin = (None, None) if turns is None else (turns.cos(), turns.sin())
    index = torch.arange(tokens) % 2 if table == "shared" else None
    placed = product.to(device).split((width, width, heads), dim=-1)
    with poisoned_memory():
        got = qk_norm_rope._launch(placed[0], placed[1], *on(device, weights[0], weights[1], cos, sin, index), heads, 1e-6)
        alone = qk_norm_rope._launch(placed[1], None, *on(device, weights[1], weights[1], cos, sin, index), heads, 1e-6)[0]
    for mine, x, weight in zip(got, (q, k), weights, strict=True):
        twin = qk_norm_rope.qk_norm_rope_reference(x, weight, cos, sin, index, heads, 1e-6)
        double = (None, None) if cos is None else (cos.double(), sin.double())
        assert mine.is_contiguous()
        assert_no_worse_than(mine, twin, qk_norm_rope.qk_norm_rope_reference(x.double(), weight.double(), *double, index, heads, 1e-6))
    assert torch.equal(alone, got[1])


@pytest.mark.parametrize("module", [rms_adaln, gated_residual, modulate, head_gate, qk_norm_rope], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_first_use_check_passes(device, dtype, module):
    assert module._OP._first_use(device, dtype)
