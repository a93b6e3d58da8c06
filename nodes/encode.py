"""EncodeVideoVAE and EncodeAudioVAE: IMAGE and AUDIO -> LATENT."""

import torch
from comfy_api.latest import io

from ..ltx25.audio.encode import check_sound
from ..ltx25.engine import Engine
from ..ltx25.errors import InputError
from ..ltx25.image import rgb
from ..ltx25.instrument import Watch
from ..ltx25.moments import fit_latent, fit_wave
from .bridge import join
from .load import EngineType
from .run import node_run


class EncodeVideoVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EncodeVideoVAE",
            display_name="Encode Video VAE (LTX-2.5)",
            category="LTX-2.5",
            description="Frames of a clip to its latent, and its sound with it. What a retake, an extension or a refinement starts from.",
            search_aliases=["VAE encode", "video to latent", "images to latent", "video to video", "LTXV encode"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Image.Input(
                    "images",
                    tooltip="The frames of one clip, sides in multiples of 32 px. Of a number that is not 8 n + 1 the last ones are left "
                    "out, and the node says so.",
                ),
                io.Float.Input("frame_rate", default=24.0, min=1.0, max=240.0, step=0.001, tooltip="Frames per second of the clip; travels with the latent."),
                io.Audio.Input("audio", optional=True, tooltip="The clip's sound: then the latent holds both, on one clock. Cut or padded with silence to the length of the video."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip's latent, with its frame rate.")],
        )

    @classmethod
    def execute(cls, engine, images, frame_rate=24.0, audio=None) -> io.NodeOutput:
        images, given = pictures_of(images), None if audio is None else sound_of(audio)
        if given is not None and len(given[0]) != 1:
            raise InputError(f"{len(given[0])} sounds were given for one clip, wanted one.")
        with node_run(engine.engine, bar="encode.video") as run:
            video = engine.engine.encode_video(rgb(images), run.watch)
            frames = engine.engine.video_shape(video).frames
            if frames != len(images):
                run.tell([f"{len(images)} frames are not 8 n + 1: the last {len(images) - frames} are left out, {frames} are encoded."])
            sound = None if given is None else encode_soundtrack(engine.engine, *given, frames, frame_rate, run.watch)
        return io.NodeOutput({"samples": join(video, sound), "frame_rate": float(frame_rate)})


class EncodeAudioVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EncodeAudioVAE",
            display_name="Encode Audio VAE (LTX-2.5)",
            category="LTX-2.5",
            description="Sound of any rate and layout to an audio latent, 25 latent frames a second.",
            search_aliases=["LTXV audio VAE encode", "VAE encode audio", "audio to latent", "sound"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Audio.Input("audio", tooltip="Any sample rate; mono becomes two equal channels, more than two are mixed to stereo."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The audio latent, as long as the sound.")],
        )

    @classmethod
    def execute(cls, engine, audio) -> io.NodeOutput:
        wave, rate = sound_of(audio)
        with node_run(engine.engine, bar="encode.audio") as run:
            latent = engine.engine.encode_audio(wave, rate, run.watch)
        return io.NodeOutput({"samples": latent, "type": "audio"})


def pictures_of(images: torch.Tensor | None) -> torch.Tensor:
    """The pictures, or InputError where the node before made none: the host hands its None on."""
    if images is None:
        raise InputError("no picture was given, because the node it is to come from made none; look at that node, or connect another IMAGE.")
    return images


def sound_of(audio) -> tuple[torch.Tensor, int]:
    """(B, channels, N) float32 and Hz of an AUDIO. Raises InputError for one that is none."""
    if audio is None or audio["waveform"].numel() == 0:
        raise InputError("the audio is empty: its file or video has no sound; connect one that has.")
    wave, rate = audio["waveform"], int(audio["sample_rate"])
    check_sound(wave, rate)
    return wave.to("cpu", torch.float32), rate


def encode_soundtrack(engine: Engine, wave: torch.Tensor, rate: int, frames: int, frame_rate: float, watch: Watch) -> torch.Tensor:
    """Sound (B, channels, N) at `rate` Hz as the audio latent (B, c, n, bins) of a clip of `frames` frames: one clock for both."""
    return fit_latent(engine.encode_audio(fit_wave(wave, rate, frames, frame_rate), rate, watch), frames, frame_rate)
