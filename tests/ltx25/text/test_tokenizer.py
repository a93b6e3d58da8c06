import json

import pytest
import tokenizers
import torch
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.errors import FileError, InputError
from comfyui_ltx25.ltx25.text import MAX_TOKENS, TokenCount, Tokenizer
from comfyui_ltx25.tests.support.golden import Golden
from comfyui_ltx25.tests.support.text import load_tokenizer
from safetensors.torch import load_file, save_file

GOLDEN = Golden("text")
FILE = GOLDEN.folder / "text_encoder.bf16.safetensors"
BOS, PAD, VOCABULARY = 2, 0, 425


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FILE)


def reads(path, **changes):
    return Tokenizer.read(read_header(path), **({"bos": BOS, "pad": PAD, "vocabulary": VOCABULARY} | changes))


def test_golden_cases_of_this_file_are_these():
    assert GOLDEN.names("tokenize") == ["tokenize"]


@pytest.mark.parametrize("row", range(7))
def test_golden_ids_and_mask(tokenizer, row):
    prompts, counts = GOLDEN.input("tokenize", "prompts"), GOLDEN.output("tokenize", "n_valid")
    assert len(prompts) == len(counts) == 7
    ids, tokens = tokenizer.encode(prompts[row])
    assert len(ids) == tokens.used == counts[row]
    padded, mask = tokenizer.pad(ids)
    assert padded == GOLDEN.output("tokenize", "ids")[row].tolist()
    assert mask == GOLDEN.output("tokenize", "mask")[row].tolist()


def test_n9_cat_is_1024_long_with_pads_in_front_and_tokens_at_the_end(tokenizer):
    ids, tokens = tokenizer.encode("cat")
    padded, mask = tokenizer.pad(ids)
    assert len(padded) == len(mask) == MAX_TOKENS == 1024
    assert padded[-tokens.used :] == ids and set(padded[: -tokens.used]) == {PAD}
    assert mask == [0] * (1024 - tokens.used) + [1] * tokens.used


@pytest.mark.parametrize("text", ["", "cat", "<bos>cat", "a " * 3000])
def test_n10_exactly_one_bos(tokenizer, text):
    ids, _ = tokenizer.encode(text)
    assert ids[0] == BOS and ids.count(BOS) == 1


def test_n10_a_tokenizer_that_adds_special_tokens_itself_gives_the_same_ids(tmp_path, tokenizer):
    tensors = load_file(FILE)
    own = json.loads(bytes(tensors["tokenizer_json"].tolist()))
    bos, eos, text = ({"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}})
    own["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text, eos],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in (("<bos>", 2), ("<eos>", 1))},
    }
    path = write_tokenizer(tmp_path / "gemma3_like.safetensors", json.dumps(own).encode())
    assert tokenizers.Tokenizer.from_str(json.dumps(own)).encode("cat").ids[0] == BOS  # it does add them when asked
    assert reads(path).encode("A red fox.") == tokenizer.encode("A red fox.")


def test_e1_weight_syntax_is_plain_text(tokenizer):
    ids, _ = tokenizer.encode("a (word:1.2) [x]")
    plain = [i for part in ("a ", "(word:1.2) ", "[x]") for i in tokenizer._encoder.encode(part, add_special_tokens=False).ids]
    assert ids == [BOS, *plain]


@pytest.mark.parametrize(
    ("text", "least"),
    [("", 1), (" \n\t\u2003 ", 1), ("\U0001f98a\u200d\u2744\ufe0f", 2), ("\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645", 2), ("a\x00b", 4), ("\x00", 2)],
)
def test_e4_empty_blank_emoji_arabic_and_nul_are_legal(tokenizer, text, least):
    ids, tokens = tokenizer.encode(text)
    assert tokens.used == len(ids) >= least and not tokens.truncated
    assert all(0 <= i < VOCABULARY for i in ids)
    if least == 1:
        assert ids == [BOS]


def test_e4_truncation_is_announced_with_counts(tokenizer):
    ids, tokens = tokenizer.encode(" ".join(["fox"] * 5000))
    whole = len(tokenizer._encoder.encode(" ".join(["fox"] * 5000), add_special_tokens=False).ids)
    assert len(ids) == 1024 and whole >= 5000
    assert tokens == TokenCount(prompt=whole, used=1024) and tokens.truncated
    assert str(tokens) == f"prompt has {whole} tokens, the first 1023 + BOS are used"


def test_1023_tokens_fit_and_1024_lose_one(tokenizer):
    names, prompts = GOLDEN.input("tokenize", "names"), GOLDEN.input("tokenize", "prompts")
    assert tokenizer.encode(prompts[names.index("at_limit")])[1] == TokenCount(prompt=1023, used=1024)
    assert not TokenCount(prompt=1023, used=1024).truncated
    assert tokenizer.encode(prompts[names.index("one_over")])[1] == TokenCount(prompt=1024, used=1024)
    assert TokenCount(prompt=1024, used=1024).truncated


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("fox \ud83e runs")


def test_bytes_stored_as_int8_are_the_same_tokenizer(tmp_path, tokenizer):
    raw = bytes(load_file(FILE)["tokenizer_json"].tolist())
    path = tmp_path / "int8.safetensors"
    save_file({"tokenizer_json": torch.frombuffer(bytearray(raw), dtype=torch.int8)}, path)
    assert max(raw) > 127  # so that the sign matters
    assert reads(path).encode("caf\u00e9") == tokenizer.encode("caf\u00e9")


def test_a_file_without_tokenizer_is_refused(tmp_path):
    path = tmp_path / "none.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(FileError, match="none.safetensors has no tokenizer_json"):
        reads(path)


@pytest.mark.parametrize("raw", [b"\0" * 64, b"{}", b"not json"])
def test_bytes_that_are_no_tokenizer_are_refused(tmp_path, raw):
    with pytest.raises(FileError, match="tokenizer_json is not a tokenizer"):
        reads(write_tokenizer(tmp_path / "bad.safetensors", raw))


def test_a_tokenizer_stored_as_numbers_is_refused(tmp_path):
    path = tmp_path / "wide.safetensors"
    save_file({"tokenizer_json": torch.zeros(8, dtype=torch.int32)}, path)
    with pytest.raises(FileError, match="wanted bytes"):
        reads(path)


def test_ids_beyond_the_embedding_are_refused():
    with pytest.raises(FileError, match="embedding has 10 rows"):
        reads(FILE, vocabulary=10).encode("A red fox")


def write_tokenizer(path, raw):
    save_file({"tokenizer_json": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}, path)
    return path
