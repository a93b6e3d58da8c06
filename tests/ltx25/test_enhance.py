"""The enhancer's words: nothing is lost, nothing leaks; and one whole run of a tiny Gemma where transformers is there."""

import pytest
import torch
from comfyui_ltx25.ltx25.enhance import (
    IMAGE_INSTRUCTIONS,
    LONG_SIDE,
    TEXT_INSTRUCTIONS,
    accepted,
    clean,
    enhance,
    messages,
    picture,
)
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.ltx25.instrument import Watch


@pytest.mark.parametrize(
    "answer, text",
    [
        ("<think>x</think>A caption.", "A caption."),
        ("<think>x</think>caption</think>", "caption"),
        ("caption", "caption"),
        ("caption<end_of_turn>", "caption"),
        ("<|channel>thought\nI plan it.<channel|>A wide shot.", "A wide shot."),
        ("<|channel>final\nA wide shot.", "A wide shot."),
        ("1. \u201cA\u201d cat\u2019s paw \u2013 slow.", 'A" cat\'s paw - slow.'),
        ("You think <it> over.", "You think <it> over."),
        ("35mm film, a street in rain.", "35mm film, a street in rain."),
        ("**1950s** diner at night.", "1950s** diner at night."),
        ("- 2) 3 cats asleep.", "3 cats asleep."),
        ("24 48 12.5", ""),
        ("", ""),
        ("<think>only thoughts</think>", ""),
        ("<think>The user wants a cat. I could", ""),  # the tokens ended before the thoughts did
        ("<|channel>thought\nThe user wants", ""),
        ("A wide shot. <think>Is that enough?", "A wide shot."),
        ("  ...  ", ""),
    ],
)
def test_q2_thoughts_are_cut_only_where_they_are_marked(answer, text):
    assert clean(answer) == text


@pytest.mark.parametrize("answer", ["", "<think>x</think>", " \n ", "<end_of_turn>", "..."])
def test_q1_e2_an_empty_answer_never_replaces_the_prompt_and_is_told(answer):
    got = accepted("A cat.", answer)
    assert got.text == "A cat." and "goes on as it is" in got.notice


def test_an_answer_is_taken_without_a_notice():
    assert accepted("A cat.", "A ginger cat walks.") == accepted("", "A ginger cat walks.")
    assert accepted("A cat.", "A ginger cat walks.").notice == ""


def test_an_empty_prompt_touches_no_model(tmp_path):
    assert enhance("  ", tmp_path, None, torch.device("cpu"), Watch()).text == "  "


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 37, 91, 4), (1, 4096, 16, 3), (1, 16, 4096, 1), (3, 900, 1600, 3)])
def test_r6_the_picture_is_resized_whatever_its_size(shape):
    shown = picture(torch.rand(shape))
    assert max(shown.size) == LONG_SIDE and min(shown.size) >= 1 and shown.mode == "RGB"


def test_messages_say_which_case_it_is():
    text, seen = messages("A cat.", None), messages("A cat.", torch.rand(1, 8, 8, 3))
    assert text[0]["content"][0]["text"] == TEXT_INSTRUCTIONS and seen[0]["content"][0]["text"] == IMAGE_INSTRUCTIONS
    assert [part["type"] for part in seen[1]["content"]] == ["image", "text"]
    assert all("A cat." in chat[1]["content"][-1]["text"] for chat in (text, seen))


def test_a_folder_without_a_model_is_refused(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(FileError, match=r"no config\.json"):
        enhance("A cat.", tmp_path, None, torch.device("cpu"), Watch())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileError, match="cannot be used as a generative Gemma"):
        enhance("A cat.", tmp_path, None, torch.device("cpu"), Watch())


@pytest.fixture
def writer(tmp_path):
    """A folder with a tiny Gemma of random weights, whose chat template may be changed."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "cat", "walks", "slowly", "the", "idea", ":", "."]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    config = transformers.Gemma3TextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)

    def of(template):
        fast.chat_template = template
        fast.save_pretrained(tmp_path)
        return tmp_path

    return of


def test_a_whole_run_ends_in_a_prompt_that_is_not_empty(writer):
    """Random weights write nonsense: what counts is that it comes back as text or as the prompt, and that ticks are counted."""
    folder = writer("{% for m in messages %}{{ m['content'][0]['text'] }} {% endfor %}")
    got = enhance("the cat", folder, None, torch.device("cpu"), Watch())
    assert got.text.strip()


@pytest.mark.parametrize("template", [None, "{{ raise_exception('System role not supported') }}"])
def test_a_model_that_takes_no_instructions_is_refused_in_a_sentence(writer, template):
    """A base model has no chat template, and the one of an older Gemma knows no system role."""
    with pytest.raises(FileError, match=r"cannot be given instructions \(.*\); give the folder of one that can"):
        enhance("the cat", writer(template), None, torch.device("cpu"), Watch())
