"""Linear light as EXR files: every float as it was given, under the folder's name only when all of it is there."""

import json
import wave

import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25 import exr
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.exr import check_folder, write_exr
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.shapes import OUTPUT_RATE
from comfyui_ltx25.tests.support.exr import read_exr

LIGHT = torch.rand(3, 37, 91, 3, generator=torch.Generator().manual_seed(0)) ** 8 * 222.8
SOUND = torch.rand(2, 6001, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_frames_come_back_to_the_bit_in_order_highlights_included(tmp_path):
    path = write_exr(tmp_path / "out", LIGHT, SOUND, 24, {}, Watch())
    assert sorted(file.name for file in path.iterdir()) == ["clip.json", "frame_00000.exr", "frame_00001.exr", "frame_00002.exr", "sound.wav"]
    assert LIGHT.max() > 200
    for index, frame in enumerate(LIGHT):
        assert torch.equal(read_exr(path / f"frame_{index:05}.exr"), frame)


def test_sound_and_facts_lie_beside_the_frames(tmp_path):
    path = write_exr(tmp_path / "out", LIGHT, SOUND, 23.976, {"seed": "7"}, Watch())
    with wave.open(str(path / "sound.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, OUTPUT_RATE, 6001)
        got = torch.from_numpy(np.frombuffer(file.readframes(6001), np.int16).reshape(-1, 2).T / 32767)
    assert (got - SOUND).abs().max() < 1e-4
    facts = json.loads((path / "clip.json").read_text())
    assert (facts["frame_rate"], facts["frames"], facts["seed"]) == (23.976, 3, "7") and "linear" in facts["light"]


def test_a_clip_without_sound_has_no_wav(tmp_path):
    assert not (write_exr(tmp_path / "out", LIGHT, None, 24, {}, Watch()) / "sound.wav").exists()


def test_a_run_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    encoded, count = exr._encoded, 0

    def full_disk(frame):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return encoded(frame)

    monkeypatch.setattr(exr, "_encoded", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        write_exr(tmp_path / "out", LIGHT, SOUND, 24, {}, Watch())
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_filled_and_what_others_made_is_kept(tmp_path):
    (tmp_path / "empty").mkdir()
    assert (write_exr(tmp_path / "empty", LIGHT[:1], None, 24, {}, Watch()) / "frame_00000.exr").is_file()
    (tmp_path / "file").touch()
    for taken in ("empty", "file"):
        with pytest.raises(InputError, match="exists already"):
            check_folder(tmp_path / taken)


@pytest.mark.parametrize("name, words", [("x.mp4", "use .*x"), ("x.exr", "use .*x"), ("y" * 300, "cannot be written")])
def test_names_that_cannot_be_a_folder_are_told_before_the_work(tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        check_folder(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("frames, words", [(LIGHT[0], "wanted"), (LIGHT * float("inf"), "NaN or infinite")])
def test_frames_that_are_none_are_refused(tmp_path, frames, words):
    with pytest.raises(InputError, match=words):
        write_exr(tmp_path / "out", frames, None, 24, {}, Watch())
    assert not list(tmp_path.iterdir())


def test_sound_that_is_none_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match=r"wanted \(2, samples\)"):
        write_exr(tmp_path / "out", LIGHT, SOUND[:1], 24, {}, Watch())
    assert not list(tmp_path.iterdir())
