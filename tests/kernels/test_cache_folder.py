import re
from pathlib import Path

import pytest
from comfyui_ltx25.kernels import attention, cache_folder
from comfyui_ltx25.ltx25.prompt_cache import prompts_folder

PACK = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {}, "~/.cache/ltx25"),
        ("darwin", {"LOCALAPPDATA": "/local"}, "~/.cache/ltx25"),
        ("linux", {"XDG_CACHE_HOME": "/xdg", "LOCALAPPDATA": "/local"}, "/xdg/ltx25"),
        ("linux", {"XDG_CACHE_HOME": ""}, "~/.cache/ltx25"),
        ("win32", {"XDG_CACHE_HOME": "/xdg", "LOCALAPPDATA": "/local"}, "/local/ltx25"),
        ("win32", {}, "~/.cache/ltx25"),
        ("win32", {"LTX25_CACHE": "/own", "LOCALAPPDATA": "/local"}, "/own"),
        ("linux", {"LTX25_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("linux", {"LTX25_CACHE": "~/own"}, "~/own"),
        ("linux", {"XDG_CACHE_HOME": "~/xdg"}, "~/xdg/ltx25"),
    ],
)
def test_the_folder_is_the_users_own_or_lies_in_the_systems(platform, variables, folder, monkeypatch):
    for name in ("LTX25_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache_folder.sys, "platform", platform)
    wanted = Path(folder).expanduser()
    assert cache_folder.cache_folder() == wanted and prompts_folder() == wanted / "prompts"


def test_there_is_one_rule_for_it():
    assert attention._CHOICES._file.name == "attention.json"
    named = [path for top in ("ltx25", "kernels", "nodes") for path in (PACK / top).rglob("*.py") if re.search("XDG_CACHE_HOME|LOCALAPPDATA", path.read_text(encoding="utf-8"))]
    assert named == [PACK / "kernels" / "cache_folder.py"]
