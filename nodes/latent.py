"""EmptyLTX25Latent: the sizes of a clip with sound."""

import comfy.model_management as mm
from comfy_api.latest import io

from ..ltx25.latents import empty_latents
from ..ltx25.shapes import MAX_FRAMES, MAX_SIDE, PUBLISHED_COMPRESSION, VideoShape
from .bridge import join


class EmptyLTX25Latent(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        side, frames = PUBLISHED_COMPRESSION.side, PUBLISHED_COMPRESSION.frames
        return io.Schema(
            node_id="EmptyLTX25Latent",
            display_name="Empty LTX-2.5 Latent (video + audio)",
            category="LTX-2.5",
            description="An empty video and audio latent of exactly the size asked for.",
            search_aliases=["LTX empty latent", "LTXV empty latent video", "video size", "resolution", "frames", "duration"],
            inputs=[
                io.Int.Input(
                    "width",
                    default=768,
                    min=side,
                    max=MAX_SIDE,
                    step=side,
                    tooltip=f"Width of the video in px, a multiple of {side}. This size is rendered, never a rounded one.",
                ),
                io.Int.Input(
                    "height",
                    default=512,
                    min=side,
                    max=MAX_SIDE,
                    step=side,
                    tooltip=f"Height of the video in px, a multiple of {side}. This size is rendered, never a rounded one.",
                ),
                io.Int.Input(
                    "frames",
                    default=121,
                    min=1,
                    max=MAX_FRAMES,
                    step=frames,
                    tooltip=f"Number of video frames, {frames} n + 1 (1, 9, 17, ... 121). 121 at 24 frames/s are 5 seconds.",
                ),
                io.Float.Input(
                    "frame_rate",
                    default=24.0,
                    min=1.0,
                    max=240.0,
                    step=0.001,
                    tooltip="Frames per second; fractions such as 23.976 are fine. It sets the length of the sound and travels with "
                    "the latent to the sampler and the decoders. The model was trained for 24.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=64,
                    tooltip="Number of clips. Clip i equals a single clip made with seed + i.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="Video and audio latent, with its frame rate.")],
        )

    @classmethod
    def execute(cls, width=768, height=512, frames=121, frame_rate=24.0, batch_size=1) -> io.NodeOutput:
        clip = VideoShape(frames, height, width)
        samples = join(*empty_latents(clip, frame_rate, batch_size, PUBLISHED_COMPRESSION))
        return io.NodeOutput({"samples": samples.to(mm.intermediate_device()), "frame_rate": float(frame_rate)})
