"""The README against the repository: what it names exists, and what exists and matters is named."""

import re
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.cli import COMMANDS, parser
from comfyui_ltx25.ltx25.request import DEFAULT_NEGATIVE
from comfyui_ltx25.tests.support.contract import NODES
from comfyui_ltx25.tests.support.files import fixture_names

PACK = Path(__file__).resolve().parents[1]
README = (PACK / "README.md").read_text(encoding="utf-8")


def test_every_environment_variable_is_described_and_every_described_one_is_read():
    code = "\n".join(path.read_text(encoding="utf-8") for folder in ("ltx25", "kernels", "nodes") for path in (PACK / folder).rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get\(|\[)["'](LTX25_\w+)""", code)) | set(re.findall(r"""getenv\(["'](LTX25_\w+)""", code))
    assert read == set(re.findall(r"`(LTX25_[A-Z_]+)`", README.split("| environment variable")[1].split("\n\n")[0]))


def test_the_node_table_has_every_node_with_every_input_and_output():
    table = {row.split("|")[1].strip().strip("`"): row for row in README.split("## Nodes")[1].split("\n## ")[0].splitlines() if row.startswith("| `")}
    assert set(table) == set(NODES)
    for node, (inputs, outputs) in NODES.items():
        missing = [name for name, *_ in (*inputs, *outputs) if not re.search(rf"\b{name}\b", table[node])]
        assert not missing, (node, missing)


def test_the_workflow_table_has_every_workflow():
    table = README.split("## Workflows")[1].split("\n## ")[0]
    rows = "\n".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(path.stem for path in (PACK / "workflows").glob("*.json"))


def test_files_to_download_are_published_ones():
    named = re.findall(r"`([\w.-]+)\.safetensors`", README)
    assert named and set(named) <= set(fixture_names())


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_lead_somewhere(target):
    assert (PACK / target).exists()


def test_the_tree_names_what_exists():
    tree = README.split("## What is where")[1].split("\nCode:")[0]
    folder = PACK
    for line in tree.splitlines():
        if not line.startswith("    "):
            continue
        depth, names = (len(line) - len(line.lstrip()) - 4) // 2, re.split(r"  +", line.strip())[0]
        base = PACK if depth == 0 else folder
        for name in names.split(", "):
            assert (base / name).exists(), f"{base.name}/{name}"
        if depth == 0 and names.endswith("/"):
            folder = PACK / names
    tracked = {path.name for path in PACK.iterdir() if path.is_dir() and any(path.rglob("*.py")) and not path.name.startswith(".")}
    missing = [name for name in tracked - {"build", "__pycache__"} if f"    {name}/" not in tree]
    assert not missing, missing


def test_the_negative_prompt_is_the_default_one():
    assert f"> {DEFAULT_NEGATIVE}\n" in README


def test_commands_shown_are_commands_that_exist():
    known = {command.__name__.rsplit(".", 1)[1] for command in COMMANDS}
    shown = set(re.findall(r"ltx25 (\w+)", "\n".join(re.findall(r"^    .*ltx25 .*$|`ltx25 [^`]+`", README, re.MULTILINE))))
    assert shown <= known and {"render", "tiny"} <= shown
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", README)) - {"--help"}
    choices = parser()._subparsers._group_actions[0].choices
    assert flags <= set(choices["render"]._option_string_actions) | set(choices["plan"]._option_string_actions)


def test_every_command_sets_itself_up():
    commands = [line.strip() for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2
    assert all("pip install torch" in command and "pip install -e" in command for command in commands)
    assert commands[0].endswith("-o out.mp4") and commands[1].endswith("/pytest")
