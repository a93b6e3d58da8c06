"""Prompt -> token ids, with the tokenizer that the text-encoder file carries."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from ..checkpoint import Header, read_bytes
from ..config.text_layout import TOKENIZER
from ..errors import FileError, InputError

MAX_TOKENS = 1024  # BOS included; what the model was trained with


@dataclass(frozen=True)
class TokenCount:
    """How much of a prompt is used. `prompt`: tokens of the whole text; `used`: tokens the tower sees, BOS included."""

    prompt: int
    used: int

    @property
    def truncated(self) -> bool:
        return self.prompt > self.used - 1

    def __str__(self) -> str:
        if self.truncated:
            return f"prompt has {self.prompt} tokens, the first {self.used - 1} + BOS are used"
        return f"{self.used} tokens"


class Tokenizer:
    """The official recipe: strip, no template, no weight syntax, exactly one BOS in front, no EOS, at most 1024 ids."""

    def __init__(self, encoder: tokenizers.Tokenizer, bos: int, pad: int, vocabulary: int, source: str) -> None:
        """`source` names the file in errors; ids are below `vocabulary`."""
        self._encoder = encoder
        self._bos = bos
        self._pad = pad
        self._vocabulary = vocabulary
        self._source = source

    @staticmethod
    def read(header: Header, bos: int, pad: int, vocabulary: int) -> Tokenizer:
        """From the file's `tokenizer_json` tensor (bytes, stored as uint8 or int8). Raises FileError when it is unusable."""
        info = header.tensors.get(TOKENIZER)
        if info is None:
            raise FileError(f"{header.name} has no {TOKENIZER}; use gemma4-12b-with-proj-ltx-2.5 from huggingface.co/Lightricks/LTX-2.5.")
        if info.dtype.itemsize != 1:
            raise FileError(f"{header.name}: {TOKENIZER} is stored as {info.dtype}, wanted bytes; download the file again.")
        try:
            encoder = tokenizers.Tokenizer.from_buffer(read_bytes(header, TOKENIZER))
        except FileError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise FileError(f"{header.name}: {TOKENIZER} is not a tokenizer ({error}); download the file again.") from None
        encoder.no_truncation()
        encoder.no_padding()
        return Tokenizer(encoder, bos, pad, vocabulary, header.name)

    def encode(self, text: str) -> tuple[list[int], TokenCount]:
        """The valid ids of `text`, 1 to 1024 of them (an empty prompt is a lone BOS), and what was cut off.

        Special tokens written out in the text count as such, so a text that begins with BOS gets no second one.
        Raises InputError for a text that is not Unicode, FileError for ids the embedding table does not have.
        """
        try:
            ids = self._encoder.encode(text.strip(), add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise InputError("The prompt holds half of a surrogate pair, which is no character; type or paste it again.") from None
        if ids[:1] == [self._bos]:
            ids = ids[1:]
        used = [self._bos, *ids[: MAX_TOKENS - 1]]
        if max(used) >= self._vocabulary:
            raise FileError(
                f"{self._source}: its tokenizer makes id {max(used)} and its embedding has {self._vocabulary} rows; download it again."
            )
        return used, TokenCount(prompt=len(ids), used=len(used))

    def pad(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The row the official tower reads: `ids` at the end of 1024, pad ids before them; and its mask, 1 = valid."""
        missing = MAX_TOKENS - len(ids)
        return [self._pad] * missing + ids, [0] * missing + [1] * len(ids)
