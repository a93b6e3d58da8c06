"""LTX25LoRA: an engine and a LoRA file -> the same engine with its transformer changed.

A wrong file shall not be found out behind a first stage that took minutes. What the file alone tells is checked before the
prompt runs; whether it fits the transformer, by the node itself, which the host runs before any sampling because it is async.
"""

import folder_paths
from comfy_api.latest import io

from ..ltx25.errors import LTX25Error
from ..ltx25.lora import open_lora
from .bridge import model_path
from .load import EngineType
from .registry import EngineHandle, stamp
from .run import node_run

FOLDER = "loras"


class LTX25LoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25LoRA",
            display_name="LTX-2.5 LoRA",
            category="LTX-2.5",
            description="The engine with a LoRA on its transformer. May follow another one; the engine before it stays as it is.",
            search_aliases=["LoraLoader", "LoRA loader", "LoraLoaderModelOnly", "distilled lora", "LTXV LoRA", "style"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint, or from another LTX-2.5 LoRA: they add up."),
                io.Combo.Input(
                    "lora_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="From models/loras. Which of its layers the transformer has is counted and shown; a LoRA of which none "
                    "fits is refused.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.05,
                    tooltip="1 is what it was trained for, 0 the engine without it, to the bit. Stages of a workflow may differ: "
                    "the transformer stays loaded.",
                ),
            ],
            outputs=[EngineType.Output("engine", tooltip="For the guider of the stage that is to have the LoRA.")],
        )

    @classmethod
    async def execute(cls, engine, lora_name, strength=1.0) -> io.NodeOutput:
        changed = engine.engine.with_loras([(model_path(FOLDER, lora_name), strength)])
        with node_run(changed, bar="load.stage") as run:
            run.tell([str(changed.loras[-1])])
        return io.NodeOutput(EngineHandle(changed, engine.arbiter, engine))

    @classmethod
    def validate_inputs(cls, lora_name) -> bool | str:
        """Runs before the first node of the prompt. A name that comes over a link is not known yet and None here."""
        if lora_name is None:
            return True
        path = folder_paths.get_full_path(FOLDER, lora_name)
        if path is None:
            return f"{lora_name} is not in models/{FOLDER}; put it there, or choose another one."
        try:
            open_lora(path)
        except LTX25Error as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora_name=None, **_):
        """A file that changed on disk makes this node run again."""
        path = folder_paths.get_full_path(FOLDER, lora_name) if lora_name else None
        return stamp(path) if path else None
