"""The fp8 product: rows in e4m3 with a scale each, on both sides, summed in float32."""

from __future__ import annotations

import torch

from .dispatch import Op
from .quantise import Quantised, quantise_reference

# Hopper's tensor cores add e4m3 products in fewer bits than float32 unless told not to.
FAST_SUMS = False


def fp8_linear_reference(x: Quantised, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x (R, T, D), weight (1, E, D), bias (E,) or None: (R, T, E) in `dtype`. Multiplied as what the values stand for."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = x.values.to(wide) @ weight.values[0].to(wide).t()
    y = y * x.scale.to(wide) * weight.scale[0].to(wide).t()
    return (y if bias is None else y + bias.to(wide)).to(dtype)


def supported(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 with a scale per row. AMD's cards count in another e4m3."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def fits(weight: Quantised) -> bool:
    """Whether a card's product takes the shape of `weight` (1, E, D): widths of 16, as the published model's all are."""
    return weight.shape[1] % 16 == 0 and weight.shape[2] % 16 == 0


def _launch(x: Quantised, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    product = torch._scaled_mm(
        x.values.flatten(0, -2),
        weight.values[0].t(),
        scale_a=x.scale.flatten(0, -2),
        scale_b=weight.scale[0].t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=FAST_SUMS,
    )
    return product.unflatten(0, x.shape[:-1])


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (quantise_reference(torch.randn(1, rows, 256, generator=generator)) for rows in (48, 160))
    bias = torch.randn(160, generator=generator).to(dtype)

    def moved(q: Quantised) -> Quantised:
        return Quantised(q.values.to(device), q.scale.to(device))

    return [
        (
            _launch(moved(x), moved(weight), None if b is None else b.to(device), dtype),
            fp8_linear_reference(x, weight, b, dtype),
            fp8_linear_reference(x, weight, None if b is None else b.double(), torch.float64),
        )
        for b in (bias, None)
    ]


_OP = Op("fp8_linear", _check)


def fp8_linear(x: Quantised, weight: Quantised, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """See `fp8_linear_reference`; the result has the dtype of `like`, a tensor on the same device."""
    on_card = supported(like.device) and fits(weight) and _OP.runs(like)
    return (_launch if on_card else fp8_linear_reference)(x, weight, bias, like.dtype)
