"""DecodeVideoVAE and DecodeAudioVAE: latents -> IMAGE and AUDIO."""

from comfy_api.latest import io

from ..ltx25.errors import InputError
from ..ltx25.hdr import SDR, TRANSFERS
from ..ltx25.plausible import doubts
from ..ltx25.shapes import VideoLatentShape, clip_samples
from .bridge import FRAME_RATE, audio_out, image_out, split
from .load import EngineType
from .run import node_run


class DecodeVideoVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="DecodeVideoVAE",
            display_name="Decode Video VAE (LTX-2.5)",
            category="LTX-2.5",
            description="Decodes the video of a latent to frames, in time chunks, so that memory does not grow with the clip.",
            search_aliases=["VAE decode", "VAE decode tiled", "LTX decode", "latent to video", "latent to images"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="A video latent, or a video and audio latent; of the latter the video is decoded."),
                io.Combo.Input(
                    "tiling",
                    options=["auto", "off"],
                    default="auto",
                    tooltip="auto: the frame is cut into tiles only where it does not fit into memory whole. off: never.",
                ),
                io.Combo.Input(
                    "transfer",
                    optional=True,
                    options=list(TRANSFERS),
                    default=SDR,
                    tooltip="sdr: frames in 0 to 1 for a screen. ACEScct, LogC3: high dynamic range, for a clip made in that curve (an HDR LoRA "
                    "says which): linear light that goes above 1, for EXR files. Decoded in float32, slower.",
                ),
            ],
            outputs=[
                io.Image.Output("images", tooltip="All frames of all clips, in order. With an HDR transfer: linear light, Rec.709."),
                io.Float.Output("frame_rate", tooltip="The latent's frames per second (24 when it has none), for Create Video."),
            ],
        )

    @classmethod
    def execute(cls, engine, latent, tiling="auto", transfer=SDR) -> io.NodeOutput:
        parts = split(latent)
        if parts.video is None:
            raise InputError("The latent holds audio only, and Decode Video VAE needs video; connect it to Decode Audio VAE.")
        engine.engine.check_frames(VideoLatentShape(*parts.video.shape[1:]), len(parts.video))
        with node_run(engine.engine, bar="decode.video") as run:
            run.tell(doubts(parts.video))
            video = parts.video[:, :, : engine.engine.compression.latent_frames(parts.frames(engine.engine.video_shape(parts.video).frames))]
            frames = engine.engine.decode_video(video, parts.seed, tiling, run.watch, transfer)
        return io.NodeOutput(image_out(frames), float(parts.frame_rate or FRAME_RATE))


class DecodeAudioVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="DecodeAudioVAE",
            display_name="Decode Audio VAE (LTX-2.5)",
            category="LTX-2.5",
            description="Decodes the audio of a latent to 48 kHz stereo, exactly as long as its video.",
            search_aliases=["LTXV audio VAE decode", "vocoder", "latent to audio", "sound", "VAE decode audio"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="An audio latent, or a video and audio latent; of the latter the audio is decoded."),
            ],
            outputs=[io.Audio.Output("audio", tooltip="48 kHz stereo. With video in the latent: frames / frame rate seconds, to the sample.")],
        )

    @classmethod
    def execute(cls, engine, latent) -> io.NodeOutput:
        parts = split(latent)
        if parts.audio is None:
            raise InputError("The latent holds video only, and Decode Audio VAE needs audio; connect it to Decode Video VAE.")
        frames = parts.clip_frames if parts.video is None else parts.frames(engine.engine.video_shape(parts.video).frames)
        samples = clip_samples(frames, parts.frame_rate) if frames and parts.frame_rate else None
        with node_run(engine.engine, bar="decode.audio") as run:
            waveform = engine.engine.decode_audio(parts.audio, samples, run.watch)
        return io.NodeOutput(audio_out(waveform))
