"""`write_tiny`: a complete set of LTX-2.5 files, as published in everything but size, that runs on a bare CPU in seconds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint import read_header, write_file
from ..errors import InputError, LTX25Error
from ..instrument.unfinished import lock
from . import metadata as tiny
from .layout import (
    Shapes,
    audio_vae_tensors,
    duration_tensors,
    lora_tensors,
    text_encoder_tensors,
    transformer_tensors,
    upscaler_tensors,
    video_vae_tensors,
)
from .tokenizer import tokenizer_json, vocabulary
from .weights import make

LONGEST_WAIT = 60.0  # s for another process that writes the same set; not every file system has locks
DISTILLED = 1  # added to the seed: the twin differs from the dev file in its weights alone


@dataclass(frozen=True)
class TinyFiles:
    """Where the files of a set are, below the folder it was written to."""

    transformer: Path
    distilled: Path
    text_encoder: Path
    video_vae: Path  # with the convolutional decoder
    video_vae_diffusion: Path
    audio_vae: Path
    spatial_upscaler: Path
    temporal_upscaler: Path
    duration_head: Path
    distilled_lora: Path

    @staticmethod
    def below(folder: Path) -> TinyFiles:
        return TinyFiles(
            transformer=folder / "diffusion_models" / "ltx-2.5-tiny-dev-transformer-bf16.safetensors",
            distilled=folder / "diffusion_models" / "ltx-2.5-tiny-distilled-transformer-bf16.safetensors",
            text_encoder=folder / "text_encoders" / "gemma4-tiny-with-proj-ltx-2.5-bf16.safetensors",
            video_vae=folder / "vae" / "ltx-2.5-tiny-video-vae-conv-bf16.safetensors",
            video_vae_diffusion=folder / "vae" / "ltx-2.5-tiny-video-vae-bf16.safetensors",
            audio_vae=folder / "vae" / "ltx-2.5-tiny-audio-vae-bf16.safetensors",
            spatial_upscaler=folder / "latent_upscale_models" / "ltx-2.5-tiny-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
            temporal_upscaler=folder / "latent_upscale_models" / "ltx-2.5-tiny-latent-temporal-upscaler-x2-bf16-1.0.safetensors",
            duration_head=folder / "model_patches" / "ltx-2.5-tiny-duration-head-bf16.safetensors",
            distilled_lora=folder / "loras" / f"ltx-2.5-tiny-distilled-lora-{tiny.LORA_RANK}-bf16.safetensors",
        )


def write_tiny(folder: str | Path, seed: int = 0, way_out: str = "choose another folder") -> TinyFiles:
    """Write the set below `folder`, in ComfyUI's sub-folders; equal seeds give equal files, byte for byte.

    Raises InputError when the folder cannot be written, with what its user can do about that.
    """
    files = TinyFiles.below(Path(folder))
    try:
        for path in vars(files).values():
            path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_json()
        text = tiny.text_encoder_metadata(vocabulary(tokenizer))
        # Last, so that a set whose dev transformer is there is whole (see `ready`).
        dev, distilled = (_weights(transformer_tensors(), seed + more) for more in (0, DISTILLED))
        write_file(files.text_encoder, {**_weights(text_encoder_tensors(text), seed), **_assets(tokenizer)}, text)
        for path, config in ((files.video_vae, tiny.CONV_VAE), (files.video_vae_diffusion, tiny.DIFFUSION_VAE)):
            write_file(path, _weights(video_vae_tensors(config), seed), tiny.vae_metadata(config, seed))
        write_file(files.audio_vae, _weights(audio_vae_tensors(), seed), tiny.vae_metadata(tiny.AUDIO_VAE, seed))
        for path, config in ((files.spatial_upscaler, tiny.SPATIAL_UPSCALER), (files.temporal_upscaler, tiny.TEMPORAL_UPSCALER)):
            write_file(path, _weights(upscaler_tensors(config), seed), tiny.upscaler_metadata(config, seed))
        write_file(files.distilled_lora, _weights(lora_tensors(), seed), tiny.lora_metadata(seed))
        write_file(files.duration_head, _weights(duration_tensors(), seed), tiny.duration_metadata(seed))
        write_file(files.distilled, distilled, tiny.transformer_metadata(seed))
        write_file(files.transformer, dev, tiny.transformer_metadata(seed))
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); {way_out}.") from None
    return files


def ready(folder: str | Path, seed: int = 0) -> TinyFiles:
    """The set below `folder` in the cache, written now unless it is there, whole, and of this version and seed.

    Of processes that find none together one writes it and the others wait: a file that is written again below one that has
    opened it counts as changed.
    """
    files = TinyFiles.below(Path(folder))
    if not _whole(files, seed):
        with _alone(Path(folder)):
            if not _whole(files, seed):
                write_tiny(folder, seed, "set LTX25_CACHE to one that can be")
    return files


def _whole(files: TinyFiles, seed: int) -> bool:
    try:
        unmarked = (files.text_encoder, files.temporal_upscaler)  # published without a licence key
        marks = [header.metadata.get("license") for path in vars(files).values() if (header := read_header(path)) and path not in unmarked]
    except LTX25Error:
        return False
    return set(marks) == {tiny.license_text(seed)}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process is in here for the same folder, where its file system has locks."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        held = folder.with_name(f".{folder.name}.lock").open("ab")
    except OSError:  # the writing will tell it
        held = None
    with contextlib.nullcontext() if held is None else held:
        until = time.monotonic() + LONGEST_WAIT
        while held is not None and not lock(held.fileno()) and time.monotonic() < until:
            time.sleep(0.05)
        yield


def _weights(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    return {name: make(name, shape, seed) for name, shape in shapes.items()}


def _assets(tokenizer: bytes) -> dict[str, torch.Tensor]:
    """Files that ride along as bytes: the tokenizer, and four that only Gemma's own library reads."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "padding_side": "left"}
    texts = {
        "tokenizer_json": tokenizer,
        "hf_asset__chat_template.jinja": b"{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}",
        "hf_asset__generation_config.json": json.dumps({"bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0}).encode(),
        "hf_asset__processor_config.json": json.dumps({"processor_class": "Gemma4UnifiedProcessor"}).encode(),
        "hf_asset__tokenizer_config.json": json.dumps(special).encode(),
    }
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items()}
