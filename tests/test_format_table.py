"""README's table of storage formats is what tests/support/format_errors.py measures."""

import re
from pathlib import Path

import pytest
from comfyui_ltx25.tests.support.format_errors import HEAD, ROWS, measured

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_formats_is_as_measured(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("comfy_kitchen")
    said = {}
    for row in README.split(HEAD)[1].split("\n\n")[0].splitlines():
        name, *numbers = (cell.strip() for cell in row.strip("| ").split(" | "))
        said[name] = [float(re.fullmatch(r"([\d.]+) %", number)[1]) / 100 for number in numbers]
    assert said.keys() == ROWS.keys()
    for name, distances in measured(tmp_path):
        assert said[name] == pytest.approx(distances, rel=0.15, abs=2e-4), name  # two digits, and another machine's rounding
