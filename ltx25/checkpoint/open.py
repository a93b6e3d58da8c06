"""A checkpoint file of any storage, opened: its header in terms of weights, however the file keeps them.

Quantised tensors appear once, under the weight's own name, with the shape of what they stand for; their scales and marks
are gone from the list. So whoever reads a header (which part is it, how wide, is all there) needs to know no format.
How a file tells that a weight is quantised:

* a tensor `X.comfy_quant`, JSON in bytes, per layer; or the metadata key `_quantization_metadata` with the same per layer
  (where both speak of a layer, the tensor counts);
* nothing but the three tensors of nvfp4: `X.weight` U8, `X.weight_scale` F8_E4M3, `X.weight_scale_2`;
* an fp8 dtype, with a scale of one of three spellings for every matrix of the file, or with none for any.

What is marked as something else, or only in part, is refused by name: it would load and render noise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import FileError
from ..formats import Format, Fp8, Int8, Nvfp4
from ..formats.nvfp4 import BLOCK, scale_shape
from .gguf import is_gguf, read_gguf
from .header import Header, Stored, TensorInfo, read_header
from .read import read_bytes

SHARD = re.compile(r"-(\d{3,})-of-(\d{3,})\.\w+$")  # how savers that split models name the pieces
MARK = ".comfy_quant"
METADATA = "_quantization_metadata"
SCALED = "scaled_fp8"  # a tensor of this name, after the file's prefix: an older mark that all fp8 matrices of the file have scales
FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
READABLE = "bf16, int8 (with or without ConvRot), nvfp4, fp8 and GGUF files are read"
# What stands beside a quantised weight. One of these that belongs to no weight means a format that was not understood.
_COMPANIONS = (".comfy_quant", ".weight_scale", ".weight_scale_2", ".input_scale", ".scale_weight", ".scale_input", ".pre_quant_scale")
# Fields of a mark. The last three do not change what the weight stands for.
_FIELDS = {"format", "convrot", "convrot_groupsize", "params", "full_precision_matrix_mult", "orig_dtype", "orig_shape"}
_LOGICAL = torch.bfloat16


def open_file(path: str | Path) -> Header:
    """The header of a safetensors or GGUF file. Reads no weights, of safetensors files the few bytes of the marks.

    Raises FileError for what `read_header` refuses, for a piece of a split model, and for quantised tensors of a form that is not known through and through.
    """
    piece = SHARD.search(Path(path).name)
    if piece is not None and int(piece[2]) > 1:
        raise FileError(
            f"{Path(path).name} is piece {int(piece[1])} of the {int(piece[2])} that a model was split into, and a file that holds all of it is wanted; "
            "use one from huggingface.co/Lightricks/LTX-2.5, or join the pieces."
        )
    return read_gguf(path) if is_gguf(path) else interpret(read_header(path))


def interpret(header: Header) -> Header:
    """`header` with quantised tensors as what they stand for."""
    found = _Found(header)
    for layer, mark in _marks(header).items():
        found.marked(layer, mark)
    for name, info in header.tensors.items():
        found.unmarked(name, info)
    return found.header()


class _Found:
    """Quantised weights found so far, and the tensors they use up."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._tensors = header.tensors
        self._stored: dict[str, Stored] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()

    def header(self) -> Header:
        """Raises FileError for a scale or mark that belongs to no quantised weight, and for an fp8 weight that lost its scale."""
        tensors = {}
        self._check_scaled()
        for name, info in self._tensors.items():
            if name in self._stored:
                tensors[name] = replace(info, dtype=_LOGICAL, shape=self._shapes[name])
            elif name in self._used or _leaf(name) == SCALED:
                continue
            elif name.endswith(_COMPANIONS):
                raise self._error(name, "belongs to a quantised weight, and there is none beside it that it fits")
            else:
                tensors[name] = info
        return replace(self._header, tensors=tensors, stored=self._stored)

    def marked(self, layer: str, mark: Mapping[str, Any]) -> None:
        """A layer with a mark: it must be just what the mark says."""
        name, kind = f"{layer}.weight", mark.get("format")
        if name not in self._tensors:
            raise self._error(name, f"is marked as '{kind}' and is not in the file")
        unknown = sorted(mark.keys() - _FIELDS)
        if kind == "int8_tensorwise" and not unknown:
            self._int8(layer, mark)
        elif kind in FP8 and not unknown:
            if self._tensors[name].dtype is not FP8[kind]:
                raise self._error(name, f"is marked as '{kind}' and stored as {self._tensors[name].dtype}")
            self._fp8(name)
            if "scale" not in self._stored[name].parts:
                raise self._lost_scale(name, f"is marked as '{kind}'")
        elif kind == "nvfp4" and not unknown:
            self._nvfp4(layer)
        elif unknown and kind in ("int8_tensorwise", "nvfp4", *FP8):
            raise self._error(name, f"is marked as '{kind}' with {', '.join(unknown)}, which this version does not know")
        else:
            raise self._error(name, f"is stored as '{kind}', which is not supported")
        self._used.add(layer + MARK)

    def unmarked(self, name: str, info: TensorInfo) -> None:
        """A tensor whose dtype, or what stands beside it, tells that it is quantised."""
        if name in self._stored or name in self._used:
            return
        layer = name.removesuffix(".weight")
        if info.dtype is torch.uint8 and layer != name and f"{layer}.weight_scale_2" in self._tensors:
            self._nvfp4(layer)
        elif info.dtype in FP8.values() and not name.endswith(_COMPANIONS) and _leaf(name) != SCALED:
            self._fp8(name)
        elif info.dtype in (torch.int8, torch.uint8, torch.float8_e8m0fnu) and layer != name and len(info.shape) > 1:
            raise self._error(name, f"is stored as {str(info.dtype).removeprefix('torch.')} with no mark that tells its format")

    def _int8(self, layer: str, mark: Mapping[str, Any]) -> None:
        name = f"{layer}.weight"
        info, scale = self._tensors[name], self._part(f"{layer}.weight_scale", torch.float32, name)
        rows, columns = self._matrix(name, info, torch.int8)
        if scale.shape not in ((), (1,), (rows,), (rows, 1), (1, 1)):
            raise self._error(scale.name, f"has shape {list(scale.shape)}, and a weight of {rows} rows needs one scale or one a row")
        group = None
        turned = mark.get("convrot", False)
        if type(turned) is not bool:
            raise self._error(name, f"is marked with convrot {turned!r}, wanted true or false")
        if turned:
            group = mark.get("convrot_groupsize", 256)
            if type(group) is not int or group < 4 or group & (group - 1) or group.bit_length() % 2 == 0 or columns % group:
                raise self._error(name, f"is turned in groups of {group!r}, wanted a power of 4 that divides its {columns} columns")
        self._keep(name, (rows, columns), Int8(group), {"weight": info, "scale": scale})

    def _nvfp4(self, layer: str) -> None:
        name = f"{layer}.weight"
        info = self._tensors[name]
        rows, half = self._matrix(name, info, torch.uint8)
        blocks = self._part(f"{layer}.weight_scale", torch.float8_e4m3fn, name)
        scale = self._part(f"{layer}.weight_scale_2", torch.float32, name)
        padded = scale_shape(rows, 2 * half)
        if 2 * half % BLOCK or blocks.numel != padded[0] * padded[1] or scale.numel != 1:
            raise self._error(name, f"of shape {list(info.shape)} does not fit block scales {list(blocks.shape)} and {scale.numel} tensor scales of nvfp4")
        if f"{layer}.pre_quant_scale" in self._tensors:
            raise self._error(f"{layer}.pre_quant_scale", "scales the layer's input, which is not supported")
        parts = {"weight": info, "scale": blocks, "scale_2": scale}
        inputs = self._tensors.get(f"{layer}.input_scale")
        if inputs is not None and inputs.dtype is torch.float32 and inputs.numel == 1:
            parts["input_scale"] = inputs
        self._keep(name, (rows, 2 * half), Nvfp4(), parts)

    def _fp8(self, name: str) -> None:
        info, layer = self._tensors[name], name.removesuffix(".weight")
        parts = {"weight": info}
        spellings = [f"{name}_scale", *([f"{layer}.scale_weight"] if layer != name else [])]
        found = [spelling for spelling in spellings if spelling in self._tensors]
        if len(found) > 1:
            raise self._error(found[0], f"and {found[1]} both claim to scale one weight")
        if found:
            scale = self._tensors[found[0]]
            rows = info.shape[0] if info.shape else 1
            if not scale.dtype.is_floating_point or scale.dtype.itemsize == 1 or (scale.numel != 1 and scale.shape not in ((rows,), (rows, 1))):
                raise self._error(scale.name, f"is {scale.dtype} of shape {list(scale.shape)}, wanted one number or one for each of {rows} rows")
            parts["scale"] = scale
            self._used.add(scale.name)
        self._keep(name, info.shape, Fp8(), parts)

    def _check_scaled(self) -> None:
        """One fp8 matrix without a scale in a file of scaled ones lost it: taken as it is, its layer is hundreds of times too strong.

        Files that keep some layers in 16 bits, or cast vectors (norms, biases) without a scale, are fine.
        """
        fp8 = [name for name, stored in self._stored.items() if isinstance(stored.format, Fp8) and len(self._shapes[name]) == 2]
        scaled = [name for name in fp8 if "scale" in self._stored[name].parts]
        marks = [name for name in self._tensors if _leaf(name) == SCALED]
        for name in fp8 if scaled or marks else ():
            if "scale" not in self._stored[name].parts:
                raise self._lost_scale(name, f"is one of the fp8 weights that {marks[0]} marks as scaled" if marks else f"is fp8 like {scaled[0]}, which has a scale")

    def _keep(self, name: str, shape: tuple[int, ...], format: Format, parts: Mapping[str, TensorInfo]) -> None:
        layer = name.removesuffix(".weight")
        self._stored[name], self._shapes[name] = Stored(format, parts), shape
        self._used |= {part.name for role, part in parts.items() if role != "weight"}
        self._used |= {f"{layer}.input_scale", f"{layer}.scale_input"}  # how activations were calibrated: not the weight's

    def _part(self, name: str, dtype: torch.dtype, weight: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise self._error(weight, f"is quantised, and its {name} is not in the file")
        if info.dtype is not dtype:
            raise self._error(name, f"is stored as {info.dtype}, wanted {dtype}")
        return info

    def _matrix(self, name: str, info: TensorInfo, dtype: torch.dtype) -> tuple[int, int]:
        if info.dtype is not dtype or len(info.shape) != 2:
            raise self._error(name, f"is {info.dtype} of shape {list(info.shape)}, and its mark asks for a matrix of {dtype}")
        return info.shape[0], info.shape[1]

    def _lost_scale(self, name: str, why: str) -> FileError:
        return FileError(f"{self._header.name}: {name} {why}, and its own {name}_scale is not in the file: it would render noise; download the file again, or use another one.")

    def _error(self, name: str, what: str) -> FileError:
        return FileError(f"{self._header.name}: {name} {what}; {READABLE}.")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _marks(header: Header) -> dict[str, dict[str, Any]]:
    """Layer -> its mark, fields of `params` beside the others."""
    raw: dict[str, Any] = {}
    if METADATA in header.metadata:
        listed = header.metadata_json(METADATA)
        layers = listed.get("layers") if isinstance(listed, dict) else None
        if not isinstance(layers, dict):
            raise FileError(f"{header.name}: metadata key '{METADATA}' has no table of layers; {READABLE}.")
        raw.update(layers)
    for name in header.tensors:
        if name.endswith(MARK):
            try:
                raw[name.removesuffix(MARK)] = json.loads(read_bytes(header, name))
            except (ValueError, RecursionError):
                raise FileError(f"{header.name}: {name} is not JSON; download it again.") from None
    marks = {}
    for layer, mark in raw.items():
        nested = mark.get("params", {}) if isinstance(mark, dict) else None
        if not isinstance(nested, dict):
            raise FileError(f"{header.name}: the mark of {layer} is not a JSON object; {READABLE}.")
        marks[layer] = {**nested, **mark}
        if not isinstance(marks[layer].get("format"), str):
            raise FileError(f"{header.name}: the mark of {layer} has {str(mark.get('format'))[:80]} for a format, wanted a name like 'int8_tensorwise'; {READABLE}.")
    return marks
