"""README's tables of storage formats are what tests/support/format_errors.py measures."""

import re
from pathlib import Path

import pytest
from comfyui_ltx25.tests.support.format_errors import (
    ENCODER_HEAD,
    ENCODER_ROWS,
    HEAD,
    ROWS,
    measured,
    measured_encoders,
)

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
TABLES = {"transformer": (HEAD, ROWS, measured), "text encoder": (ENCODER_HEAD, ENCODER_ROWS, measured_encoders)}


@pytest.mark.parametrize("part", TABLES)
def test_the_table_of_formats_is_as_measured(part, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("comfy_kitchen")
    head, rows, measure = TABLES[part]
    said = {}
    for row in README.split(head)[1].split("\n\n")[0].splitlines():
        name, *numbers = (cell.strip() for cell in row.strip("| ").split(" | "))
        said[name] = [float(re.fullmatch(r"([\d.]+) %", number)[1]) / 100 for number in numbers]
    assert said.keys() == rows.keys()
    for name, distances in measure(tmp_path):
        assert said[name] == pytest.approx(distances, rel=0.15, abs=2e-4), name  # two digits, and another machine's rounding
