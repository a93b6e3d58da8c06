"""From a finished latent to files, so that the latent outlives whatever happens on the way."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...kernels.memory import is_out_of_memory
from ..engine import Engine
from ..errors import LTX25Error
from ..exr import check_folder, write_exr
from ..hdr import SDR
from ..instrument import DeviceMeter, RunRecord, TextSink, Watch
from ..instrument.units import counted, path_text
from ..kept import Kept
from ..mux import check_output, write_video
from ..request import MOST_SEED
from ..shapes import clip_samples


def tell(text: str) -> None:
    """Show a line beside what the command prints."""
    print(text, file=sys.stderr, flush=True)


def recorded(record: RunRecord, device: torch.device, quiet: bool, work: Callable[[Watch], list[str]]) -> int:
    """Do `work` under a record, shown as it goes unless `quiet`, then print its lines and where the record is; the exit code."""
    with record:
        watch = Watch([record] if quiet else [TextSink(tell), record], DeviceMeter(device))
        try:
            lines = work(watch)
        finally:
            watch.finish()
    if not quiet:
        tell(record.table())
    print("\n".join(lines))
    if record.path is not None:
        print(f"record: {record.path}")
    return 0


def checked_output(path: Path, transfer: str) -> Path:
    """The path, or InputError where no clip decoded by `transfer` can be written there."""
    return check_output(path) if transfer == SDR else check_folder(path)


def clip_paths(output: Path, clips: int) -> list[Path]:
    """Where each clip of a batch goes."""
    return [output] if clips == 1 else [output.with_stem(f"{output.stem}-{number}") for number in range(1, clips + 1)]


DONE = "the finished latent is kept, {command} goes on from there"
FIRST_STAGE = "the clip of stage 1 is kept, {command} shows it"


@contextlib.contextmanager
def keeping(kept: Kept, output: Path, told: str = DONE) -> Iterator[None]:
    """The latent lies in a file until the block is done: a process that is killed says nothing. Every error says where, by `told`."""
    path = None
    try:
        path = kept.save(output)
    except Exception as error:  # whatever it is: a clip without a spare latent is better than neither
        reason = (getattr(error, "strerror", None) or f"{type(error).__name__}: {error}").rstrip(".")
        tell(f"note: the latent cannot be kept ({reason}); it is lost where what follows fails")
    try:
        yield
    except BaseException as error:
        if path is None:
            raise
        where = told.format(command=f"`ltx25 decode {_quoted(path)} -o {_quoted(output)}`")
        if isinstance(error, LTX25Error):
            raise type(error)(f"{str(error).rstrip('.')}; {where}.") from error
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"{str(error).splitlines()[0].rstrip('.')}; {where}.") from error
        tell(f"note: {where}")
        raise
    if path is not None:
        path.unlink(missing_ok=True)


def _quoted(path: Path) -> str:
    """As a shell takes it for one name."""
    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


def finish(engine: Engine, kept: Kept, tiling: str, output: Path, record: RunRecord, watch: Watch) -> list[str]:
    """Decode every clip and write it; returns a line about each file."""
    clip = engine.video_shape(kept.video)
    frames = engine.decode_video(kept.video, kept.seed, tiling, watch, kept.transfer)
    sound = engine.decode_audio(kept.audio, clip_samples(clip.frames, kept.frame_rate), watch) if kept.own is None else kept.own.expand(len(kept.video), -1, -1)
    write, lines = write_video if kept.transfer == SDR else write_exr, []
    for item, (path, pictures, wave) in enumerate(zip(clip_paths(output, len(sound)), frames.split(clip.frames), sound, strict=True)):
        seed = (kept.seed + item) % (MOST_SEED + 1)  # as its noise is drawn: the seed that is told makes the clip again
        write(path, pictures, wave, kept.frame_rate, {"seed": str(seed), "record": path_text(record.path)}, watch)
        lines.append(f"{path}: {counted(clip.frames, 'frame')} of {clip.width} x {clip.height} px at {kept.frame_rate:g} frames/s, seed {seed}")
    return lines
