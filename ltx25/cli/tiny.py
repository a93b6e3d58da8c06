"""`ltx25 tiny DIR`: write the tiny checkpoint."""

from __future__ import annotations

import argparse

from ..instrument.units import bytes_text
from ..tiny import write_tiny
from .arguments import path_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tiny",
        help="write a tiny LTX-2.5 checkpoint of random weights",
        description="Write a complete set of LTX-2.5 files in small: published names and layout, random weights, a few MB. "
        "DIR may be ComfyUI's models folder.",
    )
    parser.add_argument("folder", metavar="DIR", type=path_of, help="gets diffusion_models, text_encoders, vae, latent_upscale_models, model_patches and loras")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for path in vars(write_tiny(arguments.folder, arguments.seed)).values():
        print(f"{path}  {bytes_text(path.stat().st_size)}")
    return 0
