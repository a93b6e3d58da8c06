import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25 import cli
from comfyui_ltx25.ltx25 import command as console
from comfyui_ltx25.ltx25.checkpoint import Kind, identify, read_header
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.tests.support.tiny import tiny_files

PACK = Path(__file__).resolve().parents[3]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command.__name__.rsplit(".", 1)[1] in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "ltx25: the following arguments are required: command; see `ltx25 --help`."),
        (["nothing"], "ltx25: command: invalid choice: 'nothing' "),
        (["render"], "ltx25 render: the following arguments are required: --prompt, -o/--output; see `ltx25 render --help`."),
        (["tiny"], "ltx25 tiny: the following arguments are required: DIR; see `ltx25 tiny --help`."),
        (["tiny", "x", "y"], "ltx25: unrecognized arguments: y; see `ltx25 --help`."),
        (["tiny", "x", "--seed", "1.5"], "ltx25 tiny: --seed: '1.5' is not a whole number; write it like 8."),
        (["render", "--seed", "1.5"], "ltx25 render: --seed: '1.5' is not a whole number; write it like 8."),
        (["render", "--video-cfg", "much"], "ltx25 render: --video-cfg: 'much' is not a number; write it like 0.7."),
        (["render", "--sigmas", "abc"], "ltx25 render: --sigmas: sigmas 'abc' is not a list of numbers; write them like 1,0.725,0.42,0."),
        (["plan", "--sigmas", "abc"], "ltx25 plan: --sigmas: sigmas 'abc' is not a list of numbers; write them like 1,0.725,0.42,0."),
        (["plan", "--budget", "abc"], "ltx25 plan: --budget: 'abc' is no time; write it like 90s, 10m or 1.5h."),
        (["plan", "--memory", "foo"], "ltx25 plan: --memory: 'foo' is no memory size; write it like 24G."),
        (["plan", "--legs", "none"], "ltx25 plan: --legs: invalid choice: 'none' "),
        (["runs", "fly"], "ltx25 runs: {show,plot,compare,fit}: invalid choice: 'fly' "),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_sentence_and_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith(sentence) and shown.endswith(".\n") and shown.count("\n") == 1


@pytest.mark.parametrize(("error", "code", "words"), [(InputError("steps 0 is too few."), 2, "ltx25 tiny: steps 0 is too few."), (KeyboardInterrupt(), 130, "cancelled")])
def test_wrong_input_and_ctrl_c_end_in_one_line(error, code, words, monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli.tiny, "write_tiny", fail)
    assert cli.main(["tiny", str(tmp_path)]) == code
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1


def test_tiny_writes_the_set_into_comfyui_folders(tmp_path, capsys):
    assert cli.main(["tiny", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    paths = [Path(line.split("  ")[0]) for line in shown]
    assert len(paths) == 10 and all(path.is_file() for path in paths)
    assert {path.parent.name for path in paths} == {"diffusion_models", "text_encoders", "vae", "latent_upscale_models", "model_patches", "loras"}
    assert Kind.UNKNOWN not in {identify(read_header(path)) for path in paths}


def test_the_installed_command_is_this_one():
    text = (PACK / "pyproject.toml").read_text()
    assert 'ltx25 = "comfyui_ltx25.ltx25.command:main"' in text


def test_ctrl_c_while_libraries_are_still_read_is_one_line_and_code_130(monkeypatch, capsys):
    def interrupted(name, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    code = console.main()
    monkeypatch.undo()
    assert code == 130 and capsys.readouterr().err == "ltx25: cancelled\n"


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_during_a_render_leaves_no_file_and_a_finished_record(tmp_path):
    """A real process and a real signal: cancelled while it samples."""
    import signal
    import time

    script = (
        # Shells start background jobs with SIGINT ignored, and children inherit that: a terminal's process does not.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import importlib.util, sys; pack = sys.argv[1]; "
        "spec = importlib.util.spec_from_file_location('comfyui_ltx25', pack + '/__init__.py'); "
        "module = importlib.util.module_from_spec(spec); sys.modules['comfyui_ltx25'] = module; spec.loader.exec_module(module); "
        "from comfyui_ltx25.ltx25.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    arguments = ["render", "--prompt", "a cat", "-o", str(tmp_path / "x.mp4"), "--runs", str(tmp_path / "runs"), "--steps", "1000"]
    shutil.copytree(tiny_files().transformer.parents[1], tmp_path / "cache" / "tiny")
    environment = {**os.environ, "LTX25_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(PACK), *arguments], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    for line in process.stderr:
        if "step 2/1000" in line:
            process.send_signal(signal.SIGINT)
            asked = time.monotonic()
            break
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - asked < 10
    assert "cancelled" in rest.splitlines()[-1] and "Traceback" not in rest
    assert not (tmp_path / "x.mp4").exists() and not list(tmp_path.glob("*.part"))
    (record,) = (tmp_path / "runs").glob("*.jsonl")
    assert '"status":"cancelled"' in record.read_text().splitlines()[-1]
