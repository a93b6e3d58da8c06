"""LoadLTX25Checkpoint: four files -> an engine. Headers are read here, weights when a phase needs them."""

import folder_paths
from comfy_api.latest import io

from ..ltx25.engine import Files, Options
from .bridge import model_names, model_path
from .registry import REGISTRY, EngineHandle, stamp

EngineType = io.Custom("LTX25_ENGINE")

SLOTS = {  # input id -> folder under models/
    "transformer": "diffusion_models",
    "text_encoder": "text_encoders",
    "video_vae": "vae",
    "audio_vae": "vae",
}
TOOLTIPS = {
    "transformer": "The diffusion transformer, from models/diffusion_models. The 'dev' file takes 30 guided steps, the 'distilled' "
    "file 8 steps without guidance.",
    "text_encoder": "Gemma 4 12B with the LTX-2.5 projections (gemma4-12b-with-proj-ltx-2.5), from models/text_encoders. A stock "
    "Gemma lacks the projections and is refused.",
    "video_vae": "The LTX-2.5 video VAE, from models/vae.",
    "audio_vae": "The LTX-2.5 audio VAE with its vocoder, from models/vae.",
}


class LoadLTX25Checkpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LoadLTX25Checkpoint",
            display_name="Load LTX-2.5 Checkpoint",
            category="LTX-2.5",
            description="Opens the four LTX-2.5 files as one engine. Files are checked here; weights are read on first use.",
            search_aliases=["LTX loader", "LTX-2.5 model loader", "LTXV checkpoint", "load diffusion model", "load VAE", "load text encoder"],
            inputs=[
                *(
                    io.Combo.Input(slot, options=model_names(folder), tooltip=TOOLTIPS[slot])
                    for slot, folder in SLOTS.items()
                ),
                io.Combo.Input(
                    "precision",
                    options=["auto", "bf16", "fp8"],
                    default="auto",
                    tooltip="How the transformer's weights are kept. auto: as the file has them. bf16: decoded to bf16. fp8: rounded "
                    "to fp8 while they are read, two thirds of bf16's memory and faster, a little less exact; for NVIDIA cards since "
                    "Ada (RTX 40).",
                ),
                io.Combo.Input(
                    "residency",
                    options=["auto", "resident", "stream"],
                    default="auto",
                    tooltip="Where the weights are while they are used. resident: all that a phase needs is on the device. stream: "
                    "blocks come from host memory one after the other, for small cards. auto: what fits.",
                ),
                io.Combo.Input(
                    "legs",
                    options=["auto", "batched", "sequential"],
                    default="auto",
                    tooltip="How the forwards of a guided step run. batched: together, sharing what is equal. sequential: one after "
                    "the other, with the least memory. auto: what fits.",
                ),
                io.Combo.Input(
                    "cache",
                    options=["memory", "disk", "off"],
                    default="memory",
                    tooltip="Where encoded prompts are kept, so that a text seen before does not load the text encoder again.",
                ),
            ],
            outputs=[EngineType.Output("engine", tooltip="The engine, for the encode, guider and decode nodes.")],
        )

    @classmethod
    async def execute(  # async: the host runs such nodes first, so that the files of every stage are checked before the first one
        cls, transformer, text_encoder, video_vae, audio_vae, precision="auto", residency="auto", legs="auto", cache="memory"
    ) -> io.NodeOutput:
        names = (transformer, text_encoder, video_vae, audio_vae)
        files = Files(**{slot: model_path(folder, name) for (slot, folder), name in zip(SLOTS.items(), names, strict=True)})
        handle: EngineHandle = REGISTRY.open(files, Options(precision, residency, legs, cache))
        return io.NodeOutput(handle)

    @classmethod
    def fingerprint_inputs(cls, transformer=None, text_encoder=None, video_vae=None, audio_vae=None, **_):
        """A file that changed on disk makes this node run again."""
        names = (transformer, text_encoder, video_vae, audio_vae)
        pairs = zip(SLOTS.values(), names, strict=True)
        return [stamp(path) for path in (folder_paths.get_full_path(folder, name) for folder, name in pairs if name) if path]
