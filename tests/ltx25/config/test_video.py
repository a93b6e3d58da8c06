import json

import pytest
from comfyui_ltx25.ltx25.checkpoint import read_header
from comfyui_ltx25.ltx25.config.video import read_video_config
from comfyui_ltx25.ltx25.config.video_layout import Resample, ResStack
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.ltx25.shapes import PUBLISHED_COMPRESSION, Compression
from comfyui_ltx25.tests.support.files import GOLDEN, fixture, write_published, write_sparse
from safetensors import safe_open
from safetensors.torch import save_file

CONV, DIFFUSION = "ltx-2.5-video-vae-conv-bf16", "ltx-2.5-video-vae-bf16"


def changed(tmp_path, name, edit):
    """The published header with its configuration edited in place."""
    published = fixture(name)
    config = json.loads(published["__metadata__"]["config"])
    edit(config["vae"])
    return read_header(write_sparse(tmp_path / "changed.safetensors", published["tensors"], {"config": json.dumps(config)}))


def renamed(tmp_path, name, prefix, metadata):
    published = fixture(name)
    tensors = {prefix + key: value for key, value in published["tensors"].items()}
    return read_header(write_sparse(tmp_path / "renamed.safetensors", tensors, published["__metadata__"] if metadata else None))


def test_the_published_convolutional_file_reads(tmp_path):
    config = read_video_config(read_header(write_published(CONV, tmp_path)))
    assert config.prefix == "" and config.compression == PUBLISHED_COMPRESSION
    assert config.decoder.blocks == (
        ResStack(2),
        Resample((2, 2, 2), 2),
        ResStack(2),
        Resample((2, 2, 2), 1),
        ResStack(4),
        Resample((2, 1, 1), 2),
        ResStack(6),
        Resample((1, 2, 2), 2),
        ResStack(4),
    )
    assert (config.decoder.bottleneck, config.decoder.width, config.decoder.latent_channels) == (1024, 128, 128)
    assert (config.encoder.width, len(config.encoder.blocks)) == (128, 9)


def test_the_published_diffusion_file_reads(tmp_path):
    config = read_video_config(read_header(write_published(DIFFUSION, tmp_path)))
    decoder = config.decoder
    assert config.compression == PUBLISHED_COMPRESSION
    assert decoder.channels == (2048, 1024, 512, 512, 256) and decoder.depths == (4, 6, 4, 2, 8) and decoder.head_dim == 64
    assert decoder.kernels == ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11))
    assert decoder.upsamples == (Resample((1, 2, 2), 2), Resample((2, 1, 1), 2), Resample((2, 2, 2), 1), Resample((2, 2, 2), 2))
    assert (decoder.time_width, decoder.time_scale, decoder.steps, decoder.output, decoder.gates) == (384, 1000.0, 1, "x0", False)


@pytest.mark.parametrize("name", [CONV, DIFFUSION])
@pytest.mark.parametrize("prefix", ["", "vae."])
@pytest.mark.parametrize("metadata", [True, False], ids=["metadata", "shapes"])
def test_prefix_and_metadata_make_no_difference(tmp_path, caplog, name, prefix, metadata):
    from dataclasses import replace

    with caplog.at_level("INFO"):
        got = read_video_config(renamed(tmp_path, name, prefix, metadata))
    assert replace(got, prefix="") == read_video_config(read_header(write_published(name, tmp_path)))
    assert got.prefix == prefix
    assert [r.getMessage().count("has no metadata") for r in caplog.records] == ([] if metadata else [1])


@pytest.mark.parametrize("name", ["video_vae.bf16", "video_vae_conv.bf16"])
def test_tiny_files_read_alike_with_and_without_metadata(tmp_path, name):
    from dataclasses import replace

    path = GOLDEN / "video_vae" / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        save_file({key: file.get_tensor(key) for key in file.keys()}, tmp_path / "bare.safetensors")  # noqa: SIM118
    with_metadata, bare = read_video_config(read_header(path)), read_video_config(read_header(tmp_path / "bare.safetensors"))
    if name == "video_vae.bf16":  # windows cannot be read off shapes: the published ones are assumed
        assert bare.decoder.kernels[-1] == (11, 11, 11)
        bare = replace(bare, decoder=replace(bare.decoder, kernels=with_metadata.decoder.kernels))
    assert bare == with_metadata


def test_r4_compression_follows_the_block_list(tmp_path):
    """A file whose cells are 4 frames x 16 px: every stride less once, in the encoder and in the decoder."""

    def less(vae):
        vae["encoder_blocks"] = vae["encoder_blocks"][:7] + vae["encoder_blocks"][8:]
        vae["decoder_blocks"] = vae["decoder_blocks"][:7] + vae["decoder_blocks"][8:]

    config = read_video_config(changed(tmp_path, CONV, less))
    assert config.compression == Compression(frames=4, side=16)


def test_r4_encoder_and_decoder_must_agree(tmp_path):
    def less(vae):
        vae["decoder_blocks"] = vae["decoder_blocks"][:5] + vae["decoder_blocks"][6:]

    with pytest.raises(FileError, match="8 frames x 32 px for the encoder and 4 x 16 for the decoder"):
        read_video_config(changed(tmp_path, CONV, less))


@pytest.mark.parametrize(
    "name, edit, said",
    [
        (CONV, lambda v: v.update(timestep_conditioning=True), "timestep_conditioning is True"),
        (CONV, lambda v: v.pop("timestep_conditioning"), "timestep_conditioning is missing"),
        (CONV, lambda v: v.update(spatial_padding_mode="reflect"), "spatial_padding_mode is 'reflect'"),
        (CONV, lambda v: v.pop("spatial_padding_mode"), "spatial_padding_mode is missing"),
        (CONV, lambda v: v.update(causal_decoder=True), "causal_decoder is True"),
        (CONV, lambda v: v.update(norm_layer="group_norm"), "norm_layer is 'group_norm'"),
        (CONV, lambda v: v["decoder_blocks"][1][1].update(residual=True), r"decoder_blocks\[1\].residual is True"),
        (CONV, lambda v: v["decoder_blocks"][0][1].update(inject_noise=True), r"decoder_blocks\[0\].inject_noise is True"),
        (CONV, lambda v: v["decoder_blocks"][0].__setitem__(0, "attn"), "is of kind 'attn'"),
        (CONV, lambda v: v.update(latent_log_var="per_channel"), "latent_log_var is 'per_channel'"),
        (CONV, lambda v: v.update(new_thing=1), "keys this version does not know: new_thing"),
        (CONV, lambda v: v.update(_class_name="CausalDiffusionVAE"), "_class_name is 'CausalDiffusionVAE'"),
        (DIFFUSION, lambda v: v["decoder"].update(resampler_kind="conv"), "resampler_kind is 'conv'"),
        (DIFFUSION, lambda v: v["decoder"].pop("stage5_kernel"), "no key 'stage5_kernel'"),
        (DIFFUSION, lambda v: v["decoder"].update(stage5_channels=512), "stage5_channels is 512"),
        (DIFFUSION, lambda v: v["decoder"].update(stage_depths=[1, 1]), "do not describe the same stages"),
        (DIFFUSION, lambda v: v.update(model_output_type="eps"), "model_output_type is 'eps'"),
        (DIFFUSION, lambda v: v["encoder"].update(spatial_padding_mode="reflect"), "spatial_padding_mode is 'reflect'"),
        (DIFFUSION, lambda v: v["encoder"].update(out_channels=64), "disagree about the latent channels"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, name, edit, said):
    with pytest.raises(FileError, match=said):
        read_video_config(changed(tmp_path, name, edit))


def test_shapes_that_fit_no_layout_are_refused_without_metadata(tmp_path):
    tensors = fixture(CONV)["tensors"]
    tensors["decoder.up_blocks.3.conv.conv.weight"]["shape"][0] = 1536
    tensors["decoder.up_blocks.3.conv.conv.bias"]["shape"][0] = 1536
    with pytest.raises(FileError, match="shapes of decoder.up_blocks.3. fit no known layout"):
        read_video_config(read_header(write_sparse(tmp_path / "x.safetensors", tensors, None)))


def test_legacy_gates_are_noticed(tmp_path):
    tensors = fixture(DIFFUSION)["tensors"] | {"decoder.diff_blocks.0.gate_msa": {"dtype": "BF16", "shape": [256]}}
    header = read_header(write_sparse(tmp_path / "x.safetensors", tensors, fixture(DIFFUSION)["__metadata__"]))
    assert read_video_config(header).decoder.gates


def test_configs_have_no_defaults():
    import dataclasses

    from comfyui_ltx25.ltx25.config import video_layout

    for kind in vars(video_layout).values():
        if dataclasses.is_dataclass(kind):
            assert all(field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING for field in dataclasses.fields(kind))
