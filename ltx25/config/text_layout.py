"""Where things are in a text-encoder file: which tensors belong to the tower, the projections and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..checkpoint import Header
from ..errors import FileError

PROJECTION = "text_embedding_projection."
TOKENIZER = "tokenizer_json"  # the bytes of a Hugging Face tokenizer.json, stored as a tensor

# Eyes and ears of the whole model, and files that ride along as bytes: the text path needs none of them.
UNUSED = (
    "vision_model.*",
    "multi_modal_projector.*",
    "audio_projector.*",
    "hf_asset__*",
    "model.vision_embedder.*",  # this and the next two: the names of the Hugging Face layout
    "model.embed_vision.*",
    "model.embed_audio.*",
)


@dataclass(frozen=True)
class TextLayout:
    """Prefixes of the two modules in a file. `unused`: patterns, relative to `tower`, of tensors below it that nobody needs."""

    tower: str
    unused: tuple[str, ...]

    @staticmethod
    def read(header: Header) -> TextLayout:
        """Published files keep the tower at `model.`, older ones (and Hugging Face) at `model.language_model.`."""
        nested = "model.language_model."
        tower = nested if any(name.startswith(nested) for name in header.tensors) else "model."
        return TextLayout(tower, tuple(p.removeprefix(tower) for p in UNUSED if p.startswith(tower)))

    def check(self, header: Header) -> None:
        """Refuse, by name, tensors that neither a module nor the tokenizer takes and that are not known as unused."""
        stray = [
            name
            for name in header.tensors
            if not name.startswith((self.tower, PROJECTION)) and name != TOKENIZER and not any(fnmatchcase(name, p) for p in UNUSED)
        ]
        if stray:
            more = f" and {len(stray) - 3} more" if len(stray) > 3 else ""
            raise FileError(
                f"{header.name} has tensors no part of the text encoder uses: {', '.join(stray[:3])}{more}; "
                "update the pack or use the published file."
            )
