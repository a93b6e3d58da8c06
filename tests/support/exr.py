"""Reading EXR files, apart from how the pack writes them."""

from pathlib import Path

import av
import numpy as np
import torch


def read_exr(source: Path | bytes) -> torch.Tensor:
    """(H, W, 3) float32 of a file or its bytes, from the planes of its green, blue and red channel."""
    codec = av.CodecContext.create("exr", "r")
    (frame,) = [*codec.decode(av.Packet(source if isinstance(source, bytes) else source.read_bytes())), *codec.decode(None)]
    assert frame.format.name == "gbrpf32le"
    green, blue, red = (np.frombuffer(plane, np.float32).reshape(frame.height, -1)[:, : frame.width] for plane in frame.planes)
    return torch.from_numpy(np.stack([red, green, blue], -1))
