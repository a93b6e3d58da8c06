"""What the phases of one set of files need beside their weights, and what to change where that cannot be had.

The sizes themselves are working.py's; here they meet the files, the options and what a phase was given.
"""

from __future__ import annotations

import torch

from .device import compute_dtype
from .fitting import Way
from .instrument.memory import host_free, is_unified
from .instrument.units import bytes_text
from .job import Options
from .parts import TRANSFORMER, VIDEO_VAE, Opened
from .preparing import Prepared
from .residency import Arbiter
from .room import check_host_room, check_room, smaller_clip
from .shapes import OUTPUT_RATE, VideoLatentShape
from .text import MAX_TOKENS
from .text import working_bytes as text_bytes
from .working import decoding_bytes, frames_bytes, sampling_bytes, seeing_bytes, wave_bytes

DECODE_ROOM = 2 << 30  # bytes a video decode may ask others to leave for its speed; more only where it cannot do without


class Sizing:
    """Of one set of files and options on one device."""

    def __init__(self, opened: Opened, options: Options, device: torch.device) -> None:
        self._opened = opened
        self._options = options
        self._device = device
        self._itemsize = compute_dtype(device).itemsize

    # Sampling

    def ways(self, ready: Prepared) -> list[Way]:
        """How the steps may run, fastest first."""
        legs = self._options.legs
        wanted = (True, False) if legs == "auto" and self._options.batched(self._device) else (self._options.batched(self._device),)
        names = {True: "legs side by side", False: "legs one after the other"}
        return [Way(names[batched], self.sampling(ready, batched), batched) for batched in wanted]

    def sampling(self, ready: Prepared, batched: bool) -> int:
        """Bytes of a guided step, its legs side by side or not."""
        legs = max((len(plan.legs) for plan in ready.job.plans if plan is not None), default=1)
        working = sampling_bytes(self._opened.dit, ready.tokens, legs, batched, ready.batch, self._itemsize, self._device.type)
        return max(working, self._opened.parts[TRANSFORMER].making)

    def sampling_advice(self, ready: Prepared, short: int) -> str:
        """What would make a denoise fit that lacks `short` bytes."""
        options = self._options
        ways = [f"{name}={value}" for name, value, small in (("residency", options.residency, "resident"), ("legs", options.legs, "batched")) if value == small]
        if ways:
            return f"choose another setting than {' and '.join(ways)}"
        working = self.sampling(ready, False)
        if short >= working:
            return f"free {bytes_text(short)}, or use a smaller model file"
        share = 1 - max(short, working // 5) / working
        return f"make the clip smaller or shorter, to about {100 * share:.0f} % of its {sum(ready.tokens.values())} tokens"

    # Text

    def prompt(self) -> Way:
        return Way("one prompt", text_bytes(self._opened.tower, MAX_TOKENS, self._itemsize))

    def prompt_advice(self, short: int) -> str:
        """What would make the text encoder fit that lacks `short` bytes."""
        if self._options.residency == "resident":
            return "choose residency auto or stream"
        return f"free {bytes_text(short)}, for example by closing what else uses the device" if short > 0 else "close what else uses the device"

    # Pictures

    def decoding(self, latent: torch.Tensor, itemsize: int) -> int:
        """What a decode in numbers of `itemsize` bytes needs, and up to DECODE_ROOM of what makes it faster. 0 for a latent that will be refused."""
        config = self._opened.video.decoder
        if latent.ndim != 5 or 0 in latent.shape:
            return 0
        shape = VideoLatentShape(*latent.shape[1:])
        smallest, fastest = (decoding_bytes(config, shape, itemsize, self._device.type, room) for room in (0, None))
        return max(smallest, min(fastest, DECODE_ROOM))

    def seeing(self, images: torch.Tensor) -> int:
        """What encoding frames (F, H, W, 3) needs. 0 for frames that will be refused."""
        config = self._opened.video.encoder
        if images.ndim != 4 or 0 in images.shape:
            return 0
        frames, height, width, _ = images.shape
        side = config.compression.side
        shape = VideoLatentShape(config.latent_channels, (frames - 1) // config.compression.frames + 1, height // side, width // side)
        return seeing_bytes(config, shape, self._itemsize)

    # What a decode makes on the host

    @property
    def one_memory(self) -> bool:
        """Whether what lies on the host takes room from the device."""
        return self._device.type == "cpu" or is_unified(self._device)

    def check_frames(self, latent: VideoLatentShape, batch: int, arbiter: Arbiter) -> None:
        """Raise InputError where host memory has no room for the frames of `batch` clips, with all that may leave it gone."""
        compression = self._opened.video.compression
        clip = latent.pixels(compression)
        made, beside, room = frames_bytes(clip, batch), 0, host_free()
        if self.one_memory and room is not None:  # the decoder works in it, and other parts may leave it
            beside = self._opened.parts[VIDEO_VAE].least
            beside += decoding_bytes(self._opened.video.decoder, latent, self._itemsize, self._device.type, 0)
            room = arbiter.room(self._device)

        def advice(share: float) -> str:
            return smaller_clip(clip, compression, batch, max(0, room - beside) / made, latents=False) + "; a latent that was made is kept"

        check_room(f"decoding {batch * clip.frames} frames of {clip.width} x {clip.height} px", made + beside, room, advice)

    def check_sound(self, samples: int, batch: int) -> None:
        """Raise InputError where host memory has no room for `batch` waves of `samples` at 48 kHz."""
        seconds = samples / OUTPUT_RATE

        def advice(share: float) -> str:
            return f"make the clip at most {seconds * share:.0f} s long"

        check_host_room(f"decoding {batch * seconds:.0f} s of sound", wave_bytes(samples, batch), advice)
