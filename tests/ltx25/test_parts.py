"""Every tensor of a file is a part's, or known to be another's: what nobody would read is refused by name when files are opened."""

import pytest
import torch
from comfyui_ltx25.ltx25.checkpoint import open_file, write_file
from comfyui_ltx25.ltx25.checkpoint.fill import WHOLE_MODEL
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.quantised import read_all
from comfyui_ltx25.tests.support.renders import open_engine
from comfyui_ltx25.tests.support.tiny import tiny_files

OWN = {"transformer": "model.diffusion_model.", "video_vae": "vae."}  # in a file of a whole model


def opened(slot, path):
    if slot == "duration_head":
        return open_engine()._optional.duration_head(path)
    return open_engine(**{slot: path})


def with_more(slot, tmp_path, *names):
    tensors, metadata = read_all(getattr(tiny_files(), slot))
    lead = "vae." if slot == "video_vae" else ""  # which the file for this slot alone lacks
    tensors = {lead + name: tensor for name, tensor in tensors.items()} | {name: torch.ones(3) for name in names}
    write_file(tmp_path / "more.safetensors", tensors, metadata)
    return tmp_path / "more.safetensors"


@pytest.mark.parametrize("name", ["extra.thing", "model.other.weight", "transformer_blocks.0.attn1.to_q.weight", "video_embeddings_connector.x"])
@pytest.mark.parametrize("slot", ["transformer", "text_encoder", "video_vae", "audio_vae", "duration_head"])
def test_a_tensor_of_no_part_is_refused_by_name(slot, name, tmp_path):
    with pytest.raises(FileError, match=f"^more.safetensors has tensors no part of the (model|text encoder) uses: {name}; update the pack or"):
        opened(slot, with_more(slot, tmp_path, name))


@pytest.mark.parametrize("slot", OWN)
def test_what_one_file_of_a_whole_model_holds_beside_the_part_is_left_to_the_others(slot, tmp_path):
    assert opened(slot, with_more(slot, tmp_path, *(f"{prefix}of.another" for prefix in WHOLE_MODEL if prefix != OWN[slot])))


@pytest.mark.parametrize("name", ["x-00001-of-00003.safetensors", "x-00003-of-00003.gguf"])
def test_a_piece_of_a_split_model_is_told_so(name, tmp_path):
    (tmp_path / name).write_bytes(tiny_files().transformer.read_bytes())
    with pytest.raises(FileError, match=f"^{name} is piece [13] of the 3 that a model was split into, .* or join the pieces.$"):
        open_file(tmp_path / name)


def test_a_model_in_one_piece_is_whole_whatever_its_name_counts(tmp_path):
    path = tmp_path / "x-00001-of-00001.safetensors"
    path.write_bytes(tiny_files().transformer.read_bytes())
    assert open_file(path).tensors
