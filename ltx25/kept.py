"""A finished latent as a file of its own: what a denoise made outlives a decode that fails, and can be decoded again."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import read_header, read_tensors, write_file
from .engine import Files
from .errors import FileError, InputError
from .hdr import check_transfer
from .shapes import check_frame_rate

SUFFIX = ".latent.safetensors"
FORMAT = "ltx25 latent 1"


@dataclass(frozen=True, eq=False)
class Kept:
    """video (B, C, t, h, w) and audio (B, c, n, bins), float32 CPU; frame_rate in frames/s; item i was made with seed + i.

    own: the sound that goes out with every clip in place of a decoded one, (1, 2, N) at 48 kHz; None: there is none. files: the
    model it was made with, by path. transfer: how its frames are to be decoded (hdr.TRANSFERS). record: the path of its run's, ""
    where none could be written.
    """

    video: torch.Tensor
    audio: torch.Tensor
    own: torch.Tensor | None
    frame_rate: float
    seed: int
    files: Files
    transfer: str
    record: str

    def save(self, output: Path) -> Path:
        """Write it beside `output`, or where that has no room into the folder for temporary files; never over another one.

        The file is whole or not there. Raises OSError where neither folder takes it.
        """
        metadata = {
            "format": FORMAT,
            "frame_rate": str(self.frame_rate),
            "seed": str(self.seed),
            "transfer": self.transfer,
            "record": self.record,
            "files": json.dumps({slot: str(Path(path).absolute()) for slot, path in vars(self.files).items()}),
        }
        streams = {"video": self.video, "audio": self.audio, "own": self.own}
        tensors = {name: stream.contiguous() for name, stream in streams.items() if stream is not None}
        try:
            path = _unused(output.parent, output.stem)
            write_file(path, tensors, metadata)
        except OSError:
            path = _unused(Path(tempfile.gettempdir()), output.stem)
            write_file(path, tensors, metadata)
        return path

    @staticmethod
    def read(path: Path) -> Kept:
        """Raises FileError for a file that is missing, damaged or something else."""
        header = read_header(path)
        metadata = header.metadata
        axes = {name: len(info.shape) for name, info in header.tensors.items()}
        if metadata.get("format") != FORMAT or axes not in ({"video": 5, "audio": 4}, {"video": 5, "audio": 4, "own": 3}):
            raise FileError(f"{path} is no latent that 'ltx25 render' kept; wanted a file that ends in {SUFFIX}.")
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in header.tensors.items()}
        read_tensors(header, tensors, lambda read: None)
        try:
            files = Files(**{slot: Path(name) for slot, name in json.loads(metadata["files"]).items()})
            told = (check_frame_rate(float(metadata["frame_rate"])), int(metadata["seed"]), files, check_transfer(metadata["transfer"]), metadata.get("record", ""))
            return Kept(tensors["video"], tensors["audio"], tensors.get("own"), *told)
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise FileError(f"{path} is damaged ({error}); its clip has to be sampled again.") from None


def _unused(folder: Path, stem: str) -> Path:
    """A name that no latent has: one that is there waits for its decode, and may be of another clip."""
    paths = (folder / f"{stem}{f'-{number}' if number > 1 else ''}{SUFFIX}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
