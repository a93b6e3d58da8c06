"""LoRA: low-rank changes of the transformer's linear layers, W + strength * scale * B A.

names.py    the spellings of keys that trainers and converters use
file.py     a LoRA file matched with a base file: which pairs change which tensors
factors.py  the pairs on the device, from the file or a copy in host memory
change.py   changing a filled module: dense weights in place, weights kept as stored by a product beside theirs
reference.py what an IC-LoRA's file says about its reference video
adapter.py  which LoRAs a loaded part has now, and how it gets others
"""

from .adapter import Adapter
from .change import Sided, apply, targets
from .factors import FactorStore
from .file import Lora, Pair, open_lora
from .reference import DOWNSCALE, TEMPORAL, reference_factor

__all__ = ["DOWNSCALE", "TEMPORAL", "Adapter", "FactorStore", "Lora", "Pair", "Sided", "apply", "open_lora", "reference_factor", "targets"]
