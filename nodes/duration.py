"""LTX25PredictDuration: how long a clip a prompt wants."""

import folder_paths
from comfy_api.latest import io

from ..ltx25.duration import LEAST, MOST, frames_of
from ..ltx25.instrument.units import counted
from ..ltx25.shapes import MAX_FRAMES
from .bridge import conditioning_in, contexts, model_path
from .load import EngineType
from .registry import stamp
from .run import node_run

FOLDER = "model_patches"


class LTX25PredictDuration(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25PredictDuration",
            display_name="LTX-2.5 Predict Duration",
            category="LTX-2.5",
            description="Reads from a prompt how many seconds it needs, and gives them as a number of frames.",
            search_aliases=["LTXVDurationPredictor", "auto duration", "length", "duration head", "how long"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Conditioning.Input("positive", tooltip="The prompt, from Encode Gemma Text."),
                io.Combo.Input("duration_head", options=folder_paths.get_filename_list(FOLDER), tooltip="The duration head of LTX-2.5, from models/model_patches."),
                io.Float.Input("frame_rate", default=24.0, min=1.0, max=240.0, step=0.001, tooltip="Frames per second of the clip."),
                io.Float.Input("min_seconds", default=LEAST, min=0.0, max=3600.0, step=0.1, tooltip="The least that is answered."),
                io.Float.Input("max_seconds", default=MOST, min=0.0, max=3600.0, step=0.1, tooltip="The most that is answered."),
            ],
            outputs=[
                io.Int.Output("frames", tooltip="8 n + 1 frames, for Empty LTX-2.5 Latent."),
                io.Float.Output("seconds", tooltip="What the prompt wants by itself, before it is held between min_seconds and max_seconds."),
            ],
        )

    @classmethod
    def execute(cls, engine, positive, duration_head, frame_rate=24.0, min_seconds=LEAST, max_seconds=MOST) -> io.NodeOutput:
        entry = conditioning_in(positive, "positive")
        frames_of(LEAST, frame_rate, min_seconds, max_seconds, engine.engine.compression)  # limits are checked first
        with node_run(engine.engine, bar="text.duration") as run:
            prompt = contexts(entry, engine.engine, run.watch)
            seconds = engine.engine.predict_seconds(prompt, model_path(FOLDER, duration_head), run.watch)
            frames = frames_of(seconds, frame_rate, min_seconds, max_seconds, engine.engine.compression)
            limit = f", which is above max_seconds {max_seconds:g}" if seconds > max_seconds else f", which is below min_seconds {min_seconds:g}" if seconds < min_seconds else ""
            limit += f", and {MAX_FRAMES} frames are the most of a clip" if frames == MAX_FRAMES else ""
            run.tell([f"The prompt wants {seconds:.2f} s{limit}: {counted(frames, 'frame')}, {frames / frame_rate:.2f} s at {frame_rate:g} frames/s."])
        return io.NodeOutput(frames, seconds)

    @classmethod
    def fingerprint_inputs(cls, duration_head=None, **_):
        """A file that changed on disk makes this node run again."""
        path = folder_paths.get_full_path(FOLDER, duration_head) if duration_head else None
        return stamp(path) if path else None
