from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from comfyui_ltx25.ltx25 import mux
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.instrument import Watch
from comfyui_ltx25.ltx25.mux import AAC_SAMPLES, as_fraction, check_output, write_video
from comfyui_ltx25.ltx25.shapes import OUTPUT_RATE, clip_samples


def clip(frames, height=64, width=96):
    """Slow colour ramps: each frame differs from the last, and nothing is lost to chroma subsampling."""
    t = torch.linspace(0, 1, frames).view(-1, 1, 1)
    y = torch.linspace(0, 1, height).view(1, -1, 1)
    x = torch.linspace(0, 1, width).view(1, 1, -1)
    shape = (frames, height, width)
    return torch.stack([(0.2 + 0.6 * x).expand(shape), (0.1 + 0.8 * y).expand(shape), (0.9 - 0.7 * t).expand(shape)], dim=3)


def tones(samples):
    t = torch.arange(samples) / OUTPUT_RATE
    return torch.stack([0.5 * torch.sin(2 * torch.pi * 330 * t), 0.25 * torch.sin(2 * torch.pi * 1100 * t)])


def read_frames(path):
    """(F, H, W, 3) in [0, 1], converted the way a player does: by the colour tags of the stream."""
    with av.open(str(path)) as container:
        return torch.stack([torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]) / 255


def read_audio(path):
    with av.open(str(path)) as container:
        return torch.from_numpy(np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1))


@pytest.mark.parametrize("frame_rate", [24, 23.976, 25, 29.97, 30, 12.5, 1, 60, 24.5])
@pytest.mark.parametrize("frames", [1, 9])
def test_frame_count_size_rate_and_length_are_the_ones_asked_for(tmp_path, frames, frame_rate):
    samples = clip_samples(frames, frame_rate)
    path = write_video(tmp_path / "x.mp4", clip(frames), tones(samples), frame_rate, {}, Watch())
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.width, video.height, video.frames) == (96, 64, frames)
        assert frames == 1 or video.average_rate == as_fraction(frame_rate)
        assert abs(video.duration * video.time_base - frames / as_fraction(frame_rate)) < Fraction(1, 1000)
        assert audio.rate == OUTPUT_RATE and audio.layout.name == "stereo"
        assert abs(audio.duration * audio.time_base * OUTPUT_RATE - samples) <= AAC_SAMPLES
    assert len(read_frames(path)) == frames
    assert abs(read_audio(path).shape[1] - samples) <= 2 * AAC_SAMPLES


def test_a_browser_can_play_it(tmp_path):
    path = write_video(tmp_path / "x.mp4", clip(9), tones(18000), 24, {}, Watch())
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, container.streams.audio[0].codec_context.name) == ("h264", "yuv420p", "aac")
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (1, 1, 1, 1)
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # starts to play before it is whole


def test_colours_survive_within_a_few_levels(tmp_path):
    frames = clip(9)
    got = read_frames(write_video(tmp_path / "x.mp4", frames, None, 24, {}, Watch()))
    off = (got - frames).abs() * 255
    assert off.mean() < 2 and off.max() < 10


def test_black_white_and_what_lies_outside_the_range(tmp_path):
    frames = torch.stack([torch.zeros(32, 32, 3), torch.ones(32, 32, 3), torch.full((32, 32, 3), -3.0), torch.full((32, 32, 3), 7.0)])
    got = read_frames(write_video(tmp_path / "x.mp4", frames, None, 24, {}, Watch()))
    assert (got - frames.clamp(0, 1)).abs().max() * 255 <= 2


def test_sound_survives_in_place_and_by_channel(tmp_path):
    audio = tones(clip_samples(25, 24))
    got = read_audio(write_video(tmp_path / "x.mp4", clip(25), audio, 24, {}, Watch()))
    length = min(got.shape[1], audio.shape[1])
    for channel in range(2):
        assert torch.corrcoef(torch.stack([got[channel, :length], audio[channel, :length]]))[0, 1] > 0.99


def test_no_sound_means_no_audio_stream(tmp_path):
    with av.open(str(write_video(tmp_path / "x.mp4", clip(9), None, 24, {}, Watch()))) as container:
        assert not container.streams.audio


def test_metadata_is_kept(tmp_path):
    metadata = {"seed": "18446744073709551615", "record": "runs/2026 ü/record.jsonl"}
    with av.open(str(write_video(tmp_path / "x.mp4", clip(1), None, 24, metadata, Watch()))) as container:
        assert metadata.items() <= container.metadata.items()


class Recorder:
    wants_preview = False

    def __init__(self, stop_at=None):
        self.done, self.names, self.stop_at = [], [], stop_at

    def check(self):
        if self.stop_at is not None and len(self.done) >= self.stop_at:
            raise KeyboardInterrupt

    def opened(self, phase):
        self.names.append((phase.name, phase.total))

    def ticked(self, phase):
        self.done.append(phase.done)

    def closed(self, phase):
        pass


def test_every_frame_is_ticked(tmp_path):
    sink = Recorder()
    write_video(tmp_path / "x.mp4", clip(9), tones(18000), 24, {}, Watch([sink]))
    assert sink.names == [("mux", 9)] and sink.done == list(range(1, 10))


def test_a_cancel_leaves_nothing_and_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "x.mp4"
    path.write_bytes(b"older")
    with pytest.raises(KeyboardInterrupt):
        write_video(path, clip(9), tones(18000), 24, {}, Watch([Recorder(stop_at=3)]))
    assert [p.name for p in tmp_path.iterdir()] == ["x.mp4"] and path.read_bytes() == b"older"


def test_an_older_file_is_replaced_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "x.mp4"
    for frames in (1, 9):
        write_video(path, clip(frames), None, 24, {}, Watch())
    assert len(read_frames(path)) == 9


@pytest.mark.parametrize(
    ("frame_rate", "wanted"),
    [
        (24, Fraction(24)),
        (23.976, Fraction(24000, 1001)),
        (24000 / 1001, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (119.88, Fraction(120000, 1001)),
        (25.0, Fraction(25)),
        (12.5, Fraction(25, 2)),
        (24.1, Fraction(241, 10)),
        (240, Fraction(240)),
        (1, Fraction(1)),
    ],
)
def test_frame_rates_as_fractions(frame_rate, wanted):
    assert as_fraction(frame_rate) == wanted


@pytest.mark.parametrize("frame_rate", [0, -1, 241, float("nan"), float("inf")])
def test_frame_rates_that_no_clip_has(frame_rate):
    with pytest.raises(InputError, match="frame_rate"):
        as_fraction(frame_rate)


@pytest.mark.parametrize("name", ["x.avi", "x", "x.mp4.gz"])
def test_only_mp4_is_written(tmp_path, name):
    with pytest.raises(InputError, match=r"\.mp4"):
        check_output(tmp_path / name)


def test_output_that_is_a_folder_or_below_a_file(tmp_path):
    (tmp_path / "x.mp4").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_output(tmp_path / "x.mp4")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        check_output(tmp_path / "file" / "x.mp4")


@pytest.mark.parametrize(
    ("frames", "audio", "words"),
    [
        (torch.zeros(3, 32, 32), None, r"frames have shape \(3, 32, 32\)"),
        (torch.zeros(0, 32, 32, 3), None, "frames have shape"),
        (torch.zeros(1, 3, 32, 32), None, "frames have shape"),
        (torch.zeros(1, 33, 32, 3), None, "even sides"),
        (torch.full((1, 32, 32, 3), float("nan")), None, "NaN"),
        (torch.zeros(1, 32, 32, 3), torch.zeros(1, 480), r"audio has shape \(1, 480\)"),
        (torch.zeros(1, 32, 32, 3), torch.full((2, 480), float("inf")), "NaN or infinite"),
    ],
)
def test_wrong_tensors_are_refused_and_write_nothing(tmp_path, frames, audio, words):
    with pytest.raises(InputError, match=words):
        write_video(tmp_path / "x.mp4", frames, audio, 24, {}, Watch())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", Path(""), Path("/"), "..", "a" * 248 + ".mp4", "/proc/a.mp4"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as told:
        check_output(name)
    assert str(told.value).endswith(".") and "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_colon_in_the_name_is_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_video(Path("12:30.mp4"), torch.rand(2, 32, 32, 3), None, 24.0, {}, Watch())
    assert (tmp_path / "12:30.mp4").stat().st_size > 0


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        yield 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mux, "_feed", full)
    with pytest.raises(InputError, match=r"out\.mp4 could not be written \(No space left on device\); make room"):
        write_video(tmp_path / "out.mp4", torch.rand(3, 32, 32, 3), None, 24.0, {}, Watch())
    assert not list(tmp_path.iterdir())
