"""The audio-video diffusion transformer. `model.py` first."""

from .adaln import StepTables
from .fp8 import check_fp8, fp8_layers, quantise
from .geometry import Geometry, timestep_of_tokens
from .modality import Contexts, Leg, LegPlan, Stream, Velocity
from .model import KEEP_STORED, DiT
from .patchify import patchify_audio, patchify_video, unpatchify_audio, unpatchify_video

__all__ = [
    "KEEP_STORED",
    "Contexts",
    "DiT",
    "Geometry",
    "Leg",
    "LegPlan",
    "StepTables",
    "Stream",
    "Velocity",
    "check_fp8",
    "fp8_layers",
    "patchify_audio",
    "patchify_video",
    "quantise",
    "timestep_of_tokens",
    "unpatchify_audio",
    "unpatchify_video",
]
