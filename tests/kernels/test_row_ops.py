"""The ops that work on one row at a time: norms with modulation, residuals, head gates, queries and keys."""

import pytest
import torch
from comfyui_ltx25.kernels import gated_residual, head_gate, modulate, qk_norm_rope, rms_adaln
from comfyui_ltx25.kernels.rms_adaln import Norm
from comfyui_ltx25.tests.support.kernels import CUDA, PLACES, random
from comfyui_ltx25.tests.support.tolerance import assert_no_worse_than, poisoned_memory

pytest.importorskip("triton")

SHAPES = [(1, 1, 8), (2, 7, 72), (1, 3, 4096)] + ([(1, 1343, 4096), (4, 1344, 4096), (1, 26, 2048), (4, 1, 2048)] if CUDA else [])
LEVELS = [1, 3]


def levels_of(tokens: int, levels: int) -> torch.Tensor | None:
    return None if levels == 1 else torch.arange(tokens) % levels


def on(device, *tensors):
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


def norms_of(table: torch.Tensor, quantised: tuple[bool, ...] = (False, False)) -> list[Norm]:
    """Two affines out of (levels, 4, width), rows strided as the model's are."""
    return [Norm(table[:, 2 * i], table[:, 2 * i + 1], quantised[i]) for i in range(len(quantised))]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rms_adaln_stays_within_twice_the_twins_error(device, dtype, shape, levels):
    x = random(shape, dtype, 1, 3.0)
    table = random((levels, 4, shape[2]), dtype, 2)
    index = levels_of(shape[1], levels)
    with poisoned_memory():
        got = rms_adaln._launch(*on(device, x), norms_of(*on(device, table)), *on(device, index), 1e-6)
        alone = rms_adaln._launch(*on(device, x), norms_of(*on(device, table))[:1], *on(device, index), 1e-6)
    twin = rms_adaln.rms_adaln_reference(x, norms_of(table), index, 1e-6)
    truth = rms_adaln.rms_adaln_reference(x.double(), norms_of(table.double()), index, 1e-6)
    for mine, plain, true in zip(got, twin, truth, strict=True):
        assert_no_worse_than(mine, plain, true)
    assert torch.equal(alone[0], got[0])


@pytest.mark.parametrize("gate_levels", LEVELS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gated_residual_updates_in_place_within_twice_the_twins_error(device, dtype, shape, levels, gate_levels):
    """Also that a norm behind an update has the bits of that norm alone: legs that part there stay equal to legs that do not."""
    x, y = random(shape, dtype, 1), random(shape, dtype, 2)
    levels = max(levels, gate_levels)
    gate, table = random((gate_levels, shape[2]), dtype, 3), random((levels, 4, shape[2]), dtype, 4)
    index = levels_of(shape[1], levels)
    both = torch.cat([x, x]).to(device)  # the second half is a row that must not be touched
    mine = both[: shape[0]]
    with poisoned_memory():
        got = gated_residual._launch(mine, *on(device, y, gate), norms_of(*on(device, table)), *on(device, index), 1e-6)
    plain, truth_x = x.clone(), x.double()
    twin = gated_residual.gated_residual_reference(plain, y, gate, norms_of(table), index, 1e-6)
    gated_residual.gated_residual_reference(truth_x, y.double(), gate.double(), (), index, 1e-6)
    assert_no_worse_than(mine, plain, truth_x)
    # What the norm reads is the rounded stream: its own, wherever that differs from the twin's in the last bit.
    truth = rms_adaln.rms_adaln_reference(mine.cpu().double(), norms_of(table.double()), index, 1e-6)
    for norm, its_twin, true in zip(got, twin, truth, strict=True):
        assert_no_worse_than(norm, its_twin, true, 2.0 if torch.equal(mine.cpu(), plain) else 4.0)
    assert torch.equal(both[shape[0] :].cpu(), x)
    for count in (0, 1):
        again = x.to(device, copy=True)
        rest = gated_residual._launch(again, *on(device, y, gate), norms_of(*on(device, table))[:count], *on(device, index), 1e-6)
        assert torch.equal(again, mine) and all(map(torch.equal, rest, got))
    assert all(map(torch.equal, rms_adaln._launch(mine, norms_of(*on(device, table)), *on(device, index), 1e-6), got))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_norms_write_into_given_rows_only(device, dtype):
    x, y, gate = random((1, 5, 24), dtype, 1), random((1, 5, 24), dtype, 2), random((1, 24), dtype, 3)
    table = random((1, 4, 24), dtype, 4)
    wide = torch.full((3, 5, 24), 7.0, dtype=dtype, device=device)
    (want,) = gated_residual._launch(x.to(device, copy=True), *on(device, y, gate), norms_of(*on(device, table))[:1], None, 1e-6)
    (got,) = gated_residual._launch(x.to(device, copy=True), *on(device, y, gate), norms_of(*on(device, table))[:1], None, 1e-6, [wide[1:2]])
    assert got.data_ptr() == wide[1].data_ptr() and torch.equal(wide[1:2], want)
    assert bool((wide[::2] == 7).all())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gated_residual_refuses_a_row_it_could_not_write_through(device, dtype):
    x = random((1, 4, 16), dtype, 1).to(device)
    with pytest.raises(ValueError, match="contiguous"):
        gated_residual._launch(x[..., ::2], x[..., ::2], x[0, :1, ::2], (), None, 0.0)


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
        got = head_gate._launch(*on(device, o, logits))
    out = torch.full((rows + 1, tokens, heads * width), 7.0, dtype=dtype, device=device)
    head_gate._launch(*on(device, o, logits), out[:rows])
    twin, truth = head_gate.head_gate_reference(o, logits), head_gate.head_gate_reference(o.double(), logits.double())
    assert_no_worse_than(got, twin, truth)
    assert torch.equal(out[:rows], got)
    assert bool((out[rows:] == 7).all())


@pytest.mark.parametrize("table", ["own", "shared", "axes", "none"])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_qk_norm_rope_stays_within_twice_the_twins_error(device, dtype, shape, table):
    rows, tokens, heads, head = shape
    width = heads * head
    product = random((rows, tokens, 2 * width + heads), dtype, 1, 2.0)
    q, k, _ = product.split((width, width, heads), dim=-1)
    weights = 1 + random((2, width), torch.float32, 2, 0.3)
    weights = weights.to(dtype)
    axes = 3 if table == "axes" else 1
    turns = None if table == "none" else random(((tokens if table == "own" else 7), width // 2 // axes), torch.float32, 3, 3.0)
    cos, sin = (None, None) if turns is None else (turns.cos(), turns.sin())
    index = torch.stack([torch.arange(tokens) % (axis + 2) + axis for axis in range(axes)]) if table in ("shared", "axes") else None
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
    if index is not None:
        own = [qk_norm_rope.spread(part, index, width // 2, still) for part, still in ((cos, 1.0), (sin, 0.0))]
        whole = qk_norm_rope._launch(placed[0], placed[1], *on(device, weights[0], weights[1], *own), None, heads, 1e-6)
        assert all(map(torch.equal, whole, got))  # a row per token gives the same bits


def test_axes_take_turns_behind_the_pairs_that_stay_still():
    table = torch.arange(12.0).view(4, 3)  # two axes of two rows
    rows = torch.tensor([[0, 1], [2, 3]])
    assert qk_norm_rope.spread(table, rows, 8, 1.0).tolist() == [[1, 1, 0, 6, 1, 7, 2, 8], [1, 1, 3, 9, 4, 10, 5, 11]]


def test_qk_norm_rope_refuses_tables_of_another_width():
    x, weight, rows = torch.zeros(1, 2, 16), torch.ones(16), torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="tables of 3 angles for 3 axes do not fit 8 pairs"):
        qk_norm_rope._launch(x, None, weight, weight, torch.zeros(2, 3), torch.zeros(2, 3), rows, 2, 1e-6)
    with pytest.raises(ValueError, match="tables of 3 angles for 1 axes do not fit 8 pairs"):
        qk_norm_rope._launch(x, None, weight, weight, torch.zeros(2, 3), torch.zeros(2, 3), rows[:1], 2, 1e-6)


@pytest.mark.parametrize("module", [rms_adaln, gated_residual, modulate, head_gate, qk_norm_rope], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_first_use_check_passes(device, dtype, module):
    assert module._OP._first_use(device, dtype)
