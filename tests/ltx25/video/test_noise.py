import torch
from comfyui_ltx25.ltx25.shapes import VideoShape
from comfyui_ltx25.ltx25.video.denoise import NoiseCells
from comfyui_ltx25.ltx25.video.noise import DrawnNoise
from comfyui_ltx25.tests.support.given_noise import GivenNoise

SHAPE, PATCH = VideoShape(frames=37, height=8, width=12), 4
WHOLE = slice(0, 8), slice(0, 12)


def drawn(seed, stops=(37,), rows=WHOLE[0], columns=WHOLE[1], dtype=torch.float32):
    """Cells (37, h, w, 48) as a decode reads them, in portions up to each of `stops`."""
    cells = NoiseCells(DrawnNoise(SHAPE, seed, torch.device("cpu")), rows, columns, PATCH, torch.empty(0, dtype=dtype))
    return torch.cat([cells.advance(stop, 0, 0) for stop in stops])


def test_a_seed_gives_the_same_noise_in_any_portions():
    whole = drawn(5)
    assert whole.shape == (37, 2, 3, 48)
    assert torch.equal(drawn(5, (3, 20, 21, 37)), whole)
    assert not torch.equal(drawn(6), whole)


def test_a_tile_gets_what_the_whole_gets_there():
    assert torch.equal(drawn(5, rows=slice(4, 8), columns=slice(4, 12)), drawn(5)[:, 1:, 1:])


def test_margins_are_left_to_the_reader():
    cells = NoiseCells(DrawnNoise(SHAPE, 5, torch.device("cpu")), *WHOLE, PATCH, torch.empty(0))
    made = cells.advance(9, 2, 1)
    assert made.shape[0] == 12 and torch.equal(made[2:11], drawn(5)[:9])


def test_cells_are_pixels_of_the_canvas_row_by_row():
    """The layout against that of noise that is given as (3, F, H, W)."""
    cells = drawn(5)
    canvas = cells.view(37, 2, 3, PATCH, PATCH, 3).permute(5, 0, 1, 3, 2, 4).reshape(3, 37, 8, 12)
    given = NoiseCells(GivenNoise(canvas), slice(4, 8), slice(0, 8), PATCH, torch.empty(0))
    assert torch.equal(given.advance(37, 0, 0), cells[:, 1:, :2])
    assert torch.equal(cells[0, 0, 0, :12], canvas[:, 0, 0, :4].T.flatten())


def test_rounding_keeps_the_values():
    assert torch.equal(drawn(1, dtype=torch.bfloat16), drawn(1).bfloat16())


def test_a_device_without_64_bit_sums_is_sent_what_the_cpu_makes():
    noise = DrawnNoise(SHAPE, 5, torch.device("mps"))
    out = torch.empty(37, 2, 3, 48)
    noise.fill(out, 0, 0, 0, PATCH)
    assert torch.equal(out, drawn(5))
    noise.fill(out.to("meta"), 0, 0, 0, PATCH)  # nothing of it is computed where `out` is
