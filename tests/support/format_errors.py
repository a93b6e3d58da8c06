"""How far a clip of the tiny checkpoint moves when its transformer is stored or multiplied in another format, and a prompt's
contexts when its text encoder is: README's tables.

    python tests/support/format_errors.py

prints them anew. The weights are random, and spread errors further than trained ones do: formats are to be compared with each
other. Distances are relative L2 to the bf16 file's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import conftest  # noqa: F401  registers the checkout as comfyui_ltx25

from comfyui_ltx25.tests.support.quantised import write_gguf, write_quantised
from comfyui_ltx25.tests.support.renders import WATCH, off, open_engine, sampled
from comfyui_ltx25.tests.support.tiny import tiny_files

PROMPT = "A cat on a table."
HEAD = "| transformer | prompt | picture | sound |\n|---|---:|---:|---:|\n"
ENCODER_HEAD = "| text encoder | video context | audio context |\n|---|---:|---:|\n"

# Row -> (precision, how its file is written; None: the bf16 file itself)
Write = Callable[[Path, Path], Path]
ROWS: dict[str, tuple[str, Write | None]] = {
    "int8-convrot": ("auto", lambda source, folder: write_quantised(source, folder / "int8.safetensors", "int8")),
    "bf16 file, `precision=fp8`": ("fp8", None),
    "fp8 file, scaled": ("auto", lambda source, folder: write_quantised(source, folder / "scaled.safetensors", "fp8-weight_scale")),
    "the same, `precision=fp8`": ("fp8", lambda source, folder: folder / "scaled.safetensors"),
    "fp8 file, plain": ("auto", lambda source, folder: write_quantised(source, folder / "plain.safetensors", "fp8")),
    "fp8 file, plain e5m2": ("auto", lambda source, folder: write_quantised(source, folder / "e5m2.safetensors", "fp8-e5m2")),
    "GGUF Q8_0": ("auto", lambda source, folder: write_gguf(source, folder / "q8.gguf", "Q8_0")),
    "GGUF Q6_K": ("auto", lambda source, folder: write_gguf(source, folder / "q6.gguf", "Q6_K")),
    "GGUF Q5_K": ("auto", lambda source, folder: write_gguf(source, folder / "q5.gguf", "Q5_K")),
    "GGUF Q4_K": ("auto", lambda source, folder: write_gguf(source, folder / "q4.gguf", "Q4_K")),
    "nvfp4, decoded": ("auto", lambda source, folder: write_quantised(source, folder / "nvfp4.safetensors", "nvfp4-bare")),
}
ENCODER_ROWS: dict[str, Write] = {name: write for name, (precision, write) in ROWS.items() if precision == "auto"}  # the setting is the transformer's
ENCODER_ROWS |= {  # none of its tensors is a multiple of 256 wide: K formats in rows of 256, as some converters write them
    f"GGUF {kind}": lambda source, folder, kind=kind: write_gguf(source, folder / f"{kind}.gguf", kind, flat=True) for kind in ("Q6_K", "Q5_K", "Q4_K")
}


def measured(folder: Path) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Row -> distances of the prompt's video context, of the video and of the audio latent."""
    plain = open_engine()
    contexts = plain.encode(PROMPT, WATCH)
    clip = sampled(plain, conditioning=contexts)
    for name, (precision, write) in ROWS.items():
        files = {} if write is None else {"transformer": write(tiny_files().transformer, folder)}
        engine = open_engine(precision, **files)
        encoded = engine.encode(PROMPT, WATCH)
        got = sampled(engine, conditioning=encoded)
        yield name, (off(encoded.video, contexts.video), off(got.video, clip.video), off(got.audio, clip.audio))


def measured_encoders(folder: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Row -> distances of the prompt's video context and of its audio context."""
    contexts = open_engine().encode(PROMPT, WATCH)
    for name, write in ENCODER_ROWS.items():
        got = open_engine(text_encoder=write(tiny_files().text_encoder, folder)).encode(PROMPT, WATCH)
        yield name, (off(got.video, contexts.video), off(got.audio, contexts.audio))


def line(name: str, distances: tuple[float, ...]) -> str:
    return f"| {name} | " + " | ".join(f"{100 * distance:.2g} %" for distance in distances) + " |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        for head, rows in ((HEAD, measured), (ENCODER_HEAD, measured_encoders)):
            sys.stdout.write(head + "\n".join(line(*row) for row in rows(Path(where))) + "\n\n")
