"""LTX25EnhancePrompt: a short idea written out by a language model of the user's own; off unless switched on."""

from pathlib import Path

import comfy.model_management as mm
from comfy_api.latest import io

from ..ltx25.enhance import enhance
from ..ltx25.errors import InputError
from .load import EngineType
from .run import node_run

NO_MODEL = "no file was given: `model` is empty; give the folder of a generative Gemma, for example of google/gemma-4-E2B-it, or switch enabled off."


class LTX25EnhancePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25EnhancePrompt",
            display_name="LTX-2.5 Enhance Prompt (optional)",
            category="LTX-2.5",
            description="Lets a generative Gemma you have on disk write a short prompt out. Off by default; nothing is downloaded.",
            search_aliases=["prompt enhancer", "TextGenerateLTX2Prompt", "prompt upsampling", "LLM prompt", "caption"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.String.Input("text", multiline=True, default="", tooltip="The prompt."),
                io.Boolean.Input("enabled", default=False, tooltip="Off: the prompt is passed on as it is and no model is touched. On: about a minute, and the memory of the model."),
                io.String.Input(
                    "model",
                    default="",
                    tooltip="The folder of a generative Gemma in the format of transformers, for example google/gemma-4-E2B-it (10 GB). The text "
                    "encoder of LTX-2.5 cannot write.",
                ),
                io.Image.Input("image", optional=True, tooltip="The picture the clip starts from, of any size; then the model must be one that sees."),
            ],
            outputs=[io.String.Output("text", tooltip="The prompt written out, or the prompt itself where that failed; never empty. Preview it before you use it.")],
        )

    @classmethod
    def execute(cls, engine, text="", enabled=False, model="", image=None) -> io.NodeOutput:
        if not enabled:
            return io.NodeOutput(text)
        if not model.strip():
            raise InputError(NO_MODEL)
        with node_run(engine.engine, bar="text.enhance") as run:
            mm.free_memory(1e30, engine.engine.device)  # the model comes and goes as a whole: room is made before
            enhanced = enhance(text, Path(model).expanduser(), image, engine.engine.device, run.watch)
            run.tell([enhanced.notice] if enhanced.notice else [])
        return io.NodeOutput(enhanced.text)

    @classmethod
    def validate_inputs(cls, enabled, model) -> bool | str:
        """Runs before the first node of the prompt. A value that comes over a link is not known yet and None here."""
        return NO_MODEL if enabled and model is not None and not model.strip() else True
