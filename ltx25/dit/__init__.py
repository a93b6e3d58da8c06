"""The audio-video diffusion transformer. `model.py` first."""

from .adaln import StepTables
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
    "patchify_audio",
    "patchify_video",
    "timestep_of_tokens",
    "unpatchify_audio",
    "unpatchify_video",
]
