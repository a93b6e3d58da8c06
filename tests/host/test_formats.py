"""Files of other storage formats on a real server."""

import shutil

import pytest
from comfyui_ltx25.ltx25.tiny import TinyFiles
from comfyui_ltx25.tests.support.quantised import write_gguf

pytest.importorskip("gguf")  # writes the test's file


@pytest.fixture(scope="module")
def gguf(tiny, host):
    """The tiny transformer as GGUF, put into the folder while the server runs."""
    files = TinyFiles.below(tiny)
    path = write_gguf(files.transformer, host.base / "models" / "diffusion_models" / "ltx-2.5-tiny-dev-Q8_0.gguf")
    shutil.copy(path, host.base / "models" / "text_encoders" / "not-a-text-encoder.gguf")
    yield path
    path.unlink()
    (host.base / "models" / "text_encoders" / "not-a-text-encoder.gguf").unlink()


def options(host, node, slot):
    return host.get(f"/object_info/{node}")[node]["input"]["required"][slot]


def test_gguf_files_are_listed_for_our_loader_alone(gguf, host):
    assert gguf.name in str(options(host, "LoadLTX25Checkpoint", "transformer"))
    assert gguf.name not in str(options(host, "UNETLoader", "unet_name"))


def test_a_gguf_transformer_renders_a_file(gguf, host, api, find):
    prompt = api()
    prompt[find(prompt, "LoadLTX25Checkpoint")]["inputs"]["transformer"] = gguf.name
    run = host.run(prompt)
    assert run.ok, run.error
    assert [file for file in run.files() if file["filename"].endswith(".mp4")]


def test_l3_another_models_gguf_is_refused_before_anything_runs(gguf, host, api, find):
    prompt = api()
    loader = find(prompt, "LoadLTX25Checkpoint")
    prompt[loader]["inputs"]["text_encoder"] = "not-a-text-encoder.gguf"
    run = host.run(prompt)
    assert run.status == "error" and run.error["node_id"] == loader
    message = run.error["exception_message"].strip()
    assert "text_encoder" in message and "not-a-text-encoder.gguf" in message and "\n" not in message
