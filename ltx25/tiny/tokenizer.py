"""A real little tokenizer in the form of the published one: byte-pair merges with byte fallback, spaces as U+2581."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from .corpus import CAPTIONS

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # ids 0 to 3
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
MERGES = 500  # about: letters of the captions count too


def tokenizer_json() -> bytes:
    """The tokenizer as a Hugging Face tokenizer.json. It adds no BOS by itself, like the published one."""
    encoder = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    size = len(SPECIAL) + len(BYTES) + MERGES
    # Words, not whole captions: a merge across words would learn the captions by heart.
    words = [f"{space}{word}" for caption in CAPTIONS for space, word in zip([""] + [" "] * 99, caption.split(), strict=False)]
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=1, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    encoder.train_from_iterator(words, trainer)
    table = json.loads(encoder.to_str())
    # The trainer made special tokens of the bytes; a "<0x41>" in a prompt must stay the six characters it is.
    table["added_tokens"] = [token for token in table["added_tokens"] if token["content"] in SPECIAL]
    return json.dumps(table, ensure_ascii=False).encode()


def vocabulary(tokenizer: bytes) -> int:
    """Ids of a tokenizer.json: rows its embedding table needs."""
    return len(json.loads(tokenizer)["model"]["vocab"])
