"""Storage formats of weights: what the bytes of a quantised tensor stand for. Pure functions of tensors, one format a file.

int8.py   eight-bit integers with a scale per row or tensor, as they are or turned by a Hadamard matrix (ConvRot)
fp8.py    eight-bit floats, as they are or with a scale
nvfp4.py  four-bit floats in blocks of 16 with two levels of scales
ggml.py   the blocks of GGUF files
weights.py  the same as objects a checkpoint reader and a linear layer can use without knowing which it is
"""

from .weights import Dense, Format, Fp8, Ggml, Held, Int8, Nvfp4, Parts, Stacked, Weight

__all__ = ["Dense", "Format", "Fp8", "Ggml", "Held", "Int8", "Nvfp4", "Parts", "Stacked", "Weight"]
