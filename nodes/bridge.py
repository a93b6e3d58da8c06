"""Host types and engine types: file names, LATENT, CONDITIONING, IMAGE, AUDIO. Inputs are never written to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import folder_paths
import torch
from comfy.nested_tensor import NestedTensor

from ..ltx25.conditions import check_together, of_clips
from ..ltx25.config.connector import REGISTERS
from ..ltx25.engine import Conditioning, Engine
from ..ltx25.errors import InputError
from ..ltx25.instrument import Watch
from ..ltx25.shapes import OUTPUT_RATE

FRAME_RATE = 24.0  # frames/s where nothing says another one: what the model was trained for
# What native nodes hang on conditioning to limit or change it. The engine has no such thing, and dropping one silently
# would render something else than the graph says.
REFUSED_EXTRAS = {
    "area": "an area",
    "mask": "a mask",
    "hooks": "hooks",
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "keyframe_idxs": "native guide frames",
    "guide_attention_entries": "native guide frames",
    "generated_keyframes": "generated keyframes",
    "ref_audio": "a reference voice",
    "concat_latent_image": "a concatenated image",
}


def model_names(category: str) -> list[str]:
    """The files of a host category, and the .gguf files in its folders: the host's own loaders cannot read those and do not
    list them, so they have a category of ours. It shares the host's list of folders, those added later included."""
    known = folder_paths.folder_names_and_paths
    ours = f"ltx25_gguf_{category}"
    if ours not in known:
        known[ours] = (known[category][0], {".gguf"})
    return sorted({*folder_paths.get_filename_list(category), *folder_paths.get_filename_list(ours)})


def model_path(category: str, name: str) -> Path:
    """The file behind a combo value; the host's folders and extra_model_paths.yaml decide."""
    return Path(folder_paths.get_full_path_or_raise(category, name))


@dataclass(frozen=True)
class Latents:
    """A LATENT taken apart: (B, C, t, h, w) and (B, C, n, bins), None: not there. Masks as the host has them, 1 = generate.

    All tensors are on the CPU, wherever the host keeps latents (--gpu-only: on the card): what is made beside them is there.
    """

    video: torch.Tensor | None
    audio: torch.Tensor | None
    video_mask: torch.Tensor | None
    audio_mask: torch.Tensor | None
    frame_rate: float | None
    seed: int
    conditions: tuple
    clip_frames: int | None  # how many of the video's pixel frames were asked for, where it was padded; None: all

    @property
    def masked(self) -> bool:
        return self.video_mask is not None or self.audio_mask is not None

    def frames(self, whole: int) -> int:
        """Of a video of `whole` pixel frames, those asked for."""
        return whole if self.clip_frames is None else min(self.clip_frames, whole)


def split(latent: dict[str, Any]) -> Latents:
    """Take a LATENT apart; raises InputError when it is neither video, audio nor both.

    Of clips that the host has taken out of a batch (Latent From Batch, which notes them as batch_index) or repeated (Repeat Latent
    Batch, which notes nothing) conditions are theirs.
    """
    video, audio = streams(latent["samples"])
    batch = len(audio if video is None else video)
    video_mask, audio_mask = masks(latent.get("noise_mask"), video is not None)
    return Latents(
        video=video,
        audio=audio,
        video_mask=video_mask,
        audio_mask=audio_mask,
        frame_rate=latent.get("frame_rate"),
        seed=latent.get("seed", 0),
        conditions=tuple(of_clips(item, latent.get("batch_index"), batch) for item in latent.get("conditions", ())),
        clip_frames=latent.get("clip_frames"),
    )


EXTENSION = "extension"  # key of a LATENT: the noise_mask that LTX-2.5 Extend made


def finished(latent: dict[str, Any]) -> dict[str, Any]:
    """A copy of a LATENT that was sampled to the end: what an extension kept and made is one clip now, without its mask.

    A mask that somebody else put in its place stays, as it does with the host's samplers.
    """
    mask = latent.get("noise_mask")
    used = ("noise_mask", EXTENSION) if mask is not None and mask is latent.get(EXTENSION) else (EXTENSION,)
    return {key: value for key, value in latent.items() if key not in used}


def extension_made(latent: dict[str, Any]) -> dict[str, Any]:
    """`finished`, where a host's sampler made what was added: that keeps every key. Empty, it is still to be made."""
    video, _ = streams(latent["samples"])
    return finished(latent) if EXTENSION in latent and video is not None and not empty(video) else latent


def empty(grid: torch.Tensor) -> bool:
    """Whether a stream, (B, C, t, h, w) or (B, c, n, bins), is still to be made, or its end is: an encoded one is never all zeros."""
    return not bool(grid[:, :, -1].any())


def whole_mask(grid: torch.Tensor) -> torch.Tensor:
    """The noise mask (1, 1, frames, ...) that makes all of a stream."""
    return torch.ones(1, 1, *grid.shape[2:])


def keyframes_out(latent: torch.Tensor, frames: tuple[int, ...], frame_rate: float, seed: int) -> dict[str, Any]:
    """Keyframes (B, C, count, h, w) as LATENT: clips of one frame, what the VAE knows them as, and where they stand."""
    return {"samples": latent.movedim(2, 1).flatten(0, 1).unsqueeze(2).contiguous(), "keyframes": frames, "frame_rate": frame_rate, "seed": seed}


def keyframes_in(latent: dict[str, Any], batch: int, count: int) -> torch.Tensor:
    """Keyframes of `keyframes_out` side by side: (B, C, count, h, w). Raises InputError for another number of them."""
    video = streams(latent["samples"])[0]
    if video is None or video.shape[2] != 1 or len(video) != batch * count:
        got = "no video" if video is None else f"{len(video)} clips of {video.shape[2]} latent frame(s)"
        raise InputError(f"the keyframes are {got}, wanted {batch * count} of one: {count} for each of {batch} clip(s).")
    return video[:, :, 0].unflatten(0, (batch, count)).movedim(1, 2)


def with_conditions(latent: dict[str, Any], *items: Any) -> dict[str, Any]:
    """A copy of a LATENT that carries more conditions; the sampler uses them up, native samplers do not see them.

    Raises InputError for those that cannot be together: not only the sampler finds it out.
    """
    told = (*latent.get("conditions", ()), *items)
    check_together(told, [name for name, grid in zip(("video", "audio"), streams(latent["samples"]), strict=True) if grid is not None])
    return {**latent, "conditions": told}


def streams(samples: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(video, audio) of LATENT samples, on the CPU; raises InputError for shapes that are neither."""
    tensors = [grid.cpu() for grid in (samples.unbind() if samples.is_nested else [samples])]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    dims = [tensor.ndim for tensor in tensors]
    if dims == [5, 4]:
        return tensors[0], tensors[1]
    if dims == [5]:
        return tensors[0], None
    if dims == [4] and shapes[0][1] == 8:
        return None, tensors[0]
    raise InputError(
        f"The latent has shape {' and '.join(map(str, shapes))}, wanted video (batch, 128, t, h, w), audio (batch, 8, n, 16) or "
        "both; use Empty LTX-2.5 Latent, or an LTX video or audio latent."
    )


def masks(noise_mask: Any, has_video: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(video, audio) masks, on the CPU. A plain mask belongs to the video where there is one; a stream without one is generated whole."""
    if noise_mask is None:
        return None, None
    if noise_mask.is_nested:
        video, audio = (*(mask.cpu() for mask in noise_mask.unbind()), None)[:2]
        return video, audio
    mask = noise_mask.cpu()
    return (mask, None) if has_video else (None, mask)


def join(video: torch.Tensor | None, audio: torch.Tensor | None) -> Any:
    """LATENT samples of the streams that are there."""
    if video is not None and audio is not None:
        return NestedTensor((video, audio))
    return video if audio is None else audio


NOTICES = "ltx25_notices"  # key of a CONDITIONING's extras: what its sampler has to say about the prompt


def conditioning_out(encoded: Conditioning) -> list:
    """CONDITIONING (1, L, D + Da); native LTX nodes take it as already through the connectors."""
    return [[torch.cat([encoded.video, encoded.audio], dim=-1), {NOTICES: encoded.notices} if encoded.notices else {}]]


@dataclass(frozen=True)
class Entry:
    """The one entry of a CONDITIONING: (1, n, D + Da) on the CPU, still to be connected or not."""

    context: torch.Tensor
    unprocessed: bool
    frame_rate: float | None
    notices: tuple[str, ...]


def conditioning_in(conditioning: list, slot: str) -> Entry:
    """Read a CONDITIONING; raises InputError when it asks for something one prompt over the whole clip cannot give."""
    if len(conditioning) != 1:
        raise InputError(f"{slot} has {len(conditioning)} conditioning entries, wanted one; combine the texts in a single prompt.")
    context, extras = conditioning[0]
    for key, name in REFUSED_EXTRAS.items():
        if extras.get(key) is not None:
            raise InputError(f"{slot} carries {name} ({key}), which this engine does not use; connect Encode Gemma Text directly.")
    if extras.get("start_percent", 0.0) > 0.0 or extras.get("end_percent", 1.0) < 1.0 or extras.get("strength", 1.0) != 1.0:
        raise InputError(f"{slot} is limited to a range of steps or to a strength, which this engine does not use; connect the text directly.")
    if context.ndim != 3 or context.shape[0] != 1:
        raise InputError(f"{slot} has shape {tuple(context.shape)}, wanted (1, tokens, width) as Encode Gemma Text makes it.")
    return Entry(context.cpu(), bool(extras.get("unprocessed_ltxav_embeds", False)), extras.get("frame_rate"), tuple(extras.get(NOTICES, ())))


def contexts(entry: Entry, engine: Engine, watch: Watch) -> Conditioning:
    """What the sampler reads, run through the connectors where that was not done yet."""
    if entry.unprocessed:
        return engine.connect(entry.context, watch)
    widths = engine.context_widths
    length = entry.context.shape[1]
    if entry.context.shape[2] != sum(widths) or length % REGISTERS:
        raise InputError(
            f"The conditioning has shape {tuple(entry.context.shape)}, and this model reads {sum(widths)} features of a multiple of "
            f"{REGISTERS} tokens; encode the text with this engine's own Encode Gemma Text."
        )
    video, audio = entry.context.float().split(widths, dim=-1)
    return Conditioning(video, audio, entry.notices)


def image_out(frames: torch.Tensor) -> torch.Tensor:
    """(B * F, H, W, 3) in 0..1 -> IMAGE where and as the host keeps images."""
    return frames.to(mm.intermediate_device(), mm.intermediate_dtype())


def audio_out(waveform: torch.Tensor) -> dict[str, Any]:
    """(B, 2, N) at 48 kHz -> AUDIO."""
    return {"waveform": waveform.to("cpu", torch.float32), "sample_rate": OUTPUT_RATE}
