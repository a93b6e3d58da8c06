"""Run by test_memory.py with the host's Python: the host's real memory manager, our patchers, and a pretended card.

Prints one JSON object. The parts are stand-ins that allocate nothing: what is tested is who is asked to leave, and when.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

comfyui, pack = sys.argv[1:3]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management as mm  # noqa: E402
import torch  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

GB = 1 << 30
CARD = torch.device("cuda", 0)
TOTAL = 80 * GB

spec = importlib.util.spec_from_file_location("pack", Path(pack) / "__init__.py")
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
nodes = types.ModuleType("pack.nodes")  # the package without its node list, which needs a running server
nodes.__path__ = [str(Path(pack) / "nodes")]
sys.modules["pack.nodes"] = nodes
from pack.nodes.patcher import HostArbiter  # noqa: E402


class Part:
    """A part of the engine that only says what it would hold."""

    def __init__(self, name, gigabytes):
        self.name, self.bytes, self.device, self.loaded, self.fail = name, gigabytes * GB, CARD, False, None

    def load(self, watch):
        if self.fail is not None:
            raise self.fail
        self.loaded = True

    def unload(self):
        self.loaded = False


class Model:
    device = None


class Native(ModelPatcher):
    """A native model of `gigabytes`, loaded whole."""

    def __init__(self, gigabytes):
        super().__init__(Model(), CARD, torch.device("cpu"), size=gigabytes * GB)
        self.held = 0

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
    held = sum(loaded.model.loaded_size() for loaded in mm.current_loaded_models)
    left = TOTAL - held
    return (left, left) if torch_free_too else left


mm.get_free_memory = free
mm.soft_empty_cache = lambda *_, **__: None

told = []
text, connectors, dit, vae = parts = [Part("text encoder", 24), Part("connectors", 2), Part("transformer", 42), Part("video VAE", 2)]
arbiter = HostArbiter(parts, lambda: told.append("freed"))
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
print(json.dumps(out))  # noqa: T201
