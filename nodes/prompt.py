"""EncodeGemmaText: a prompt -> the two contexts the transformer reads."""

from comfy_api.latest import io

from .bridge import conditioning_out
from .load import EngineType
from .run import node_run


class EncodeGemmaText(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EncodeGemmaText",
            display_name="Encode Gemma Text (LTX-2.5)",
            category="LTX-2.5",
            description="Encodes a prompt with the engine's Gemma tower, projections and connectors.",
            search_aliases=["CLIP text encode", "prompt", "negative prompt", "LTX text encode", "gemma"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.String.Input(
                    "text",
                    multiline=True,
                    default="",
                    tooltip="What is seen and heard, as one paragraph. Taken literally: no (word:1.2) weights, no {a|b} choices. At "
                    "most 1024 tokens are read; a longer text is cut, and the node says so.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    "conditioning",
                    tooltip="For LTX-2.5 Guider. Native LTX nodes take it too; give them LTXVConditioning with 24 frames/s.",
                )
            ],
        )

    @classmethod
    def execute(cls, engine, text="") -> io.NodeOutput:
        with node_run(engine.engine, bar="text.tower", idle="from the cache") as run:
            run.record.describe(prompts={f"prompt {run.record.prompts}": text})
            encoded = engine.engine.encode(text, run.watch)
            run.tell((*encoded.notices, *encoded.told))
        return io.NodeOutput(conditioning_out(encoded))
