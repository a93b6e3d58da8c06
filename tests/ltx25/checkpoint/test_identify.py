import pytest
from comfyui_ltx25.ltx25.checkpoint import Kind, identify, read_header, require_kind
from comfyui_ltx25.ltx25.errors import FileError
from comfyui_ltx25.tests.support.files import GOLDEN, fixture, fixture_names, write_published, write_sparse

FIXTURES = {
    "gemma4-12b-with-proj-ltx-2.5-bf16": Kind.TEXT_ENCODER,
    "gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot": Kind.TEXT_ENCODER,
    "ltx-2.5-22b-dev-transformer-bf16": Kind.TRANSFORMER,
    "ltx-2.5-22b-dev-transformer-comfy-int8-convrot": Kind.TRANSFORMER,
    "ltx-2.5-22b-distilled-lora-450-bf16": Kind.LORA,
    "ltx-2.5-22b-distilled-transformer-bf16": Kind.TRANSFORMER,
    "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot": Kind.TRANSFORMER,
    "ltx-2.5-22b-distilled-transformer-nvfp4": Kind.TRANSFORMER,
    "ltx-2.5-22b-distilled-transformer-nvfp4.rev-b": Kind.TRANSFORMER,
    "ltx-2.5-audio-vae-bf16": Kind.AUDIO_VAE,
    "ltx-2.5-duration-head-bf16": Kind.DURATION_HEAD,
    "ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0": Kind.UPSCALER,
    "ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0": Kind.UPSCALER,
    "ltx-2.5-video-vae-bf16": Kind.VIDEO_VAE_DIFFUSION,
    "ltx-2.5-video-vae-conv-bf16": Kind.VIDEO_VAE_CONV,
}

# Golden files that are checkpoints; all others hold inputs and outputs (or parts of a file) and are no kind at all.
GOLDEN_KINDS = {
    "audio/audio_vae.bf16": Kind.AUDIO_VAE,
    "dit/lora": Kind.LORA,
    "dit/lora_second": Kind.LORA,
    "dit/transformer_bf16": Kind.TRANSFORMER,
    "dit/transformer_f32": Kind.TRANSFORMER,
    "text/text_encoder.bf16": Kind.TEXT_ENCODER,
    "text/text_encoder.f32": Kind.TEXT_ENCODER,
    "upscale/duration_head.bf16": Kind.DURATION_HEAD,
    "upscale/duration_head.f32": Kind.DURATION_HEAD,
    "upscale/upsampler_rational_1.5.bf16": Kind.UPSCALER,
    "upscale/upsampler_spatial_x2.bf16": Kind.UPSCALER,
    "upscale/upsampler_temporal_x2.bf16": Kind.UPSCALER,
    "video_vae/video_vae.bf16": Kind.VIDEO_VAE_DIFFUSION,
    "video_vae/video_vae.f32": Kind.VIDEO_VAE_DIFFUSION,
    "video_vae/video_vae_conv.bf16": Kind.VIDEO_VAE_CONV,
}

SLOTS = {
    "transformer": (Kind.TRANSFORMER,),
    "text_encoder": (Kind.TEXT_ENCODER,),
    "video_vae": (Kind.VIDEO_VAE_CONV, Kind.VIDEO_VAE_DIFFUSION),
    "audio_vae": (Kind.AUDIO_VAE,),
}


def test_every_fixture_has_an_expected_kind():
    assert set(FIXTURES) == set(fixture_names())


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_published_files_are_told_apart(name, tmp_path):
    assert identify(read_header(write_published(name, tmp_path))) is FIXTURES[name]


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_files_are_told_apart(path):
    name = path.relative_to(GOLDEN).as_posix().removesuffix(".safetensors")
    assert identify(read_header(path)) is GOLDEN_KINDS.get(name, Kind.UNKNOWN)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_l2_each_file_in_each_slot_passes_or_names_both(name, slot, tmp_path):
    header, wanted = read_header(write_published(name, tmp_path)), SLOTS[slot]
    if FIXTURES[name] in wanted:
        assert require_kind(header, slot, wanted) is FIXTURES[name]
        return
    with pytest.raises(FileError) as caught:
        require_kind(header, slot, wanted)
    message = str(caught.value)
    assert message.startswith(f"{slot}: {name}") and FIXTURES[name].value in message
    assert all(kind.value in message for kind in wanted)


def text_encoder_without(tmp_path, *dropped, rename=lambda name: name):
    published = fixture("gemma4-12b-with-proj-ltx-2.5-bf16")
    tensors = {rename(n): t for n, t in published["tensors"].items() if not n.startswith(dropped)}
    return read_header(write_sparse(tmp_path / "gemma4-12b.safetensors", tensors, published["__metadata__"]))


@pytest.mark.parametrize(
    "rename",
    [lambda name: name, lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name],
    ids=["flat names", "language_model names"],
)
def test_l4_stock_gemma_is_told_by_the_missing_projection(tmp_path, rename):
    header = text_encoder_without(tmp_path, "text_embedding_projection.", rename=rename)
    with pytest.raises(FileError, match="text_embedding_projection.*gemma4-12b-with-proj-ltx-2.5"):
        require_kind(header, "text_encoder", SLOTS["text_encoder"])
    with pytest.raises(FileError, match="video_vae: .* without the LTX projections, wanted a video VAE"):
        require_kind(header, "video_vae", SLOTS["video_vae"])


def test_a_text_encoder_of_another_family_is_named_as_such(tmp_path):
    header = read_header(write_sparse(tmp_path / "x.safetensors", {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 4]}}, None))
    assert identify(header) is Kind.STOCK_TEXT_ENCODER


def test_the_prefix_of_a_monolithic_file_is_accepted(tmp_path):
    for name, kind in (("ltx-2.5-video-vae-bf16", Kind.VIDEO_VAE_DIFFUSION), ("ltx-2.5-video-vae-conv-bf16", Kind.VIDEO_VAE_CONV)):
        tensors = {"vae." + n: t for n, t in fixture(name)["tensors"].items()}
        assert identify(read_header(write_sparse(tmp_path / f"{name}.safetensors", tensors, None))) is kind


def test_a_file_of_nothing_is_unknown(tmp_path):
    header = read_header(write_sparse(tmp_path / "x.safetensors", {}, None))
    with pytest.raises(FileError, match="something this pack does not know, wanted an audio VAE"):
        require_kind(header, "audio_vae", SLOTS["audio_vae"])
