"""A finished denoise is never lost: whatever fails after it, its latent can be decoded again."""

import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25 import kept as module
from comfyui_ltx25.ltx25.cli import finish, main
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.hdr import SDR
from comfyui_ltx25.ltx25.kept import Kept
from comfyui_ltx25.tests.ltx25.cli.test_render import SMALL, frames_of, rendered, same_picture, sound_of
from comfyui_ltx25.tests.ltx25.cli.test_render import files as named_files
from comfyui_ltx25.tests.support.engine import files
from comfyui_ltx25.tests.support.tiny import tiny_files

MODELS = ["--stg-blocks", "2", *named_files()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copytree(tiny_files().transformer.parents[1], tmp_path / "cache" / "tiny")
    monkeypatch.setenv("LTX25_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LTX25_RUNS", str(tmp_path / "runs"))
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the render makes that nothing stops."""
    here = tmp_path_factory.mktemp("whole")
    path = rendered(here, *SMALL, "--seed", "3", "--runs", str(here / "runs"), *MODELS, name="whole.mp4")
    assert not list(here.glob("*.safetensors")), "what was written needs no latent"
    return path


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


def not_finite(*_, **__):
    raise InputError("decode.video made values that are not finite (NaN or infinity); load the VAE file again or use precision bf16.")


def disk_full(*_, **__):
    raise InputError("x.mp4 could not be written (No space left on device); make room or choose another folder.")


def interrupted(*_, **__):
    raise KeyboardInterrupt


def broken(*_, **__):
    raise ZeroDivisionError("a mistake of ours")


@pytest.mark.parametrize(
    ("place", "failure", "code", "words"),
    [
        ("comfyui_ltx25.ltx25.engine.decode_video", out_of_memory, 1, "CUDA out of memory"),
        ("comfyui_ltx25.ltx25.engine.decode_video", not_finite, 2, "not finite"),
        ("comfyui_ltx25.ltx25.engine.decode_audio", not_finite, 2, "not finite"),
        ("comfyui_ltx25.ltx25.cli.finish.write_video", disk_full, 2, "No space left"),
        ("comfyui_ltx25.ltx25.cli.finish.write_video", interrupted, 130, "cancelled"),
    ],
)
def test_m1_a_latent_outlives_a_failure_behind_it_and_decodes_to_the_same_clip(here, whole, monkeypatch, capsys, place, failure, code, words):
    arguments = ["render", "--prompt", "A cat on a table.", "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet", "--seed", "3", *SMALL, *MODELS]
    with monkeypatch.context() as patch:
        patch.setattr(place, failure)
        assert main(arguments) == code
    latent = here / "x.latent.safetensors"
    shown = capsys.readouterr().err
    assert words in shown and f"the finished latent is kept, `ltx25 decode {latent} -o {here / 'x.mp4'}` goes on from there" in shown
    assert code == 130 or shown.count("\n") == 1
    assert not (here / "x.mp4").exists()
    assert main(["decode", str(latent), "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet"]) == 0
    assert same_picture(frames_of(here / "x.mp4"), frames_of(whole)) and np.abs(sound_of(here / "x.mp4") - sound_of(whole)).max() < 1e-3
    assert "seed 3" in capsys.readouterr().out and latent.exists()


def test_sound_of_ones_own_is_kept_as_well_and_goes_out_as_it_was_given(here, monkeypatch, capsys):
    """What the audio VAE makes of it is another wave: the kept clip had that one."""
    with av.open(str(here / "own.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=48000, layout="stereo")
        tone = (np.sin(np.arange(2 * 24000) / 20) * 9000).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(tone, format="s16", layout="stereo")
        frame.sample_rate = 48000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    arguments = [*SMALL, "--sigmas", "1,0", "--audio", str(here / "own.wav"), *MODELS]
    wanted = sound_of(rendered(here, *arguments, name="whole.mp4"))
    with monkeypatch.context() as patch:
        patch.setattr("comfyui_ltx25.ltx25.cli.finish.write_video", disk_full)
        assert main(["render", "--prompt", "A cat on a table.", "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet", *arguments]) == 2
    assert main(["decode", str(here / "x.latent.safetensors"), "-o", str(here / "x.mp4"), "--device", "cpu", "--quiet"]) == 0
    assert np.array_equal(sound_of(here / "x.mp4"), wanted) and np.abs(wanted).max() > 0.2


@pytest.fixture
def kept():
    draw = torch.Generator().manual_seed(0)
    return Kept(torch.randn(2, 128, 2, 2, 2, generator=draw), torch.randn(2, 8, 9, 16, generator=draw), None, 23.976, 7, files(), SDR, "runs/this.jsonl")


def test_a_mistake_of_ours_shows_its_traceback_and_where_the_latent_is(kept, tmp_path, capsys):
    with pytest.raises(ZeroDivisionError), finish.keeping(kept, tmp_path / "x.mp4"):
        broken()
    assert f"ltx25 decode {tmp_path / 'x.latent.safetensors'}" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="another shell")
def test_the_command_that_goes_on_can_be_pasted_whatever_the_names(kept, tmp_path):
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    with pytest.raises(InputError) as caught, finish.keeping(kept, folder / "x.mp4"):
        disk_full()
    command = str(caught.value).split("`")[1]
    assert shlex.split(command) == ["ltx25", "decode", str(folder / "x.latent.safetensors"), "-o", str(folder / "x.mp4")]


def test_it_is_on_disk_before_anything_can_kill_the_process(kept, tmp_path):
    with finish.keeping(kept, tmp_path / "x.mp4"):
        assert torch.equal(Kept.read(tmp_path / "x.latent.safetensors").video, kept.video)
    assert not list(tmp_path.iterdir())


def test_what_was_kept_comes_back_bit_for_bit(kept, tmp_path):
    again = Kept.read(kept.save(tmp_path / "clip.mp4"))
    assert torch.equal(again.video, kept.video) and torch.equal(again.audio, kept.audio) and again.own is None
    assert (again.frame_rate, again.seed, again.files, again.transfer, again.record) == (kept.frame_rate, kept.seed, kept.files, SDR, "runs/this.jsonl")


def test_a_full_disk_sends_it_to_the_folder_for_temporary_files(kept, tmp_path, monkeypatch, capsys):
    write, spare = module.write_file, tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(spare))

    def full(path, *rest, only=(tmp_path,)):
        if path.parent in only:
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(InputError, match=str(spare / "x.latent.safetensors")), finish.keeping(kept, tmp_path / "x.mp4"):
        disk_full()
    monkeypatch.setattr(module, "write_file", lambda path, *rest: full(path, *rest, only=(tmp_path, spare)))
    with pytest.raises(InputError, match=r"choose another folder\.$"), finish.keeping(kept, tmp_path / "x.mp4"):
        disk_full()
    assert "cannot be kept" in capsys.readouterr().err


def test_a_latent_that_still_waits_for_its_decode_is_not_written_over(kept, tmp_path):
    """A second try may be of another prompt and fail as well, or succeed and take the file away."""
    other = replace(kept, seed=8)
    for failing in (True, False):
        with contextlib.suppress(InputError), finish.keeping(kept if failing else other, tmp_path / "x.mp4"):
            if failing:
                disk_full()
            assert {Kept.read(path).seed for path in tmp_path.iterdir()} == {7, 8}
    assert [(path.name, Kept.read(path).seed) for path in tmp_path.iterdir()] == [("x.latent.safetensors", 7)]


def test_whatever_hinders_keeping_a_latent_is_a_note_and_its_clip_is_written(kept, tmp_path, capsys):
    with finish.keeping(replace(kept, record="half of a pair: \udcff"), tmp_path / "x.mp4"):
        pass
    shown = capsys.readouterr().err
    assert "the latent cannot be kept (UnicodeEncodeError" in shown and shown.count("\n") == 1


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="file names are text there")
def test_names_of_folders_and_files_that_are_no_text_render_and_are_told_as_they_are(here, capsysbinary):
    runs, output = here / os.fsdecode(b"runs\xff"), here / os.fsdecode(b"x\xfe.mp4")
    arguments = ["render", "--prompt", "a cat", "-o", str(output), "--runs", str(runs), "--device", "cpu", "--video-cfg", "1", "--audio-cfg", "1"]
    assert main([*arguments, *SMALL, *MODELS]) == 0
    shown, (record,) = capsysbinary.readouterr(), runs.glob("*.jsonl")
    assert os.fsencode(output) in shown.out and b"record: " + os.fsencode(record) in shown.out and b"cannot be kept" not in shown.err
    with av.open(str(output)) as container:
        assert container.metadata["record"] == str(record).replace("\udcff", "\ufffd")
    assert main(["runs", "show", "nothing", "--runs", str(runs)]) == 2 and os.fsencode(runs) in capsysbinary.readouterr().err


def test_a_batch_decodes_to_a_file_for_each_clip(kept, here):
    path = replace(kept, files=files()).save(here / "pair.mp4")
    assert main(["decode", str(path), "-o", str(here / "pair.mp4"), "--device", "cpu", "--quiet", "--tiny"]) == 0
    assert sorted(clip.name for clip in here.glob("*.mp4")) == ["pair-1.mp4", "pair-2.mp4"]


def test_a_batch_that_begins_at_the_last_seed_tells_seeds_that_a_render_takes(kept, here, capsys):
    path = replace(kept, files=files(), seed=2**64 - 1).save(here / "pair.mp4")
    assert main(["decode", str(path), "-o", str(here / "pair.mp4"), "--device", "cpu", "--quiet", "--tiny"]) == 0
    with av.open(str(here / "pair-2.mp4")) as container:
        assert container.metadata["seed"] == "0" and "frames/s, seed 0\n" in capsys.readouterr().out


def test_files_that_are_no_kept_latents_are_refused_in_one_sentence(kept, here, capsys):
    damaged = kept.save(here / "damaged.mp4")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for path, words in (
        (here / "nothing.latent.safetensors", "does not exist"),
        (tiny_files().video_vae, "is no latent that 'ltx25 render' kept"),
        (damaged, "cut off"),
    ):
        assert main(["decode", str(path), "-o", str(here / "x.mp4"), "--device", "cpu"]) == 2
        shown = capsys.readouterr().err
        assert words in shown and shown.count("\n") == 1
    with pytest.raises(FileError, match="is damaged"):
        moved = here / "other.latent.safetensors"
        module.write_file(moved, {"video": kept.video, "audio": kept.audio}, {"format": module.FORMAT, "frame_rate": "0", "seed": "1", "files": "{}"})
        Kept.read(moved)


def test_model_files_that_moved_are_named_and_can_be_given_anew(kept, here, capsys):
    gone = replace(kept, files=replace(kept.files, video_vae=Path("/nowhere/vae.safetensors")))
    path = gone.save(here / "x.mp4")
    assert main(["decode", str(path), "-o", str(here / "x.mp4"), "--device", "cpu"]) == 2
    assert "/nowhere/vae.safetensors does not exist" in capsys.readouterr().err


def test_a_latent_rendered_for_linear_light_decodes_to_it(kept, here):
    path = replace(kept, video=kept.video[:1], audio=kept.audio[:1], transfer="LogC3").save(here / "linear")
    assert main(["decode", str(path), "-o", str(here / "linear"), "--device", "cpu", "--quiet"]) == 0
    assert len(list((here / "linear").glob("*.exr"))) == 9
