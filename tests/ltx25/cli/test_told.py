"""`ltx25 render`: pictures, sound and LoRAs on the command line."""

from pathlib import Path

import av
import numpy as np
import pytest
from comfyui_ltx25.ltx25.cli.told import Told, parse_lora
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.tests.ltx25.cli.test_render import (
    SMALL,
    files,
    frames_of,
    here,
    refused,
    rendered,
    same_picture,
    sound_of,
)
from comfyui_ltx25.tests.support.loras import tiny_lora
from comfyui_ltx25.tests.support.tiny import tiny_files
from PIL import Image, ImageCms

__all__ = ["here"]
UNGUIDED = [f"--{stream}-{scale}" for stream in ("video", "audio") for scale in ("cfg=1", "stg=0", "modality=1")]
PLAIN = ["--sigmas", "1,0.6,0", *UNGUIDED]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Frames of the clip that is told nothing."""
    folder = tmp_path_factory.mktemp("plain")
    return frames_of(rendered(folder, *SMALL, *PLAIN, *files(), "--stg-blocks", "2", "--runs", str(folder / "runs")))


@pytest.fixture
def picture(here):
    path = here / "red@home.png"
    Image.new("RGBA", (37, 91), (250, 10, 10, 255)).save(path)
    return path


@pytest.mark.parametrize("rotated", [False, True])
def test_grey_of_16_bits_keeps_its_steps(here, rotated):
    """Depth maps are such pictures: held at 255 of 65535 one is white."""
    path, values = here / "depth.png", np.arange(6, dtype=np.uint16).reshape(2, 3) * 13107
    exif = Image.Exif()
    exif[0x0112] = 6 if rotated else 1  # of the camera's orientation: turned by 90 degrees
    Image.fromarray(values).save(path, exif=exif)
    (pinned,) = Told.read([str(path)], None, None, None).pictures
    wanted = np.rot90(values, -1) if rotated else values
    assert np.allclose(pinned.picture, (wanted / 65535)[None, ..., None].repeat(3, -1), atol=1e-6)


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SWAPPED = SRGB.replace(b"rXYZ", b"....", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"....", b"gXYZ", 1)  # its red is sRGB's green


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("profile, wanted", [(None, (250, 10, 30)), (SRGB, (250, 10, 30)), (SWAPPED, (10, 250, 30))], ids=["none", "sRGB", "swapped"])
def test_the_colours_of_a_picture_are_those_that_its_profile_says(here, mode, profile, wanted):
    path = here / "phone.png"
    Image.new(mode, (4, 3), (250, 10, 30, 255)[: len(mode)]).save(path, **({"icc_profile": profile} if profile else {}))
    (pinned,) = Told.read([str(path)], None, None, None).pictures
    assert pinned.picture.shape == (1, 3, 4, 3) and np.abs(pinned.picture[0, 0, 0].numpy() * 255 - wanted).max() < 1.5


@pytest.mark.parametrize("mode, profile", [("RGB", b"none"), ("L", SWAPPED)], ids=["damaged", "of other channels"])
def test_a_profile_that_cannot_be_applied_is_left_out_with_a_warning(here, caplog, mode, profile):
    path = here / "odd.png"
    Image.new("RGB", (4, 3), (90, 90, 90)).convert(mode).save(path, icc_profile=profile)
    (pinned,) = Told.read([str(path)], None, None, None).pictures
    assert np.allclose(pinned.picture * 255, 90) and "odd.png has a colour profile that cannot be applied" in caplog.text


def test_a_picture_of_unknown_range_is_refused(here):
    Image.new("F", (8, 8), 0.5).save(here / "depth.tiff")
    with pytest.raises(InputError, match="floating-point values.*save it as a PNG"):
        Told.read([str(here / "depth.tiff")], None, None, None)


def test_a_picture_too_large_to_be_read_is_refused(here, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000_000)
    Image.new("L", (3000, 3000)).save(here / "poster.png")
    with pytest.raises(InputError, match="poster.png has more than 8 megapixels.*make it smaller"):
        Told.read([str(here / "poster.png")], None, None, None)


@pytest.fixture
def voice(here):
    """Half a second of 220 Hz, mono, at a rate that is neither the model's nor the output's."""
    path, rate = here / "voice.wav", 22050
    wave = 0.3 * np.sin(2 * np.pi * 220 * np.arange(rate // 2) / rate)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((wave[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_pictures_stand_at_their_frames_and_the_clip_keeps_its_length(here, plain, picture):
    first = frames_of(rendered(here, *SMALL, *PLAIN, "--image", f"{picture}@0", "--crf", "0"))
    both = frames_of(rendered(here, *SMALL, *PLAIN, "--image", f"{picture}@0", "--image", f"{picture}@-1:0.5", "--crf", "0", name="both.mp4"))
    assert plain.shape == first.shape == both.shape
    assert not np.array_equal(first, plain) and not np.array_equal(both, first)


def test_an_at_sign_in_the_name_of_a_file_that_is_there_names_no_frame(here, picture):
    """The same picture at the first frame, with and without saying so."""
    assert Told.read([str(picture)], None, None, None).pictures[0].frame == 0
    Path(f"{picture}@8").write_bytes(picture.read_bytes())  # also where the name ends like a frame
    (said,) = Told.read([f"{picture}@-1:0.5"], None, None, None).pictures
    (named,) = Told.read([f"{picture}@8"], None, None, None).pictures
    assert (said.frame, said.strength, named.frame, named.strength) == (-1, 0.5, 0, 1.0) and said.picture.equal(named.picture)


def test_a_soundtrack_is_in_the_file_as_it_was_and_steers_the_video(here, plain, voice):
    path = rendered(here, *SMALL, *PLAIN, "--audio", str(voice))
    assert not same_picture(frames_of(path), plain)
    sound = sound_of(path)[:, 2000:16000]  # 9 frames are 18000 samples; AAC needs a while to begin
    spectrum = np.abs(np.fft.rfft(sound[0] * np.hanning(sound.shape[1])))
    assert abs(spectrum.argmax() * 48000 / sound.shape[1] - 220) < 5 and 0.2 < np.abs(sound).max() < 0.4


def test_a_voice_is_heard_but_not_kept(here, voice):
    plain, path = rendered(here, *SMALL, *PLAIN, name="plain.mp4"), rendered(here, *SMALL, *PLAIN, "--audio", str(voice), "--audio-mode", "voice")
    assert sound_of(path).shape == sound_of(plain).shape and not np.array_equal(sound_of(path), sound_of(plain))


def test_loras_act_add_up_and_at_0_do_nothing(here, plain, capsys):
    style = tiny_lora(here / "style.safetensors")
    none = frames_of(rendered(here, *SMALL, *PLAIN, "--lora", f"{style}:0"))
    once, twice = (frames_of(rendered(here, *SMALL, *PLAIN, *["--lora", f"{style}:0.5"] * times)) for times in (1, 2))
    assert same_picture(plain, none) and not same_picture(once, plain) and not same_picture(twice, once)
    assert "96 of 96 layers matched" in capsys.readouterr().err


@pytest.mark.parametrize("text, path, strength", [("a.safetensors", "a.safetensors", 1.0), ("b:0.25", "b", 0.25), ("c:/d", "c:/d", 1.0), ("e:-1", "e", -1.0)])
def test_a_lora_is_a_file_and_maybe_a_strength(text, path, strength):
    assert parse_lora(text) == (type(parse_lora(text)[0])(path), strength)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--image", "nowhere.png@0"), "nowhere.png does not exist"),
        (("--image", "{picture}@-1", "--image", "{picture}@8"), "frame 8 was given 2 pictures and can have one"),
        (("--image", "nowhere@home.png"), "stands at 'home.png', which is no frame; write it like picture.png@0"),
        (("--image", ""), "image '': no file was given; write it like picture.png@0"),
        (("--image", "@0"), "image '@0': no file was given"),
        (("--image", " @-1:0.5"), "no file was given"),
        (("--image", "{picture}@9"), "frame 9 is not in a clip of 9 frames"),
        (("--image", "{picture}@0:2"), "strength 2, wanted 0 to 1"),
        (("--image", "{text}@0"), "is no picture"),
        (("--image", "{picture}@0", "--crf", "99"), "crf 99"),
        (("--crf", "30"), "--crf 30 is for pictures, and none was given; add --image"),
        (("--crf", "18"), "none was given"),
        (("--audio-mode", "voice"), "--audio-mode voice is for a sound of your own, and none was given; add --audio"),
        (("--audio-mode", "soundtrack"), "none was given"),
        (("--audio", "nowhere.wav"), "nowhere.wav does not exist"),
        (("--audio", "{text}"), "cannot be read"),
        (("--audio", "{picture}"), "no sound"),
        (("--lora", "nowhere.safetensors"), "nowhere.safetensors does not exist"),
        (("--lora", f"{tiny_files().audio_vae}:0.5"), "wanted a LoRA"),
        (("--lora", "{style}:nan"), "strength is nan"),
        (("--rule", "pag"), "cfg, cfg_star, apg"),
        (("--apg-norm", "-1"), "apg_norm -1"),
        (("--guidance-end", "1"), "empty window"),
        (("--bins", "0.5: cfg=2"), "write them like"),
    ],
)
def test_wrong_values_are_one_sentence_before_any_work(here, capsys, picture, arguments, words):
    (here / "note.txt").write_text("not a picture, not a sound")
    names = {"picture": picture, "text": here / "note.txt", "style": tiny_lora(here / "style.safetensors")}
    assert words in refused(here, capsys, *SMALL, *(part.format(**names) for part in arguments))
