"""Checkpoint files in every storage the pack reads, made from a bf16 one with encoders of our own or of other packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import safe_open

from ...kernels.int8_linear import rotate
from ...ltx25.checkpoint import write_file

GROUP = 16  # columns turned together: the tiny model is narrower than the published 256
SAFETENSORS = ("int8", "nvfp4-marked", "nvfp4-bare", "nvfp4-metadata", "fp8", "fp8-weight_scale", "fp8-scale_weight", "fp8-e5m2")

# What the published int8 files quantise: the linear layers of attention and feed-forwards, none of the gates, and the tower's.
LINEAR = ("*attn*.to_q.weight", "*attn*.to_k.weight", "*attn*.to_v.weight", "*attn*.to_out.0.weight", "*ff.net.*.weight", "*_proj.weight")
NEVER = ("*patchify_proj*", "*embedding_projection*", "text_embedding*", "vision*")

Tensors = dict[str, torch.Tensor]


def read_all(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def linears(tensors: Tensors) -> list[str]:
    """Names of what is quantised."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.ndim == 2
        and any(fnmatchcase(name, p) for p in LINEAR)
        and not any(fnmatchcase(name, p) for p in NEVER)
    ]


def write_quantised(source: Path, target: Path, storage: str, metadata: bool = True) -> Path:
    """`source` again as `target`, stored as one of SAFETENSORS. metadata: keep the file's own."""
    tensors, keys = read_all(source)
    if not metadata:
        keys = {}
    encode: Callable[[Tensors, str], dict[str, object] | None] = {
        "int8": _int8, "nvfp4-marked": _nvfp4, "nvfp4-bare": _nvfp4, "nvfp4-metadata": _nvfp4,
        "fp8": _fp8(None, torch.float8_e4m3fn), "fp8-e5m2": _fp8(None, torch.float8_e5m2),
        "fp8-weight_scale": _fp8("weight_scale", torch.float8_e4m3fn), "fp8-scale_weight": _fp8("scale_weight", torch.float8_e4m3fn),
    }[storage]  # fmt: skip
    marks = {}
    if storage.startswith("fp8"):
        names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.dtype == torch.bfloat16]
        if storage == "fp8-scale_weight":
            tensors["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    else:
        names = linears(tensors)
    for name in names:
        layer = name.removesuffix(".weight")
        mark = encode(tensors, name)
        if mark is not None:
            marks[layer] = mark
    if storage == "nvfp4-metadata":
        keys["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": marks})
    elif storage != "nvfp4-bare":
        for layer, mark in marks.items():
            tensors[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(json.dumps(mark).encode()), dtype=torch.uint8)
    write_file(target, tensors, keys)
    return target


def _int8(tensors: Tensors, name: str) -> dict[str, object]:
    turned = rotate(tensors[name].float(), GROUP)
    scale = turned.abs().amax(1, keepdim=True) / 127
    tensors[name] = (turned / scale).round().clamp(-127, 127).to(torch.int8)
    tensors[f"{name}_scale"] = scale
    return {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP}


def _nvfp4(tensors: Tensors, name: str) -> dict[str, object] | None:
    from comfy_kitchen.backends.eager.quantization import quantize_nvfp4

    weight = tensors[name].float()
    layer = name.removesuffix(".weight")
    if weight.shape[1] % 16:
        return None
    scale = weight.abs().max() / (448 * 6)
    packed, blocks = quantize_nvfp4(weight, scale, pad_16x=False, hi_first=True)
    tensors[name], tensors[f"{name}_scale"] = packed, blocks
    tensors[f"{layer}.weight_scale_2"], tensors[f"{layer}.input_scale"] = scale.reshape(()), torch.tensor(0.01)
    return {"format": "nvfp4"}


def _fp8(spelling: str | None, dtype: torch.dtype) -> Callable[[Tensors, str], None]:
    def encode(tensors: Tensors, name: str) -> None:
        if spelling is None:
            tensors[name] = tensors[name].to(dtype)
            return
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(dtype)
        if spelling == "weight_scale" or not name.endswith(".weight"):
            tensors[f"{name}_scale"] = scale
        else:
            tensors[f"{name.removesuffix('.weight')}.{spelling}"] = scale

    return encode


def write_gguf(source: Path, target: Path, coarse: str = "Q6_K", fine: str = "Q8_0", flat: bool = False) -> Path:
    """`source` as GGUF with bare names, by the gguf package's writer: 2-D tensors of whole 256-blocks as `coarse` (a K format), of
    32-blocks as `fine`, all others in float32, bf16 or bytes. flat: as some converters do, matrices of another width than whole
    256-blocks are cut into rows of 256, and a key keeps their shape."""
    import gguf

    tensors, keys = read_all(source)
    writer = gguf.GGUFWriter(target, "ltxv")
    for key, value in keys.items():
        writer.add_string(key, value)
    kinds = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.diffusion_model.")
        quantise = tensor.ndim == 2 and tensor.dtype == torch.bfloat16
        if flat and quantise and tensor.shape[1] % 256 and tensor.numel() % 256 == 0:
            writer.add_array(f"comfy.gguf.orig_shape.{bare}", list(tensor.shape))
            tensor = tensor.reshape(-1, 256)
        if tensor.dtype == torch.uint8:
            writer.add_tensor(bare, tensor.view(torch.int8).numpy())
        elif quantise and tensor.shape[1] % 256 == 0 and coarse in K_ENCODERS:
            writer.add_tensor(bare, K_ENCODERS[coarse](tensor.float()).numpy(), raw_dtype=kinds[coarse])
        elif quantise and tensor.shape[1] % 32 == 0:
            writer.add_tensor(bare, gguf.quantize(tensor.float().numpy(), kinds[fine]), raw_dtype=kinds[fine])
        elif tensor.dtype == torch.bfloat16 and tensor.ndim > 1:
            writer.add_tensor(bare, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kinds.BF16)
        else:
            writer.add_tensor(bare, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _halves(x: torch.Tensor) -> torch.Tensor:
    return x.half().contiguous().view(torch.uint8)


def q6_k(weight: torch.Tensor) -> torch.Tensor:
    """(N, K) -> (N, K / 256 * 210) uint8: nearest values, no search for better scales."""
    x = weight.reshape(-1, 16, 16)
    sub = x.abs().amax(-1) / 31
    d = (sub.amax(-1, keepdim=True) / 127).half().float().clamp(min=1e-7)
    scale = (sub / d).round().clamp(1, 127)
    q = ((x / (d * scale).unsqueeze(-1)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)  # halves of four runs
    low, high = q & 15, q >> 4
    ql = torch.cat((low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)), -1).flatten(1)
    qh = (high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)).flatten(1)
    return torch.cat((ql, qh, scale.to(torch.int8).view(torch.uint8), _halves(d)), 1).view(len(weight), -1)


def _affine(weight: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Head (B, 16) and q (B, 8, 32) of q4_k and q5_k."""
    x = weight.reshape(-1, 8, 32)
    least = (-x.amin(-1)).clamp(min=0)
    step = (x.amax(-1) + least) / levels
    d, dmin = ((v.amax(-1, keepdim=True) / 63).half().float().clamp(min=1e-7) for v in (step, least))
    scale, offset = (step / d).round().clamp(1, 63).to(torch.uint8), (least / dmin).round().clamp(0, 63).to(torch.uint8)
    q = ((x + (dmin * offset).unsqueeze(-1)) / (d * scale).unsqueeze(-1)).round().clamp(0, levels).to(torch.uint8)
    first = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    second = offset[:, :4] | ((offset[:, 4:] >> 4) << 6)
    third = (scale[:, 4:] & 15) | ((offset[:, 4:] & 15) << 4)
    return torch.cat((_halves(d), _halves(dmin), first, second, third), 1), q


def q4_k(weight: torch.Tensor) -> torch.Tensor:
    head, q = _affine(weight, 15)
    return torch.cat((head, (q[:, 0::2] | (q[:, 1::2] << 4)).flatten(1)), 1).view(len(weight), -1)


def q5_k(weight: torch.Tensor) -> torch.Tensor:
    head, q = _affine(weight, 31)
    fifth = sum((q[:, j] >> 4) << j for j in range(8)).to(torch.uint8)
    low = q & 15
    return torch.cat((head, fifth, (low[:, 0::2] | (low[:, 1::2] << 4)).flatten(1)), 1).view(len(weight), -1)


K_ENCODERS = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
