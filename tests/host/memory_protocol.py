"""Run by test_memory.py with the host's Python: the host's real memory manager, our patchers, and a pretended card.

Prints one JSON object. The parts are stand-ins that allocate nothing: what is tested is who is asked to leave, and when.
"""

import importlib.util
import json
import sys
import types
import weakref
from pathlib import Path

comfyui, pack = sys.argv[1:3]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.memory_management as ram  # noqa: E402
import comfy.model_management as mm  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfy.nested_tensor import NestedTensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

GB = 1 << 30
CARD = torch.device("cuda", 0)
TOTAL = 80 * GB
ALLOCATED = weakref.WeakSet()  # all that may hold memory of the card

spec = importlib.util.spec_from_file_location("pack", Path(pack) / "__init__.py")
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
nodes = types.ModuleType("pack.nodes")  # the package without its node list, which needs a running server
nodes.__path__ = [str(Path(pack) / "nodes")]
sys.modules["pack.nodes"] = nodes
from pack.ltx25.host_spare import host_spare  # noqa: E402
from pack.nodes import bridge  # noqa: E402
from pack.nodes.patcher import HostArbiter  # noqa: E402


class Part:
    """A part of the engine that only says what it would hold. `blocks` of it, 1 GB each, may be elsewhere."""

    def __init__(self, name, gigabytes, blocks=0):
        self.name, self.wanted, self.blocks, self.device, self.fail = name, gigabytes * GB, blocks, CARD, None
        self.bytes, self.held, self.loaded, self.rests = self.wanted, 0, False, False
        ALLOCATED.add(self)

    @property
    def streams(self):
        return self.loaded and self.held < self.wanted

    def load(self, watch, budget):
        if self.fail is not None:
            raise self.fail
        if self.loaded and not (self.streams and budget >= self.wanted):
            return
        self.held = self.wanted if budget >= self.wanted else max(self.wanted - self.blocks * GB, budget // GB * GB)
        self.loaded, self.rests = True, False

    def shrink(self, size):
        freed = -(-size // GB) * GB
        if self.held - freed < self.wanted - self.blocks * GB:
            return 0
        self.held, self.loaded = self.held - freed, False
        return freed

    def unload(self):
        self.held, self.loaded, self.rests = 0, False, False

    def rest(self):
        parked = self.streams
        self.unload()
        self.rests = parked


class Model:
    device = None


class Native(ModelPatcher):
    """A native model of `gigabytes`, loaded whole."""

    def __init__(self, gigabytes):
        super().__init__(Model(), CARD, torch.device("cpu"), size=gigabytes * GB)
        self.held = 0
        ALLOCATED.add(self)

    def loaded_size(self):
        return self.held

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        self.held = self.size
        return self.size

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        return 0

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.held = 0


def free(device=None, torch_free_too=False):
    left = TOTAL - sum(model.held for model in ALLOCATED)
    return (left, left) if torch_free_too else left


mm.get_free_memory = free
mm.soft_empty_cache = lambda *_, **__: None

told = []
text, connectors, dit, vae = parts = [Part("text encoder", 24), Part("connectors", 2), Part("transformer", 42), Part("video VAE", 2)]
arbiter = HostArbiter(parts, lambda: told.append("freed"), lambda: None)
watch = object()
out = {}


def state():
    return {part.name: part.loaded for part in parts}


def listed():
    return sorted(loaded.model.part.name for loaded in mm.current_loaded_models if hasattr(loaded.model, "part"))


arbiter.ready([text], 1 * GB, watch)
arbiter.ready([connectors], 0, watch)
out["after text"] = state()
arbiter.ready([dit], 20 * GB, watch)
out["transformer evicts the text encoder"] = state()
arbiter.ready([dit], 20 * GB, watch)
out["ready again"] = state()
out["listed once"] = listed()
other = Native(22)
mm.load_models_gpu([other], memory_required=20 * GB)
out["native takes its room"] = {**state(), "native": other.held // GB}
out["told before free"] = list(told)
arbiter.ready([dit], 20 * GB, watch)
out["and gives it back"] = {**state(), "native": other.held // GB}
dit.unload()
for loaded in list(mm.current_loaded_models):
    mm.current_loaded_models.remove(loaded)
arbiter.ready([vae], 0, watch)
dit.fail = KeyboardInterrupt()
try:
    arbiter.ready([vae, dit], 0, watch)
except KeyboardInterrupt:
    out["cancelled"] = {**state(), "listed": listed()}
dit.fail = None
arbiter.ready([vae, dit], 0, watch)
mm.free_memory(1e30, CARD)
out["everything freed"] = {**state(), "listed": listed(), "told": list(told)}
patcher = arbiter.patchers["transformer"]
patcher.partially_load(CARD, 1e32)
out["only our phases load"] = state()
mm.free_memory(1e30, CARD)

stack = Part("blocks", 44, blocks=40)
arbiter = HostArbiter([stack], lambda: told.append("freed"), lambda: None)
arbiter.ready([stack], 2 * GB, watch)
out["blocks whole"] = stack.held // GB
other = Native(22)
mm.load_models_gpu([other], memory_required=20 * GB)
out["blocks given"] = {"held": stack.held // GB, "listed": listed(), "native": other.held // GB, "free": mm.get_free_memory(CARD) // GB}
arbiter.ready([stack], 2 * GB, watch)
out["blocks back"] = {"held": stack.held // GB, "native": other.held // GB}
TOTAL = 24 * GB
mm.free_memory(1e30, CARD)
arbiter.ready([stack], 4 * GB, watch)
left = mm.get_free_memory(CARD)
out["blocks on a small card"] = {"held": stack.held // GB, "left": left // GB, "room": arbiter.room(CARD) // GB, "size": arbiter.patchers["blocks"].model_size() // GB}
arbiter.ready([stack], 4 * GB, watch)
out["stays"] = stack.held // GB
for state in (mm.VRAMState.LOW_VRAM, mm.VRAMState.NO_VRAM):
    mm.free_memory(1e30, CARD)
    mm.vram_state = state
    arbiter.ready([stack], 4 * GB, watch)
    out[state.name] = stack.held // GB
mm.free_memory(1e30, CARD)
mm.vram_state, TOTAL = mm.VRAMState.NORMAL_VRAM, 8 * GB
text, connectors = Part("text encoder", 24, blocks=20), Part("connectors", 4)
arbiter = HostArbiter([text, connectors], lambda: told.append("freed"), lambda: None)
for part in (text, connectors):
    arbiter.ready([part], 1 * GB, watch)
out["tower rests"] = {"held": text.held // GB, "rests": text.rests, "connectors": connectors.loaded}
arbiter.ready([text], 1 * GB, watch)
arbiter.ready([connectors], 1 * GB, watch)
mm.load_models_gpu([Native(6)], memory_required=6 * GB)
out["a native model ends the rest"] = {"rests": text.rests, "listed": listed()}
patcher = HostArbiter([Part("transformer", 42)], lambda: None, lambda: None).patchers["transformer"]
copy = patcher.clone()
out["as others use it"] = {
    "same model": copy.is_clone(patcher) and copy.clone_has_same_weights(patcher) and copy.clone(disable_dynamic=True).part is patcher.part,
    "weights": [copy.model_state_dict(), copy.model_state_dict("diffusion_model."), copy.get_key_patches(), copy.add_patches({"diffusion_model.a.weight": 1})],
    "patched": copy.patch_model(CARD) is patcher.model and copy.unpatch_model(CARD, unpatch_weights=True) is None,
    "held": copy.loaded_size(),
    "dtype": copy.model_dtype(),
}
try:
    copy.get_model_object("model_sampling")
except AttributeError as error:
    out["as others use it"]["refused"] = str(error)
with FakeTensorMode():  # tensors of the card that have no content
    video, audio = torch.zeros(1, 128, 3, 2, 2, device=CARD), torch.zeros(1, 8, 18, 16, device=CARD)
    masks = torch.zeros(1, 1, 3, 2, 2, device=CARD), torch.zeros(1, 1, 18, 16, device=CARD)
    parts = bridge.split({"samples": NestedTensor((video, audio)), "noise_mask": NestedTensor(masks)})
    single = bridge.split({"samples": video, "noise_mask": masks[0]})
    taken = [*bridge.streams(NestedTensor((video, audio))), parts.video_mask, parts.audio_mask, single.video, single.video_mask]
    taken.append(bridge.keyframes_in({"samples": torch.zeros(1, 128, 1, 2, 2, device=CARD)}, 1, 1))
    taken.append(bridge.conditioning_in([[torch.zeros(1, 128, 6144, device=CARD), {}]], "positive").context)
    out["taken to"] = {"before": str(video.device), "after": sorted({str(tensor.device) for tensor in taken})}
out["host memory left"] = [host_spare() // GB]
for headroom in (10 * GB, 1 * GB, 0):  # for a prompt with the default cache, a smaller one, and after it
    ram.set_ram_cache_release_state(None, headroom)
    out["host memory left"].append(host_spare() // GB)
del ram.RAM_CACHE_HEADROOM
out["host memory left"].append(host_spare() // GB)
print(json.dumps(out))  # noqa: T201
