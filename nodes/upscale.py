"""LTX25LatentUpscale: a latent of one size to a larger one, for a second sampling."""

from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from ..ltx25.config.upscaler import UpscalerConfig
from ..ltx25.errors import InputError, LTX25Error
from ..ltx25.optional import open_upscaler
from .bridge import EXTENSION, FRAME_RATE, empty, join, keyframes_in, keyframes_out, model_path, split
from .load import EngineType
from .registry import stamp
from .run import node_run

FOLDER = "latent_upscale_models"
# Keys that describe the smaller clip: a mask and conditions are set anew at the new size.
DROPPED = ("noise_mask", EXTENSION, "conditions", "downscale_ratio_spacial", "downscale_ratio_temporal")


class LTX25LatentUpscale(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25LatentUpscale",
            display_name="LTX-2.5 Latent Upscale",
            category="LTX-2.5",
            description="Enlarges a video latent: twice the size, or twice the frames, by the published upscalers. Sampling it again with "
            "schedule distilled_stage2 puts the detail in.",
            search_aliases=["LTXVLatentUpsampler", "spatial upscaler", "temporal upscaler", "two stage", "hires fix", "latent upsampler"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="A finished clip, from LTX-2.5 Sampler. Its sound is passed on as it is."),
                io.Combo.Input(
                    "upscale_model",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="From models/latent_upscale_models. spatial: twice the width and height. temporal: twice the frame rate. The file "
                    "is checked before anything of the prompt runs.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The larger clip. Give it its pictures anew, at its own size, and a soundtrack of your own: no condition is passed on.")],
        )

    @classmethod
    def execute(cls, engine, latent, upscale_model) -> io.NodeOutput:
        parts = split(latent)
        if parts.video is None:
            raise InputError("The latent holds audio only, and LTX-2.5 Latent Upscale enlarges video; connect a latent with video.")
        if empty(parts.video):
            raise InputError("There is no clip to enlarge yet: the video of the latent, or its end, is still empty; connect LTX-2.5 Sampler before LTX-2.5 Latent Upscale.")
        keyframes = latent.get("keyframes", ())
        if keyframes and opened_model(upscale_model).time != 1:
            raise InputError(f"{upscale_model} doubles frames, and keyframes are single pictures; choose the spatial upscaler.")
        source = _together(latent, parts.video) if keyframes else parts.video
        with node_run(engine.engine, bar="upscale") as run:
            video = engine.engine.upscale(source, model_path(FOLDER, upscale_model), run.watch)
        if keyframes:
            return io.NodeOutput(keyframes_out(video, keyframes, parts.frame_rate or FRAME_RATE, parts.seed))
        out = {key: value for key, value in latent.items() if key not in DROPPED}
        out["samples"] = join(video, parts.audio)
        if video.shape[2] != parts.video.shape[2]:
            out["frame_rate"] = 2 * (parts.frame_rate or FRAME_RATE)  # twice the frames in the same time
            if parts.clip_frames is not None:
                out["clip_frames"] = 2 * parts.clip_frames - 1
        return io.NodeOutput(out)

    @classmethod
    def validate_inputs(cls, upscale_model) -> bool | str:
        """Runs before the first node of the prompt: a wrong file is not found out after stage 1. None: over a link, not known yet."""
        if upscale_model is None:
            return True
        try:
            opened_model(upscale_model)
        except LTX25Error as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, upscale_model=None, **_):
        """A file that changed on disk makes this node run again."""
        path = folder_paths.get_full_path(FOLDER, upscale_model) if upscale_model else None
        return stamp(path) if path else None


def _together(keyframes: dict[str, Any], samples: torch.Tensor) -> torch.Tensor:
    """Keyframes of each clip as one clip (B, C, count, h, w): enlarged together, as the official pipeline does."""
    count = len(keyframes["keyframes"])
    if len(samples) % count:
        raise InputError(f"the keyframes are {len(samples)} pictures, and their frames {list(keyframes['keyframes'])} are {count} a clip; connect the keyframes output of LTX-2.5 Sampler whole.")
    return keyframes_in(keyframes, len(samples) // count, count)


def opened_model(upscale_model: str) -> UpscalerConfig:
    """What the header of a file in the folder says. Raises LTX25Error for one that is not there or no upscaler."""
    path = folder_paths.get_full_path(FOLDER, upscale_model)
    if path is None:
        raise InputError(f"{upscale_model} is not in models/{FOLDER}; download it from huggingface.co/Lightricks/LTX-2.5.")
    return open_upscaler(path)[1]
