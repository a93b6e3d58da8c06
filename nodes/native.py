"""Our guider under the native SamplerCustomAdvanced: the host's SAMPLER objects drive our engine call by call.

The engine plans all calls of a run before the first one. A native sampler does not say which calls it will make, so it is
run once on a few zeros, with a model that only writes down the noise levels it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import comfy.model_sampling
import comfy.utils
import torch
from comfy.nested_tensor import NestedTensor

from ..ltx25.dit.patchify import patchify_audio, patchify_video, unpatchify_audio, unpatchify_video
from ..ltx25.errors import InputError
from ..ltx25.predictor import Call, Draw, Predictor, Tokens
from .bridge import streams

Shapes = dict[str, torch.Size]  # by stream name, of latent grids


class NativeSampler:
    """A host SAMPLER as a sampler of the engine. Noise, latent and callback are those SamplerCustomAdvanced hands over."""

    uncond = False
    standard_noise = False
    unscaled = False

    def __init__(
        self,
        sampler: Any,
        noise: Any,
        latent: Any,
        sigmas: torch.Tensor,
        seed: int | None,
        step_done: Callable[[Any, Any], None],
    ) -> None:
        """`step_done(x0, x)` is called after each step with LATENT samples."""
        self._sampler, self._sigmas, self._seed, self._step_done = sampler, sigmas.float().cpu(), seed, step_done
        self._noise, self._latent = _named(noise), _named(latent)
        self._shapes: Shapes = {name: grid.shape for name, grid in self._latent.items()}

    def calls(self, sigmas: Sequence[float]) -> tuple[Call, ...]:
        asked: list[float] = []

        def write_down(x: torch.Tensor, sigma: float) -> torch.Tensor:
            asked.append(sigma)
            return torch.zeros_like(x)

        few = torch.zeros(1, 1, 4)
        self._sample(write_down, few, few, None)
        return tuple(Call(sigma, step, (step, sigma)) for sigma, step in ((s, _step_of(s, sigmas)) for s in asked))

    def run(self, predict: Predictor, x: Tokens, sigmas: Sequence[float], draw: Draw) -> Tokens:
        device = next(iter(x.values())).device
        planned = iter(self.calls(sigmas))

        def model(flat: torch.Tensor, sigma: float) -> torch.Tensor:
            call = next(planned, None)
            if call is None or abs(call.sigma - sigma) > 1e-5:
                raise InputError("This sampler chooses its noise levels while it runs; use one with fixed steps, such as euler.")
            return self._flat(predict(predict.blend(self._tokens(flat))).x0)

        noise, latent = (_pack(grids).to(device, torch.float32) for grids in (self._noise, self._latent))
        return self._tokens(self._sample(model, noise, latent, lambda _, x0, x, __: self._step_done(self._samples(x0), self._samples(x))))

    def _sample(self, model: Callable, noise: torch.Tensor, latent: torch.Tensor, callback: Callable | None) -> torch.Tensor:
        wrap = _ModelWrap(model)
        extra = {"model_options": {"transformer_options": {"sample_sigmas": self._sigmas}}, "seed": self._seed}
        return self._sampler.sample(wrap, self._sigmas.to(noise.device), extra, callback, noise, latent, None, True)

    def _grids(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = comfy.utils.unpack_latents(flat, list(self._shapes.values())) if len(self._shapes) > 1 else [flat]
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _samples(self, flat: torch.Tensor) -> Any:
        grids = list(self._grids(flat).values())
        return NestedTensor(grids) if len(grids) > 1 else grids[0]

    def _tokens(self, flat: torch.Tensor) -> Tokens:
        return {name: (patchify_video if name == "video" else patchify_audio)(grid) for name, grid in self._grids(flat).items()}

    def _flat(self, tokens: Tokens) -> torch.Tensor:
        return _pack(
            {
                name: unpatchify_video(tokens[name], tuple(shape[2:])) if name == "video" else unpatchify_audio(tokens[name], shape[3])
                for name, shape in self._shapes.items()
            }
        )


class _ModelWrap:
    """What host samplers ask of the model they are given."""

    cfg = 1.0

    def __init__(self, model: Callable) -> None:
        self._model = model
        self.inner_model = SimpleNamespace(model_sampling=_FlowSampling())
        self.model_patcher = SimpleNamespace(model=self.inner_model, get_model_object=lambda name: getattr(self.inner_model, name))

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, model_options: dict | None = None, **_: Any) -> torch.Tensor:
        if (model_options or {}).get("sampler_post_cfg_function"):
            raise InputError("Native CFG++ samplers look into the host's own guidance; use LTX-2.5 Sampler with one of its samplers.")
        return self._model(x, float(sigma.flatten()[0]))


class _FlowSampling(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
    """x = sigma noise + (1 - sigma) x0, sigma in (0, 1]."""


def _step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """The step that a call at `sigma` belongs to: the last one that starts at or above it."""
    return max((step for step, start in enumerate(sigmas[:-1]) if start >= sigma - 1e-6), default=0)


def _named(samples: Any) -> dict[str, torch.Tensor]:
    return {name: grid for name, grid in zip(("video", "audio"), streams(samples), strict=True) if grid is not None}


def _pack(grids: dict[str, torch.Tensor]) -> torch.Tensor:
    return comfy.utils.pack_latents(list(grids.values()))[0]
