"""Prompts written out by a language model of the user's own: optional, off by default, never a hidden download.

The text encoder of LTX-2.5 cannot write (its output layer saturates), so this takes any generative Gemma folder through
transformers. The instructions are our own; decoding follows the official enhancer: greedy, no repeated 5-grams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .device import compute_dtype
from .errors import FileError, InputError
from .image import cover, rgb
from .instrument import Watch

MAX_TOKENS = 600
REPEAT = 5  # n-grams of this length occur once
LONG_SIDE = 896  # px of the picture that is shown

TEXT_INSTRUCTIONS = (
    "You turn a short idea into the script of one continuous video shot with sound. Answer with a single paragraph of 150 to 220 words in the "
    "present tense and nothing else: no title, no list, no comment. Keep everything the idea states, and add nothing that contradicts it. Name "
    "the kind of shot, where the camera stands and how it moves; describe people, things, place and light as a camera would see them, in the "
    "order in which they happen. Put spoken words into quotation marks, say who speaks and in which voice and language. Describe what is heard "
    "throughout: voices, noises, room, music if there is any. Do not explain feelings or meaning; show what can be seen and heard."
)
IMAGE_INSTRUCTIONS = TEXT_INSTRUCTIONS + (
    " The picture you are given is the first frame of the shot: start from exactly what it shows, do not describe it at length again, and tell "
    "what moves and what is heard from there on."
)
_PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u2032": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2212": "-", "\u00a0": " "})
_THOUGHTS = (
    re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL),
    re.compile(r"<\|channel>\s*(?:thought|analysis)\b.*?(?:<(?:\|channel|channel\|)>|\Z)", re.DOTALL),
)
_BEFORE = re.compile(r"(?:[\W_]+|\d+[.)](?=\s))*")
_MARKS = re.compile(r"</?(?:think|caption|start_of_turn|end_of_turn|eos|bos)>|<\|[a-z_]+>(?:final|model)?|<[a-z_]+\|>")


@dataclass(frozen=True)
class Enhanced:
    """text: what to encode, never empty unless the prompt was. notice: why it is the prompt itself, else ""."""

    text: str
    notice: str


def enhance(prompt: str, model: Path, image: torch.Tensor | None, device: torch.device, watch: Watch) -> Enhanced:
    """`prompt`, and a picture (F, H, W, C) in 0..1 that the clip starts from, written out by the model in the folder `model`.

    The model is loaded for this one prompt and dropped after it. Raises InputError without transformers, FileError for a
    folder that holds no model.
    """
    if not prompt.strip():
        return Enhanced(prompt, "The prompt is empty, so there is nothing to write out.")
    transformers = _transformers()
    if not (model / "config.json").is_file():
        raise FileError(f"{model} holds no config.json; give the folder of a generative Gemma, for example of google/gemma-4-E2B-it.")
    with watch.phase("text.enhance", total=MAX_TOKENS, unit="token") as phase:
        processor, network = _load(transformers, model, device, image is not None)
        inputs = _asked(processor, messages(prompt, image), model).to(device)
        ticking = transformers.StoppingCriteriaList([_ticking(transformers, phase)])
        with torch.inference_mode():
            written = network.generate(**inputs, do_sample=False, no_repeat_ngram_size=REPEAT, max_new_tokens=MAX_TOKENS, stopping_criteria=ticking)
        answer = processor.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return accepted(prompt, answer)


def accepted(prompt: str, answer: str) -> Enhanced:
    """The answer cleaned, or the prompt itself, with a notice, where nothing is left of it."""
    text = clean(answer)
    if text:
        return Enhanced(text, "")
    return Enhanced(prompt, "The enhancer wrote nothing that can be used, so the prompt goes on as it is.")


def clean(answer: str) -> str:
    """What a model wrote without its thoughts and marks, quotes and dashes plain, from the first word on: without the number or dash
    of a list, but with that of "35mm film" (officially from the first letter on).

    Thoughts are cut where they are marked as such, from mark to mark, or to the end where MAX_TOKENS came before it; a lone
    closing mark takes nothing but itself away.
    """
    for thought in _THOUGHTS:
        answer = thought.sub("", answer)
    text = _MARKS.sub("", answer).translate(_PLAIN)
    text = text[_BEFORE.match(text).end() :].strip()
    return text if any(letter.isalpha() for letter in text) else ""


def messages(prompt: str, image: torch.Tensor | None) -> list[dict[str, Any]]:
    """The conversation that is put to the model."""
    if image is None:
        return [
            {"role": "system", "content": [{"type": "text", "text": TEXT_INSTRUCTIONS}]},
            {"role": "user", "content": [{"type": "text", "text": f"The idea: {prompt}"}]},
        ]
    return [
        {"role": "system", "content": [{"type": "text", "text": IMAGE_INSTRUCTIONS}]},
        {"role": "user", "content": [{"type": "image", "image": picture(image)}, {"type": "text", "text": f"The idea: {prompt}"}]},
    ]


def picture(image: torch.Tensor) -> Any:
    """The first of the pictures (F, H, W, C) as a PIL image of any proportions, its long side LONG_SIDE px."""
    from PIL import Image

    first = rgb(image)[:1]
    scale = LONG_SIDE / max(first.shape[1:3])
    height, width = (max(1, round(side * scale)) for side in first.shape[1:3])
    return Image.fromarray((cover(first, height, width)[0] * 255).round().to(torch.uint8).numpy())


def _load(transformers: Any, model: Path, device: torch.device, pictures: bool) -> tuple[Any, Any]:
    dtype = compute_dtype(device)
    kind = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
    reader = transformers.AutoProcessor if pictures else transformers.AutoTokenizer
    try:
        return reader.from_pretrained(model, local_files_only=True), kind.from_pretrained(model, local_files_only=True, dtype=dtype).to(device).eval()
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        wanted = "a Gemma that sees pictures" if pictures else "a generative Gemma"
        raise FileError(f"{model} cannot be used as {wanted} ({reason}); give the folder of one, for example of google/gemma-4-E2B-it.") from None


def _asked(processor: Any, conversation: list[dict[str, Any]], model: Path) -> Any:
    """The conversation as the model's own template writes it. Raises FileError for a model that has none for instructions."""
    try:
        return processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    except Exception as error:  # a template is a program of the model's own, and may raise anything
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        raise FileError(f"{model} cannot be given instructions ({reason}); give the folder of one that can, for example of google/gemma-4-E2B-it.") from None


def _ticking(transformers: Any, phase: Any) -> Any:
    """Counts tokens; a cancel takes effect between two of them."""

    class Ticking(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            phase.tick()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return Ticking()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError("the enhancer needs the Python package transformers (5 or later), which is not installed; install it or turn the enhancer off.") from None
    return transformers
