"""ComfyUI entry point. Importing this file imports nothing else: pytest, ruff and scripts load it too."""

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    from .nodes import LTX25Extension

    return LTX25Extension()
