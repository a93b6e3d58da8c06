"""Whether the keyframes of a sampling fit where its prompt takes them, asked before the sampling.

The nodes behind refuse others themselves, but only when it is their turn: after one stage, or after two. Only what the prompt
says in plain values is read here; what comes over a link, or by way of nodes of others, is left to them. So is what may not run
at all, behind an input that its node asks for only when it needs it, and all of it in a host whose inner parts are other ones than
these, or whose queue is laid out in another way than (number, prompt id, prompt, extra data, outputs, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from server import PromptServer

from nodes import NODE_CLASS_MAPPINGS

from ..ltx25.dfr import check_keyframes, check_rounds
from ..ltx25.errors import InputError
from .condition import Clip, check_seeds, slots_at
from .upscale import opened_model

try:
    from comfy_execution.graph import get_input_info
    from comfy_execution.utils import get_executing_context
except ImportError:  # a courtesy is no reason for the pack not to load
    get_input_info = get_executing_context = None

Prompt = Mapping[str, Mapping[str, Any]]

CLIP, KEYFRAMES = 0, 2  # outputs of LTX25Sampler
UPSCALE = "LTX25LatentUpscale"
SAME_FRAMES = (UPSCALE, "LTX25ImageCondition", "LTX25VideoCondition", "LTX25AudioCondition", "LTX25LatentReference")  # from `latent` to output 0


def check_followers(frames: tuple[int, ...], clip: Clip, frame_rate: float) -> None:
    """Raise InputError where the running prompt takes keyframes at `frames` of `clip`, which the executing sampler is about to
    make, to a node that will refuse them."""
    queue = getattr(PromptServer.instance.prompt_queue, "get_current_queue_volatile", None)
    if get_executing_context is None or queue is None:
        return
    context = get_executing_context()
    for item in queue()[0]:
        if context is not None and len(item) > 4 and item[1] == context.prompt_id and isinstance(item[2], Mapping):
            _check(_wanted(item[2], item[4]), context.node_id, frames, clip, frame_rate)


def _check(prompt: Prompt, sampler: str, frames: tuple[int, ...], clip: Clip, frame_rate: float) -> None:
    for key, node in prompt.items():
        kind, inputs, at = node["class_type"], node["inputs"], ()
        if (_source(prompt, inputs, "keyframes"), _source(prompt, inputs, "latent")) != ((sampler, KEYFRAMES), (sampler, CLIP)):
            continue
        try:
            if kind == "LTX25TemporalRounds":
                check_keyframes(frames, clip.whole)
                if not isinstance(rounds := inputs.get("rounds", 1), list):
                    check_rounds(rounds, frame_rate)
            elif kind == "LTX25KeyframeSlots":
                widgets = [inputs.get("count", 3), inputs.get("frames", ""), inputs.get("grid", "even")]
                if any(isinstance(value, list) for value in widgets):
                    continue
                if at := slots_at(clip, *widgets):  # none: keyframes are not read
                    check_seeds(frames, at)
        except InputError as error:
            raise InputError(f"node {key} ({node.get('_meta', {}).get('title') or kind}) would refuse the keyframes that are asked for here: {error}") from None
        if at:
            for later, other in prompt.items():
                if other["class_type"] == "LTX25Sampler" and _source(prompt, other["inputs"], "latent") == (key, 0):
                    _check(prompt, later, at, clip, frame_rate)


def _wanted(prompt: Prompt, outputs: Iterable[str]) -> Prompt:
    """The nodes of the prompt that run for these outputs in any case: others may be half set up, or of the branch that a switch
    leaves out."""
    wanted: set[str] = set()
    while new := set(outputs) & prompt.keys() - wanted:
        wanted |= new
        outputs = [link[0] for key in new for name, value in prompt[key]["inputs"].items() if (link := _link(prompt, value)) and not _lazy(prompt[key], name)]
    return {key: node for key, node in prompt.items() if key in wanted}


def _lazy(node: Mapping[str, Any], name: str) -> bool:
    """Whether the host runs what is behind this input only once the node asks for it."""
    _, _, facts = get_input_info(NODE_CLASS_MAPPINGS[node["class_type"]], name)
    return bool(facts and facts.get("lazy"))


def _link(prompt: Prompt, value: Any) -> tuple[str, int] | None:
    """The node and output an input is linked to; None: it is a value, which may be a list as well."""
    linked = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[0] in prompt
    return (value[0], value[1]) if linked else None


def _source(prompt: Prompt, inputs: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """The node and output that an input is fed from, seen through nodes that keep the frames as they are; None: not a link."""
    link = _link(prompt, inputs.get(name))
    while link is not None:
        node = prompt[link[0]]
        if node["class_type"] not in SAME_FRAMES or not _keeps_frames(node):
            return link
        link = _link(prompt, node["inputs"].get("latent"))
    return None


def _keeps_frames(node: Mapping[str, Any]) -> bool:
    model = node["inputs"].get("upscale_model")
    return node["class_type"] != UPSCALE or (isinstance(model, str) and opened_model(model).time == 1)
