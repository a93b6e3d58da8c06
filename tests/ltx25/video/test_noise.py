import threading

import torch
from comfyui_ltx25.ltx25.shapes import VideoShape
from comfyui_ltx25.ltx25.video.noise import DrawnNoise, _mixed

SHAPE = VideoShape(frames=37, height=8, width=12)


def drawn(seed, portions=((0, 37),), dtype=torch.float32):
    with DrawnNoise(SHAPE, seed, dtype, pinned=False) as noise:
        return torch.cat([piece for first, stop in portions for piece in noise.pieces(first, stop)], dim=1)


def test_a_seed_gives_the_same_noise_in_any_portions():
    whole = drawn(5)
    assert whole.shape == (3, 37, 8, 12)
    assert torch.equal(drawn(5, [(0, 3), (3, 20), (20, 21), (21, 37)]), whole)
    assert not torch.equal(drawn(6), whole)


def test_it_can_start_again_as_every_tile_does():
    with DrawnNoise(SHAPE, 5, torch.float32, pinned=False) as noise:
        once, again = (torch.cat(list(noise.pieces(0, 37)), dim=1) for _ in range(2))
    assert torch.equal(once, again)


def test_it_is_standard_normal_and_no_frame_repeats_another():
    with DrawnNoise(VideoShape(64, 32, 32), 0, torch.float32, pinned=False) as noise:
        values = torch.cat(list(noise.pieces(0, 64)), dim=1)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    frames = values.transpose(0, 1).flatten(1)
    assert (torch.corrcoef(frames) - torch.eye(64)).abs().max() < 0.1


def test_seeds_of_different_places_differ():
    assert len({_mixed(seed, frame) for seed in (0, 1, 2**63, 2**64 - 1) for frame in range(500)}) == 2000


def test_no_thread_outlives_it():
    before = threading.active_count()
    drawn(0)
    assert threading.active_count() == before


def test_pieces_are_in_one_piece_of_memory():
    """A view of page-locked memory with gaps would be copied on the host before it goes to the device."""
    with DrawnNoise(SHAPE, 5, torch.float32, pinned=False) as noise:
        assert all(piece.is_contiguous() for piece in noise.pieces(3, 20))


def test_rounding_keeps_the_values():
    assert torch.equal(drawn(1, dtype=torch.bfloat16), drawn(1).bfloat16())
