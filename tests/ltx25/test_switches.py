"""Environment variables that are misspelt are refused before anything runs, on any device."""

import re
from pathlib import Path

import pytest
from comfyui_ltx25.ltx25.cli import main
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.switches import CHOICES, OTHERS, _say_once, check_switches, tell_unused
from comfyui_ltx25.tests.support.engine import engine

PACK = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("LTX25_ATTENTION", "flahs", "LTX25_ATTENTION is 'flahs', wanted cudnn, flash3, flash, efficient or math"),
        ("LTX25_KERNELS", "off", "LTX25_KERNELS is 'off', wanted triton or reference"),
        ("LTX25_GRAPHS", "OFF", "LTX25_GRAPHS is 'OFF', wanted on or off"),
        ("LTX25_RECORD_PROMPTS", "yes", "LTX25_RECORD_PROMPTS is 'yes', wanted 0 or 1"),
        ("LTX25_ATENTION", "math", "LTX25_ATENTION is read by nothing; the variable is called LTX25_ATTENTION"),
        ("LTX25_GRAPH", "off", "the variable is called LTX25_GRAPHS"),
        ("LTX25_CACHE_MB", "2", "the variable is called LTX25_CACHE_GB"),
    ],
)
def test_a_misspelt_switch_is_one_sentence_on_a_cpu_too(monkeypatch, capsys, tmp_path, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=re.escape(words)):
        engine()  # what the loader node does
    assert main(["render", "--prompt", "a", "-o", str(tmp_path / "x.mp4"), "--device", "cpu", "--runs", str(tmp_path / "runs")]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), [*((name, choice) for name, choices in CHOICES.items() for choice in (*choices, "")), ("LTX25_OF_ANOTHER_PROGRAM", "1")])
def test_every_choice_an_empty_one_and_names_of_others_are_legal(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    check_switches()


def test_a_back_end_forced_where_none_is_chosen_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("LTX25_ATTENTION", "math")
    _say_once.cache_clear()
    for device in ("cuda", "cpu", "cpu"):
        tell_unused(device)
    engine()
    assert [told.getMessage().split(":")[0] for told in caplog.records] == ["LTX25_ATTENTION=math does nothing on this device (cpu)"]


def test_the_table_in_the_readme_lists_them_all():
    listed = re.findall(r"^\| `(LTX25_\w+)` \|", (PACK / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted([*CHOICES, *OTHERS])


def test_no_other_variable_is_read():
    sources = [path for folder in ("ltx25", "kernels", "nodes") for path in (PACK / folder).rglob("*.py") if path.name != "switches.py"]
    read = {name for path in sources for name in re.findall(r"""environ(?:\.get\(|\[)["'](LTX25_\w+)""", path.read_text(encoding="utf-8"))}
    assert read == {*CHOICES, *OTHERS}
