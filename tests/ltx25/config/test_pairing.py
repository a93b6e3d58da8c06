"""Text encoder and transformer must belong together: the official version rule, and the widths."""

import json
import logging

import pytest
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.pairing import check_pairing
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import write_published, write_sparse

SOURCE = json.dumps({"ltx_version": "2.5.0", "gemma_version": "gemma4-12b-ltx-v1"})
GEMMA = json.dumps({"model_type": "gemma4_unified", "gemma_version": "gemma4-12b-ltx-v1"})


def transformer(folder, widths=(64, 32), **metadata):
    tensors = {
        f"model.diffusion_model.{stream}_embeddings_connector.learnable_registers": {"dtype": "BF16", "shape": [128, width]}
        for stream, width in zip(("video", "audio"), widths, strict=True)
    }
    return read_header(write_sparse(folder / "transformer.safetensors", tensors, metadata))


def text_encoder(folder, widths=(64, 32), **metadata):
    tensors = {
        f"text_embedding_projection.{stream}_aggregate_embed.weight": {"dtype": "BF16", "shape": [width, 8]}
        for stream, width in zip(("video", "audio"), widths, strict=True)
    }
    return read_header(write_sparse(folder / "text.safetensors", tensors, metadata))


@pytest.mark.parametrize("kind", ["dev-transformer-bf16", "distilled-transformer-bf16", "dev-transformer-comfy-int8-convrot", "distilled-transformer-nvfp4"])
@pytest.mark.parametrize("precision", ["bf16", "comfy-int8-convrot"])
def test_published_files_belong_together(tmp_path, caplog, kind, precision):
    ours = read_header(write_published(f"ltx-2.5-22b-{kind}", tmp_path))
    check_pairing(ours, read_header(write_published(f"gemma4-12b-with-proj-ltx-2.5-{precision}", tmp_path)))
    assert not caplog.records


@pytest.mark.parametrize("widths", [(48, 32), (64, 48)])
def test_l7_widths_that_do_not_fit_name_both_files_and_both_numbers(tmp_path, widths):
    with pytest.raises(FileError) as refused:
        check_pairing(transformer(tmp_path, gemma_source_checkpoint=SOURCE), text_encoder(tmp_path, widths, gemma_config=GEMMA))
    message = str(refused.value)
    assert "transformer.safetensors" in message and "text.safetensors" in message
    assert "48" in message and ("64" in message or "32" in message)


@pytest.mark.parametrize("version", ["gemma4-12b-ltx-v2", None])
def test_another_gemma_version_is_refused_and_so_is_none(tmp_path, version):
    gemma = json.dumps({"model_type": "gemma4_unified"} | ({"gemma_version": version} if version else {}))
    with pytest.raises(FileError, match="trained with text encoder 'gemma4-12b-ltx-v1', and text.safetensors is") as refused:
        check_pairing(transformer(tmp_path, gemma_source_checkpoint=SOURCE), text_encoder(tmp_path, gemma_config=gemma))
    assert ("'gemma4-12b-ltx-v2'" if version else "of no named version") in str(refused.value)


@pytest.mark.parametrize("version", ["2.5.0", '"2.5.0"', "2.4", "2-5-1", "3"])
def test_a_recent_transformer_must_name_its_gemma_when_the_encoder_does(tmp_path, version):
    if version == "2.4":  # (2, 4) < (2, 4, 0): compared as the official code compares tuples
        message = "is of model version 2.4"
    else:
        message = "does not say which text encoder"
    with pytest.raises(FileError, match=message):
        check_pairing(transformer(tmp_path, model_version=version), text_encoder(tmp_path, gemma_config=GEMMA))


def test_when_neither_names_a_version_it_is_logged(tmp_path, caplog):
    gemma = json.dumps({"model_type": "gemma4_unified"})
    with caplog.at_level(logging.WARNING):
        check_pairing(transformer(tmp_path, model_version="2.5.0"), text_encoder(tmp_path, gemma_config=gemma))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("metadata", [{"model_version": "2.3.0"}, {"config": "{}"}, {"model_version": "unknown"}])
def test_an_older_transformer_is_refused(tmp_path, metadata):
    with pytest.raises(FileError, match="use an LTX-2.5 transformer"):
        check_pairing(transformer(tmp_path, **metadata), text_encoder(tmp_path, gemma_config=GEMMA))


@pytest.mark.parametrize("lost", ["transformer", "text encoder", "both"])
def test_files_that_lost_their_metadata_are_compared_by_width_and_logged(tmp_path, caplog, lost):
    ours = {} if lost != "text encoder" else {"gemma_source_checkpoint": SOURCE}
    theirs = {} if lost != "transformer" else {"gemma_config": GEMMA}
    with caplog.at_level(logging.WARNING):
        check_pairing(transformer(tmp_path, **ours), text_encoder(tmp_path, **theirs))
    assert len(caplog.records) == 1
    with pytest.raises(FileError, match="do not belong together"):
        check_pairing(transformer(tmp_path, (48, 32), **ours), text_encoder(tmp_path, **theirs))
