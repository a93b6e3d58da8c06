import asyncio
import importlib.util
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_ltx25.tests.support.contract import NODES

PACK = Path(__file__).resolve().parents[1]
HELP = PACK / "nodes" / "web" / "docs"


def load_as_the_host_does(folder):
    """ComfyUI names the module after the folder's path, with dots replaced."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("name", ["ltx25", "comfyui-ltx25", "LTX 2.5 engine.v1"])
def test_folder_of_any_name_loads_and_offers_one_entry_point(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(PACK / "__init__.py", folder)
    module = load_as_the_host_does(folder)
    assert inspect.iscoroutinefunction(module.comfy_entrypoint)
    assert module.WEB_DIRECTORY == "./nodes/web"
    # A V1 mapping, even an empty one, would make the host ignore the entry point without a word.
    assert not hasattr(module, "NODE_CLASS_MAPPINGS")


def test_importing_the_root_imports_nothing_else():
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', r'{PACK / '__init__.py'}')\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "before = set(sys.modules)\n"
        "spec.loader.exec_module(module)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_entry_point_needs_the_host():
    """Without ComfyUI the pack says what is missing, at the moment it is asked for nodes and not before."""
    if importlib.util.find_spec("comfy_api"):
        pytest.skip("ComfyUI is importable here")
    with pytest.raises(ModuleNotFoundError, match="comfy_api"):
        asyncio.run(sys.modules["comfyui_ltx25"].comfy_entrypoint())


@pytest.mark.parametrize("node", NODES)
def test_every_node_has_a_help_page_that_names_its_inputs(node):
    text = (HELP / f"{node}.md").read_text()
    missing = [entry for entry, _, _ in NODES[node][0] if entry not in text and entry not in ("engine", "text")]
    assert not missing, f"{node}.md says nothing about {missing}"


def test_every_help_page_belongs_to_a_node():
    assert {path.stem for path in HELP.glob("*.md")} == set(NODES)


@pytest.mark.parametrize("path", sorted((PACK / "locales").glob("*/nodeDefs.json")), ids=lambda path: path.parent.name)
def test_translations_name_every_node_input_and_output_and_nothing_else(path):
    found = json.loads(path.read_text())
    assert set(found) == set(NODES)
    for node, (inputs, outputs) in NODES.items():
        entry = found[node]
        assert entry["display_name"] and not entry["description"].isascii(), f"{node} is not translated"
        assert [*entry["inputs"]] == [name for name, _, _ in inputs], node
        assert [*entry["outputs"]] == [str(slot) for slot in range(len(outputs))], node
        assert all(told["name"] and not told["tooltip"].isascii() for told in entry["inputs"].values()), node
        assert all(told["name"] for told in entry["outputs"].values()), node


def test_x3_installing_builds_nothing_and_pins_nothing_heavy():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((PACK / "pyproject.toml").read_text())
    assert project["build-system"] == {"requires": ["setuptools>=65"], "build-backend": "setuptools.build_meta"}
    needed = [requirement for requirement in project["project"]["dependencies"] if "==" in requirement or "git+" in requirement]
    assert not needed
    assert {requirement.split(">")[0] for requirement in project["project"]["dependencies"]} <= {
        "torch", "safetensors", "numpy", "einops", "tokenizers", "pillow", "av",
    }  # fmt: skip


def test_x2_the_supported_host_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    assert tomllib.loads((PACK / "pyproject.toml").read_text())["tool"]["comfy"]["requires-comfyui"] == ">=0.33.0"


def test_a_published_archive_leaves_out_tests_and_nothing_that_a_run_needs():
    """Beside the packages: what the host reads of a pack's folder, and what its users do."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    patterns = [line for line in (PACK / ".comfyignore").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"/[\w.]+/", pattern) for pattern in patterns), "each names one folder at the top, and no more"
    left_out = {pattern.strip("/") for pattern in patterns}
    packages = tomllib.loads((PACK / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    needed = {package.split(".")[1] for package in packages if "." in package} | {"__init__.py", "locales", "workflows", "pyproject.toml", "README.md", "LICENSE"}
    there = {path.name for path in PACK.iterdir()}
    assert needed <= there and left_out <= there and not needed & left_out
    assert "tests" in left_out


BY_PYTEST = [path for path in sorted((PACK / "tests" / "bench").glob("*.py")) if "\ndef test_" in path.read_text()]


@pytest.mark.parametrize("path", BY_PYTEST, ids=lambda path: path.stem)
def test_a_benchmark_for_pytest_that_is_run_as_a_program_says_how_it_is_run(path, capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"the cases of this benchmark are run by pytest: pytest -s tests/bench/{path.name}\n"


PROGRAMS = [path for path in sorted((PACK / "tests" / "bench").glob("*.py")) if "\n    program(main)\n" in path.read_text()]
WRONG = {  # arguments that no machine takes, and what is said
    "dit_step": (["--only", "foo"], "invalid choice: 'foo' (choose from"),
    "error": (["--steps", "many"], "'many' is not a whole number; write it like 8."),
    "kernels": (["--tokens", "many"], "'many' is not a whole number; write it like 8."),
    "load": (["no such file.safetensors"], "no such file.safetensors does not exist"),
    "plan_memory": (["--seen", "128x96"], "'128x96' is no clip; write width, height and frames like 128x96x25."),
    "published_files": (["x", "--device", "toaster"], "device 'toaster' cannot be used"),
    "sanitize": (["--only", "foo"], "no such op: foo; there are "),
    "stream": (["x", "--cap-gib", "12", "--size", "768"], "size '768' is not width x height in px"),
    "text": (["--tokens", "many"], "'many' is not a whole number; write it like 8."),
    "two_stage": ([], "give either the folder of the files, as published_files.py fills it, or --tiny."),
}
NEED_A_CARD = {"dit_step": [], "error": [], "kernels": [], "stream": ["x", "--cap-gib", "12"], "text": []}


@pytest.mark.parametrize(("name", "words", "sentence"), [
    *((name, *WRONG.get(name, ([], None))) for name in (path.stem for path in PROGRAMS)),
    *((name, words, "this benchmark measures a CUDA device, and torch finds none;") for name, words in NEED_A_CARD.items()),
])  # fmt: skip
def test_a_benchmark_says_in_one_sentence_what_is_wrong_with_its_arguments_or_machine(name, words, sentence, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PACK / "tests" / "bench" / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith(f"{name}.py: ") and sentence in shown and shown.count("\n") == 1


def test_every_benchmark_is_a_program_or_run_by_pytest():
    assert {path.stem for path in (*PROGRAMS, *BY_PYTEST)} == {path.stem for path in (PACK / "tests" / "bench").glob("*.py")} - {"busy", "by_pytest", "program", "sizes"}
