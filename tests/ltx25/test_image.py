"""Pictures before they are encoded: any size and layout in, one crop rule, the official compression."""

import math

import pytest
import torch
from comfyui_ltx25.ltx25.errors import InputError
from comfyui_ltx25.ltx25.image import compress, cover, every_other, prepare_images
from torch.nn import functional as F

SIZES = [(1, 1), (37, 91), (16, 4096), (4096, 16), (64, 96), (65, 95), (500, 333)]


def official_crop(images, height, width):
    """ltx_pipelines' rule through torch's own resize, of the whole picture."""
    scale = max(height / images.shape[1], width / images.shape[2])
    size = [math.ceil(side * scale) for side in images.shape[1:3]]
    big = F.interpolate(images.movedim(-1, 1), size=size, mode="bilinear", align_corners=False).movedim(1, -1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return big[:, top : top + height, left : left + width]


@pytest.mark.parametrize("height, width", SIZES)
def test_r6_any_picture_is_cropped_by_the_official_rule(height, width):
    images = torch.rand(2, height, width, 3)
    got = cover(images, 64, 96)
    assert got.shape == (2, 64, 96, 3)
    torch.testing.assert_close(got, official_crop(images, 64, 96), atol=2e-4, rtol=0)


def test_f4_the_centre_is_kept_and_nothing_is_squeezed():
    checker = (torch.arange(128)[None, :] // 8 + torch.arange(64)[:, None] // 8) % 2
    image = checker[None, :, :, None].float().expand(-1, -1, -1, 3)
    assert torch.equal(cover(image, 64, 64), image[:, :, 32:96])


def test_a_picture_of_the_right_size_stays_bit_for_bit():
    image = torch.rand(1, 64, 96, 3)
    assert torch.equal(prepare_images(image, 64, 96, 0), image)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_r6_grey_alpha_and_rgb(channels):
    image = torch.rand(3, 37, 91, channels)
    got = prepare_images(image, 64, 96, 0)
    assert got.shape == (3, 64, 96, 3) and got.dtype == torch.float32
    want = cover(image[..., :1].expand(-1, -1, -1, 3) if channels < 3 else image[..., :3], 64, 96)
    assert torch.equal(got, want)
    if channels == 1:
        assert torch.equal(prepare_images(image[..., 0], 64, 96, 0), got)


@pytest.mark.parametrize("crf", [18, 33])
@pytest.mark.parametrize("height, width", SIZES)
def test_compression_takes_every_size_and_changes_a_little(height, width, crf):
    smooth = F.interpolate(torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)), size=(height, width), mode="bilinear").movedim(1, -1)
    got = compress(smooth, crf)
    assert got.shape[1:3] == ((height, width) if min(height, width) < 2 else (height // 2 * 2, width // 2 * 2))
    assert (got - smooth[:, : got.shape[1], : got.shape[2]]).abs().mean() < 0.05


def test_compression_is_that_of_one_h264_frame_at_the_pictures_own_size():
    import io

    import av

    image = torch.rand(1, 36, 48, 3, generator=torch.Generator().manual_seed(1))
    pixels = (image[0] * 255).round().to(torch.uint8).numpy()
    held = io.BytesIO()
    with av.open(held, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1, options={"crf": "18", "preset": "veryfast"})
        stream.width, stream.height = 48, 36
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")))
        container.mux(stream.encode())
    held.seek(0)
    with av.open(held) as container:
        want = torch.from_numpy(next(container.decode(video=0)).to_ndarray(format="rgb24")).float() / 255
    assert torch.equal(compress(image, 18)[0], want)
    assert torch.equal(prepare_images(image, 64, 96, 18)[0], cover(want[None], 64, 96)[0])  # compressed first, resized after
    assert not torch.equal(compress(image, 18), image)


def test_input_is_not_changed():
    image = torch.rand(1, 37, 91, 4)
    before = image.clone()
    prepare_images(image, 64, 96, 18)
    assert torch.equal(image, before)


@pytest.mark.parametrize(
    "image, crf, words",
    [
        (torch.full((1, 8, 8, 3), torch.nan), 0, "192 values that are not finite"),
        (torch.zeros(1, 8, 8, 3, dtype=torch.uint8), 0, "of type uint8, wanted floating-point"),
        (torch.zeros(1, 8, 8, 5), 0, "1 to 4 channels"),
        (torch.zeros(0, 8, 8, 3), 0, "wanted .frames"),
        (torch.zeros(1, 8, 8, 3), 52, "wanted 0 .off. to 51"),
    ],
)
def test_r6_what_is_no_picture_is_refused(image, crf, words):
    with pytest.raises(InputError, match=words):
        prepare_images(image, 64, 96, crf)


def test_reference_frames_keep_the_first_and_then_every_nth():
    frames = torch.arange(17).view(-1, 1, 1, 1).float()
    assert every_other(frames, 4).flatten().tolist() == [0, 1, 5, 9, 13]
    assert torch.equal(every_other(frames, 1), frames)
