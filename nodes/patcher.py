"""The engine's parts as ComfyUI models: the host knows their sizes, makes room for them and may take the room back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import comfy.latent_formats
import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher

from ..ltx25.instrument import Watch
from ..ltx25.residency import Part


class HostArbiter:
    """An engine's arbiter inside ComfyUI: every part enters and leaves the device through the host's own list."""

    def __init__(self, parts: Sequence[Part], freed: Callable[[], None]) -> None:
        """`freed()` is called when the host takes the last loaded part off the device outside of our own phases."""
        self.patchers = {part.name: PartPatcher(part, self) for part in parts}
        self._freed = freed
        self._loading = False

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        """Load `parts`; the host evicts others until `activation_bytes` of working memory are free beside them."""
        wanted = [self._patcher(part) for part in parts]
        for patcher in wanted:
            patcher.watch = watch
        self._loading = True
        try:
            mm.load_models_gpu(wanted, memory_required=activation_bytes, force_full_load=True)
        except BaseException:
            # The host takes models off its list while it loads: what stayed behind unlisted could never be evicted.
            listed = mm.loaded_models()
            for patcher in wanted:
                if patcher not in listed:
                    patcher.detach()
            raise
        finally:
            self._loading = False
            for patcher in wanted:
                patcher.watch = None

    def _patcher(self, part: Part) -> PartPatcher:
        """Optional parts are opened long after the others, and a file that changed gives a new part of the same name."""
        if part.name not in self.patchers or self.patchers[part.name].part is not part:
            self.patchers[part.name] = PartPatcher(part, self)
        return self.patchers[part.name]

    def unloaded(self) -> None:
        """A part left the device."""
        if not self._loading and not any(patcher.loaded_size() for patcher in self.patchers.values()):
            self._freed()


class LTX25Weights:
    """What the host sees as the model behind a patcher; its class name stands in the host's log."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.device = part.device
        self.latent_format = comfy.latent_formats.LTXAV()

    def process_latent_out(self, latent: Any) -> Any:
        """Our latents are the host's already: normalised, per channel."""
        return latent


class PartPatcher(ModelPatcher):
    """One part. It is on the device as a whole or not at all, and only our own phases bring it there."""

    def __init__(self, part: Part, arbiter: HostArbiter) -> None:
        super().__init__(LTX25Weights(part), part.device, mm.unet_offload_device(), size=part.bytes)
        self.part = part
        self.watch: Watch | None = None
        self._arbiter = weakref.ref(arbiter)  # a cycle would keep weights until the next garbage collection

    def loaded_size(self) -> int:
        return self.part.bytes if self.part.loaded else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.part.loaded else self.offload_device

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        if self.part.loaded or self.watch is None:
            return 0
        self.part.load(self.watch)
        return self.part.bytes

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        return 0  # less than was asked for: the host then detaches the whole part and takes it off its list

    def detach(self, unpatch_all=True):
        # The host also calls this, with False, on models it is about to list anew: those weights stay.
        if unpatch_all and self.part.loaded:
            self.part.unload()
            arbiter = self._arbiter()
            if arbiter is not None:
                arbiter.unloaded()
        return self.model
