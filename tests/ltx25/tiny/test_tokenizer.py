import json

import pytest
import tokenizers
from comfyui_ltx25.ltx25.checkpoint import read_bytes, read_header
from comfyui_ltx25.ltx25.tiny.corpus import CAPTIONS
from comfyui_ltx25.ltx25.tiny.tokenizer import tokenizer_json, vocabulary
from comfyui_ltx25.tests.support.tiny import tiny_files


@pytest.fixture(scope="module")
def encoder():
    return tokenizers.Tokenizer.from_buffer(tokenizer_json())


def ids(encoder, text):
    return encoder.encode(text, add_special_tokens=False).ids


def test_special_ids(encoder):
    assert [encoder.token_to_id(token) for token in ("<pad>", "<eos>", "<bos>")] == [0, 1, 2]


def test_it_adds_nothing_by_itself(encoder):
    assert encoder.encode("").ids == [] and encoder.encode("a cat").ids == ids(encoder, "a cat")


@pytest.mark.parametrize("text", ["A cat on the table", "🐈‍⬛ and 👩🏽‍🚀", "קול הים", "Übergröße", "a\0b", "a  b\n\tc", "<0x41>", *CAPTIONS])
def test_any_text_survives_the_round_trip(encoder, text):
    assert encoder.decode(ids(encoder, text)) == text


def test_common_words_are_single_tokens_and_unseen_letters_are_bytes(encoder):
    assert len(ids(encoder, "walks along the beach")) < len("walks along the beach") / 2
    assert [encoder.id_to_token(i) for i in ids(encoder, "Ü")] == ["<0xC3>", "<0x9C>"]


def test_a_few_hundred_merges():
    merges = json.loads(tokenizer_json())["model"]["merges"]
    assert 300 < len(merges) < 600


def test_the_file_carries_it_and_its_embedding_has_a_row_per_id():
    header = read_header(tiny_files().text_encoder)
    assert read_bytes(header, "tokenizer_json") == tokenizer_json()
    assert header.tensors["model.embed_tokens.weight"].shape[0] == vocabulary(tokenizer_json())
