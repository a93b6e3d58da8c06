"""The video VAE's layout from tensor names and shapes alone, for files that lost their metadata.

Widths, depths, strides and patch size follow from the shapes; windows, time scale, steps and prediction type do not and
are those of the published 2.5 file. Shapes that allow two readings are an error.
"""

from __future__ import annotations

import re
from math import isqrt

from ..checkpoint.header import Header
from ..errors import FileError
from .video_layout import Block, ConvDecoderConfig, DiffusionDecoderConfig, EncoderConfig, Resample, ResStack

_STRIDE_OF = {2: (2, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2)}  # by the number of cells merged into one
_PUBLISHED_KERNELS = ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11))


def encoder_from_shapes(header: Header, prefix: str) -> EncoderConfig:
    """Read the encoder's blocks off `{prefix}encoder.down_blocks.*`."""
    shapes = _Shapes(header, f"{prefix}encoder.")
    width, patched = shapes["conv_in.conv.weight"][:2]
    blocks: list[Block] = []
    for index in range(shapes.count("down_blocks.")):
        lead = f"down_blocks.{index}."
        if shapes.has(f"{lead}conv.conv.weight"):
            made, taken = shapes[f"{lead}conv.conv.weight"][:2]
            after = shapes[f"down_blocks.{index + 1}.res_blocks.0.conv1.conv.weight"][1]
            blocks.append(Resample(shapes.stride(after, made, lead), shapes.ratio(after, taken, lead)))
        else:
            blocks.append(ResStack(shapes.count(f"{lead}res_blocks.")))
    return EncoderConfig(
        latent_channels=shapes["conv_out.conv.weight"][0] - 1, width=width, patch=shapes.patch(patched), blocks=tuple(blocks)
    )


def conv_decoder_from_shapes(header: Header, prefix: str) -> ConvDecoderConfig:
    """Read the decoder's blocks off `{prefix}decoder.up_blocks.*`."""
    shapes = _Shapes(header, f"{prefix}decoder.")
    blocks: list[Block] = []
    for index in range(shapes.count("up_blocks.")):
        lead = f"up_blocks.{index}."
        if shapes.has(f"{lead}conv.conv.weight"):
            made, taken = shapes[f"{lead}conv.conv.weight"][:2]
            after = shapes[f"up_blocks.{index + 1}.res_blocks.0.conv1.conv.weight"][1]
            blocks.append(Resample(shapes.stride(made, after, lead), shapes.ratio(taken, after, lead)))
        else:
            blocks.append(ResStack(shapes.count(f"{lead}res_blocks.")))
    patched, width = shapes["conv_out.conv.weight"][:2]
    return ConvDecoderConfig(
        latent_channels=shapes["conv_in.conv.weight"][1], width=width, patch=shapes.patch(patched), blocks=tuple(blocks)
    )


def diffusion_decoder_from_shapes(header: Header, prefix: str) -> DiffusionDecoderConfig:
    """Read stages and upsamples off `{prefix}decoder.*`; windows and sampling are the published ones."""
    shapes = _Shapes(header, f"{prefix}decoder.")
    stages = shapes.count("det_stages.")
    if stages + 1 != len(_PUBLISHED_KERNELS):
        raise FileError(f"{header.name} has {stages} context stages, and without metadata only 4 are known; use the published file.")
    channels = [shapes[f"det_stages.{stage}.0.norm1.weight"][0] for stage in range(stages)] + [shapes["norm_out.weight"][0]]
    upsamples = []
    for stage in range(stages):
        made, lead = shapes[f"upsamples.{stage}.proj.weight"][0], f"upsamples.{stage}."
        upsamples.append(
            Resample(shapes.stride(made, channels[stage + 1], lead), shapes.ratio(channels[stage], channels[stage + 1], lead))
        )
    return DiffusionDecoderConfig(
        latent_channels=shapes["conv_in.weight"][1],
        patch=shapes.patch(shapes["conv_in_x_t.weight"][1]),
        head_dim=shapes["diff_blocks.0.attn.q_norm.weight"][0],
        channels=tuple(channels),
        depths=(*(shapes.count(f"det_stages.{stage}.") for stage in range(stages)), shapes.count("diff_blocks.")),
        kernels=_PUBLISHED_KERNELS,
        upsamples=tuple(upsamples),
        time_width=shapes["t_embedder.mlp.0.weight"][0],
        time_scale=1000.0,
        steps=1,
        output="x0",
        gates=shapes.has("diff_blocks.0.gate_msa"),
    )


class _Shapes:
    """Shapes of the tensors below a prefix, and the arithmetic that turns them into strides."""

    def __init__(self, header: Header, prefix: str) -> None:
        self._file = header.name
        self._prefix = prefix
        self._shapes = {name[len(prefix) :]: info.shape for name, info in header.tensors.items() if name.startswith(prefix)}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise FileError(f"{self._file} has neither metadata nor {self._prefix}{name}; download the published file again.")
        return self._shapes[name]

    def has(self, name: str) -> bool:
        return name in self._shapes

    def count(self, lead: str) -> int:
        """How many children `lead`0, `lead`1, ... there are."""
        found = {int(match[1]) for name in self._shapes if (match := re.match(re.escape(lead) + r"(\d+)\.", name))}
        return len(found)

    def stride(self, many: int, few: int, lead: str) -> tuple[int, int, int]:
        cells = self.ratio(many, few, lead)
        if cells not in _STRIDE_OF:
            raise self._ambiguous(lead)
        return _STRIDE_OF[cells]

    def ratio(self, many: int, few: int, lead: str) -> int:
        if few < 1 or many % few:
            raise self._ambiguous(lead)
        return many // few

    def patch(self, channels: int) -> int:
        side = isqrt(channels // 3)
        if 3 * side * side != channels:
            raise self._ambiguous("conv_in/conv_out")
        return side

    def _ambiguous(self, name: str) -> FileError:
        return FileError(f"{self._file} has no metadata and the shapes of {self._prefix}{name} fit no known layout; use the published file.")
