"""ComfyUI adapters, the only folder that imports comfy: nodes translate, the engine computes."""

from comfy_api.latest import ComfyExtension

from .decode import DecodeAudioVAE, DecodeVideoVAE
from .guider import LTX25Guider
from .instrument import LTX25RunReport, PlanLTX25Render
from .latent import EmptyLTX25Latent
from .load import LoadLTX25Checkpoint
from .prompt import EncodeGemmaText
from .sample import LTX25Sampler


class LTX25Extension(ComfyExtension):
    async def get_node_list(self):
        return [
            LoadLTX25Checkpoint,
            EncodeGemmaText,
            EmptyLTX25Latent,
            LTX25Guider,
            LTX25Sampler,
            DecodeVideoVAE,
            DecodeAudioVAE,
            PlanLTX25Render,
            LTX25RunReport,
        ]
