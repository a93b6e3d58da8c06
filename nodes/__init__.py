"""ComfyUI adapters, the only folder that imports comfy: nodes translate, the engine computes."""

from comfy_api.latest import ComfyExtension

from .audio_condition import LTX25AudioCondition, LTX25Extend, LTX25Retake
from .condition import LTX25ImageCondition, LTX25KeyframeSlots, LTX25VideoCondition
from .decode import DecodeAudioVAE, DecodeVideoVAE
from .dfr import LTX25LatentReference, LTX25TemporalRounds
from .duration import LTX25PredictDuration
from .encode import EncodeAudioVAE, EncodeVideoVAE
from .enhance import LTX25EnhancePrompt
from .guider import LTX25Guider
from .instrument import LTX25RunReport, PlanLTX25Render
from .latent import EmptyLTX25Latent
from .load import LoadLTX25Checkpoint
from .lora import LTX25LoRA
from .prompt import EncodeGemmaText
from .run import failures_recorded
from .sample import LTX25Sampler
from .upscale import LTX25LatentUpscale


class LTX25Extension(ComfyExtension):
    async def get_node_list(self):
        nodes = [
            LoadLTX25Checkpoint,
            EncodeGemmaText,
            EmptyLTX25Latent,
            LTX25Guider,
            LTX25Sampler,
            DecodeVideoVAE,
            DecodeAudioVAE,
            PlanLTX25Render,
            LTX25RunReport,
            EncodeVideoVAE,
            EncodeAudioVAE,
            LTX25ImageCondition,
            LTX25VideoCondition,
            LTX25AudioCondition,
            LTX25Retake,
            LTX25Extend,
            LTX25KeyframeSlots,
            LTX25LatentUpscale,
            LTX25PredictDuration,
            LTX25EnhancePrompt,
            LTX25LoRA,
            LTX25LatentReference,
            LTX25TemporalRounds,
        ]
        return [failures_recorded(node) for node in nodes]
