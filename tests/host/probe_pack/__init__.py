"""Nodes of the tests: they make what no ordinary node makes, and tell in their UI output what they were given."""

import gc
import hashlib
import json

import torch
from comfy.nested_tensor import NestedTensor
from comfy_api.latest import ComfyExtension, io


class ProbeInspect(io.ComfyNode):
    """Says what arrives: shapes, dtypes, devices, a digest of the bits, and plain values."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeInspect", category="probe", is_output_node=True, inputs=[io.AnyType.Input("value"), io.String.Input("tag", optional=True, default="")]
        )

    @classmethod
    def execute(cls, value, tag=""):
        return io.NodeOutput(ui={"seen": [json.dumps(describe(value))]})


class ProbeLatent(io.ComfyNode):
    """A LATENT of any shape: seeded noise, with or without a mask."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeLatent",
            category="probe",
            inputs=[
                io.String.Input("video", optional=True, default=""),
                io.String.Input("audio", optional=True, default=""),
                io.String.Input("keys", optional=True, default="{}"),
                io.String.Input("fill", optional=True, default="noise"),
                io.String.Input("mask", optional=True, default=""),
            ],
            outputs=[io.Latent.Output("latent")],
        )

    @classmethod
    def execute(cls, video="", audio="", keys="{}", fill="noise", mask=""):
        generator = torch.Generator().manual_seed(0)
        tensors = [make(json.loads(shape), fill, generator) for shape in (video, audio) if shape]
        latent = {"samples": tensors[0] if len(tensors) == 1 else NestedTensor(tensors), **json.loads(keys)}
        if mask:
            masks = [torch.ones(1, 1, *t.shape[2:]) for t in tensors]
            stream, frames = json.loads(mask)
            masks[stream][:, :, :frames] = 0
            latent["noise_mask"] = masks[0] if len(masks) == 1 else NestedTensor(masks)
        return io.NodeOutput(latent)


class ProbeFrames(io.ComfyNode):
    """Some frames of a LATENT's video, and of its audio when asked for."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeFrames",
            category="probe",
            inputs=[io.Latent.Input("latent"), io.Int.Input("start"), io.Int.Input("count"), io.Int.Input("audio", optional=True, default=0)],
            outputs=[io.Latent.Output("latent")],
        )

    @classmethod
    def execute(cls, latent, start, count, audio=0):
        samples = latent["samples"]
        parts = samples.unbind() if samples.is_nested else [samples]
        video = parts[0][:, :, start : start + count].contiguous()
        return io.NodeOutput({"samples": NestedTensor((video, parts[1][:, :, :audio].contiguous())) if audio else video})


class ProbeImage(io.ComfyNode):
    """An IMAGE of any shape: seeded noise. fill nothing: None, as nodes of others have it where they made no picture."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeImage",
            category="probe",
            inputs=[io.String.Input("shape"), io.String.Input("fill", optional=True, default="noise")],
            outputs=[io.Image.Output("image")],
        )

    @classmethod
    def execute(cls, shape, fill="noise"):
        if fill == "nothing":
            return io.NodeOutput(None)
        image = torch.rand(json.loads(shape), generator=torch.Generator().manual_seed(0))
        if fill == "nan":
            image.view(-1)[0] = float("nan")
        return io.NodeOutput(image)


class ProbeAudio(io.ComfyNode):
    """An AUDIO of any shape and rate: seeded noise."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeAudio", category="probe", inputs=[io.String.Input("shape"), io.Int.Input("rate")], outputs=[io.Audio.Output("audio")]
        )

    @classmethod
    def execute(cls, shape, rate):
        wave = torch.rand(json.loads(shape), generator=torch.Generator().manual_seed(0)) - 0.5
        return io.NodeOutput({"waveform": wave, "sample_rate": rate})


class ProbeConditioning(io.ComfyNode):
    """Changes a CONDITIONING in one way."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeConditioning",
            category="probe",
            inputs=[io.Conditioning.Input("conditioning"), io.String.Input("how")],
            outputs=[io.Conditioning.Output("conditioning")],
        )

    @classmethod
    def execute(cls, conditioning, how):
        (tensor, extras), *_ = conditioning
        if how == "twice":
            return io.NodeOutput([[tensor, extras], [tensor, extras]])
        if how == "narrow":
            return io.NodeOutput([[tensor[..., :-1], extras]])
        if how == "unprocessed":
            return io.NodeOutput([[tensor[:, :8], {**extras, "unprocessed_ltxav_embeds": True}]])
        return io.NodeOutput([[tensor, {**extras, **json.loads(how)}]])


class ProbeForeignGuider(io.ComfyNode):
    """A GUIDER that is not ours."""

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ProbeForeignGuider", category="probe", outputs=[io.Guider.Output("guider")])

    @classmethod
    def execute(cls):
        return io.NodeOutput(type("CFGGuider", (), {})())


class ProbeValue(io.ComfyNode):
    """A value of any type over a link; without one the prompt ends here, after the host has checked it."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeValue",
            category="probe",
            inputs=[io.String.Input("text", optional=True, default="")],
            outputs=[io.AnyType.Output("value")],
        )

    @classmethod
    def execute(cls, text=""):
        if not text:
            raise ValueError("there is no value")
        return io.NodeOutput(text)


class ProbeModels(io.ComfyNode):
    """What the host's memory manager holds, after `after` has run."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="ProbeModels", category="probe", is_output_node=True, not_idempotent=True, inputs=[io.AnyType.Input("after", optional=True)]
        )

    @classmethod
    def fingerprint_inputs(cls, **_):
        return float("nan")

    @classmethod
    def execute(cls, after=None):
        import comfy.model_management as mm

        held = [{"bytes": m.model_loaded_memory(), "size": m.model_memory(), "name": m.model.part.name} for m in mm.current_loaded_models]
        return io.NodeOutput(ui={"models": [json.dumps(held)], "tensors": [tensor_bytes()]})


def tensor_bytes():
    """Bytes that all tensors of the process hold, storage by storage."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta and not thing.is_nested:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def describe(value):
    if getattr(value, "is_nested", False):
        return {"nested": [describe(part) for part in value.unbind()]}
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().float().contiguous()
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "device": str(value.device),
            "digest": hashlib.sha256(numbers.numpy().tobytes()).hexdigest(),
            "min": float(numbers.min()),
            "max": float(numbers.max()),
            "std": float(numbers.std()),
            "finite": bool(numbers.isfinite().all()),
        }
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def make(shape, fill, generator):
    if fill == "wide":  # any size without its memory: all cells are one value
        return torch.zeros(1).expand(shape)
    if fill == "zeros":
        return torch.zeros(shape)
    tensor = torch.randn(shape, generator=generator)
    if fill == "nan":
        tensor.view(-1)[0] = float("nan")
    return tensor


class Probes(ComfyExtension):
    async def get_node_list(self):
        return [ProbeInspect, ProbeLatent, ProbeConditioning, ProbeForeignGuider, ProbeValue, ProbeModels, ProbeFrames, ProbeImage, ProbeAudio]


async def comfy_entrypoint():
    return Probes()
