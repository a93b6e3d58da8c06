"""Run by test_browser.py with a Python that has playwright: load UI workflows in the real frontend of a running server.

    browser_check.py URL WORKFLOW.json...     prints {name: {missing, errors, dialogs, api}} as JSON
"""

import json
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from comfyui_browser import open_ui  # noqa: E402


class Server:
    """As much of comfyui_host.Host as the browser needs."""

    def __init__(self, url):
        self.url = url

    def request(self, method, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


url, *paths = sys.argv[1:]
out = {}
with open_ui(Server(url)) as ui:
    for path in map(Path, paths):
        seen = ui.load(json.loads(path.read_text()))
        out[path.stem] = {"missing": seen["missing"], "errors": seen["errors"], "dialogs": ui.dialogs(), "api": ui.to_api()}
print(json.dumps(out))  # noqa: T201
