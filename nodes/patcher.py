"""The engine's parts as ComfyUI models: the host knows their sizes, makes room for them and may take the room back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import comfy.latent_formats
import comfy.model_management as mm
import torch
from comfy.model_patcher import ModelPatcher

from ..ltx25.host_spare import ask_host_spare
from ..ltx25.instrument import Watch
from ..ltx25.residency import Part, evict, make_host_room

# Bytes that come after weights were parked and before the host looks: a clip's frames as IMAGE, 15 s of 768 x 512.
OUTPUTS = 2 << 30


class HostArbiter:
    """An engine's arbiter inside ComfyUI: every part enters and leaves the device through the host's own list."""

    def __init__(self, parts: Sequence[Part], freed: Callable[[], None], phase: Callable[[], None]) -> None:
        """`freed()` is called when the host takes the last loaded part off the device outside of our own phases, `phase()`
        before one of ours makes room.
        """
        self.patchers = {part.name: PartPatcher(part, self) for part in parts}
        self._freed = freed
        self._phase = phase
        self.loading = False  # a phase of ours is bringing parts to the device
        self.activation = 0  # bytes the last phase asked for beside its parts
        ask_host_spare(cache_headroom)

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        """Load `parts`; the host evicts others until `activation_bytes` of working memory are free beside them."""
        self._phase()
        wanted = [self._patcher(part) for part in parts]
        self._make_room_on_cpu(wanted, activation_bytes)
        make_host_room(parts, [patcher.part for patcher in self.patchers.values()])
        for patcher in wanted:
            patcher.watch = watch
        self.loading, self.activation = True, activation_bytes
        try:
            mm.load_models_gpu(wanted, memory_required=activation_bytes, force_full_load=True)
        except BaseException:
            # The host takes models off its list while it loads: what stayed behind unlisted could never be evicted.
            listed = mm.loaded_models()
            for patcher in wanted:
                if patcher not in listed:
                    patcher.part.unload()
            raise
        finally:
            self.loading = False
            for patcher in wanted:
                patcher.watch = None

    def free(self, device: torch.device) -> int:
        """Bytes a phase may take now; --reserve-vram is not ours."""
        return max(0, int(mm.get_free_memory(device) - mm.extra_reserved_memory()))

    def room(self, device: torch.device) -> int:
        """Bytes a phase could have if all the host's models left."""
        models = (loaded.model for loaded in mm.current_loaded_models if loaded.device == device)
        return self.free(device) + sum(model.loaded_size() for model in models if model is not None)

    def _make_room_on_cpu(self, wanted: Sequence[PartPatcher], activation_bytes: int) -> None:
        """The host evicts nothing from host memory."""
        device = wanted[0].load_device
        if device.type != "cpu":
            return
        missing = activation_bytes + sum(patcher.part.wanted - patcher.loaded_size() for patcher in wanted)
        for patcher in sorted(self.patchers.values(), key=PartPatcher.loaded_size, reverse=True):
            if patcher not in wanted and mm.get_free_memory(device) < missing:
                patcher.part.unload()

    def _patcher(self, part: Part) -> PartPatcher:
        """Optional parts are opened long after the others, and a file that changed gives a new part of the same name."""
        if part.name not in self.patchers or self.patchers[part.name].part is not part:
            self.patchers[part.name] = PartPatcher(part, self)
        return self.patchers[part.name]

    def unloaded(self) -> None:
        """The host took a part off the device for itself: host memory of those that left before goes as well."""
        for patcher in self.patchers.values():
            if patcher.part.rests:
                patcher.part.unload()
        if not any(patcher.loaded_size() for patcher in self.patchers.values()):
            self._freed()


def cache_headroom() -> int:
    """Bytes of host memory that parked weights must leave, so that the host forgets no outputs of nodes for them; 0: it asks for none.

    Its default cache wants a tenth of the memory free after every node, 10 GB at most, and drops the largest outputs first: the
    next prompt would sample the same clip again.
    """
    headroom = getattr(sys.modules.get("comfy.memory_management"), "RAM_CACHE_HEADROOM", 0)  # of the prompt that runs; not every host has it
    return headroom + OUTPUTS if headroom else 0


class LTX25Weights:
    """What the host sees as the model behind a patcher; its class name stands in the host's log."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.device = part.device
        self.latent_format = comfy.latent_formats.LTXAV()

    def process_latent_out(self, latent: Any) -> Any:
        """Our latents are the host's already: normalised, per channel."""
        return latent

    def state_dict(self) -> dict[str, torch.Tensor]:
        """No weights that others could look at or patch: patches made for any name count as not loaded."""
        return {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the LTX-2.5 engine has no {name} for other nodes, it samples by itself; connect a native model to nodes that change how a model samples.",
            name=name,
            obj=self,
        )


class PartPatcher(ModelPatcher):
    """One part. Only our own phases bring it to the device; the host may take it back whole or in blocks."""

    def __init__(self, part: Part, arbiter: HostArbiter) -> None:
        super().__init__(LTX25Weights(part), part.device, mm.unet_offload_device(), size=part.wanted)
        self.part = part
        self.watch: Watch | None = None
        self._arbiter = weakref.ref(arbiter)  # a cycle would keep weights until the next garbage collection

    def model_size(self) -> int:
        """What it holds, where it streams and could not be whole: then nobody has to leave for it at every phase."""
        arbiter = self._arbiter()
        if self.part.streams and arbiter is not None and arbiter.room(self.load_device) < self.part.wanted + arbiter.activation:
            return self.part.held
        return self.part.wanted

    def loaded_size(self) -> int:
        return self.part.held

    def clone(self, *_, **__) -> PartPatcher:
        """Itself. What others set on a copy, the engine would not read; and one that the host lists in this one's place would take
        the weights off the host's list when it goes."""
        return self

    def patch_model(self, *_, **__) -> LTX25Weights:
        """Nothing to do, as for `unpatch_model`: LoRAs are the engine's own, and only our phases load."""
        return self.model

    def unpatch_model(self, *_, **__) -> None:
        pass

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.part.held else self.offload_device

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        """As much as fits beside the working memory of the phase; the host's own number knows nothing of it."""
        arbiter = self._arbiter()
        if self.watch is None or arbiter is None:
            return 0
        before = self.part.held
        self.part.load(self.watch, arbiter.free(self.load_device) + before - arbiter.activation)
        return self.part.held - before

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Whole blocks, at least as much as is asked for; 0 where that cannot be: the host then detaches the whole part."""
        return self.part.shrink(int(memory_to_free))

    def detach(self, unpatch_all=True):
        # The host also calls this, with False, on models it is about to list anew: those weights stay.
        if unpatch_all and self.part.held:
            arbiter = self._arbiter()
            if arbiter is not None and arbiter.loading:  # for another part of ours, which will want it back
                evict(self.part)
                return self.model
            self.part.unload()
            if arbiter is not None:
                arbiter.unloaded()
        return self.model
