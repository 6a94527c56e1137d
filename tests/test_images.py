"""Every kind of image file that ImageNet holds, and some that it does not."""

import io
import itertools
import pathlib
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from timm.data import create_transform

from vision_longhorn.data import (
    DataError,
    decode_image,
    eval_loader,
    images,
    open_shards,
    split_transform,
    train_loader,
)
from vision_longhorn.data.images import decode_tensor
from vision_longhorn.data.memory import keep_in_memory
from vision_longhorn.data.sources import image_folder
from vision_longhorn.shards import make_shards, verify

# What the EXIF standard says that row 0 and column 0 of the stored picture show.
SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def encode(image, format="JPEG", **options):
    file = io.BytesIO()
    image.save(file, format, **({"quality": 95, "subsampling": 0} if format == "JPEG" else {}), **options)
    return file.getvalue()


def scene(mode="RGB", size=(48, 32)):
    """A picture without symmetry: red with a blue corner and a green one, at the top."""
    width, height = size
    pixels = np.full((height, width, 3), (220, 30, 30), np.uint8)
    pixels[: height // 2, : width // 3] = (30, 30, 220)
    pixels[: height // 2, -width // 3 :] = (30, 220, 30)
    return Image.fromarray(pixels).convert(mode)


def rotated(orientation):
    """A file whose EXIF data says how to turn it upright."""
    row, column = SIDES[orientation]
    pixels = np.asarray(scene())
    if row in ("left", "right"):
        pixels = pixels.swapaxes(0, 1)
    if row in ("bottom", "right"):
        pixels = pixels[::-1]
    if column in ("bottom", "right"):
        pixels = pixels[:, ::-1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return Image.fromarray(np.ascontiguousarray(pixels)), exif


def swapped_profile():
    """A colour profile whose red is sRGB's green and whose green is its red."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = data.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
    return data.replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))


def gray_profile():
    """A profile of gray values that are darker than sRGB's."""
    data = swapped_profile().replace(b"rTRC", b"kTRC")
    gamma = struct.pack(">i", round(2.4 * 2**16))
    assert gamma in data and data[16:20] == b"RGB "
    return (data[:16] + b"GRAY" + data[20:]).replace(gamma, struct.pack(">i", 3 * 2**16))


def difference(image, expected):
    assert image.mode == "RGB" and image.size == expected.size
    return np.abs(np.asarray(image, int) - np.asarray(expected.convert("RGB"), int)).max()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", SIDES)
def test_exif_orientation_is_turned_upright(orientation, format):
    stored, exif = rotated(orientation)
    options = {"lossless": True} if format == "WEBP" else {}
    assert difference(decode_image(encode(stored, format, exif=exif, **options)), scene()) <= 12


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_lose_the_picture():
    data = encode(scene(), exif=b"Exif\0\0II*\0\xff\xff\xff\x7fbroken")
    assert difference(decode_image(data), scene()) <= 12


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}])
def test_jpeg_flavours(options):
    assert difference(decode_image(encode(scene(), **options)), scene()) <= 12


def test_floating_point_pixels_are_refused():
    """PIL would take 0 to 1 for black."""
    data = b"Pf\n2 2\n-1.0\n" + np.full(4, 0.5, "<f4").tobytes()
    with pytest.raises(DataError, match="floating-point numbers.* save it with 8 bits"):
        decode_image(data)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "RGB"])
def test_png_modes_come_as_rgb(mode):
    source = scene(mode)
    assert difference(decode_image(encode(source, "PNG")), source) == 0


def test_palette_with_transparency():
    source = scene("P")
    data = encode(source, "PNG", transparency=bytes(range(256)))
    assert difference(decode_image(data), source) == 0


def test_gray_jpeg():
    assert difference(decode_image(encode(scene("L"))), scene("L")) <= 4


def test_cmyk_jpeg_is_not_inverted():
    data = encode(scene("CMYK"))
    assert b"Adobe" in data
    assert difference(decode_image(data), scene()) <= 16


@pytest.mark.parametrize("format", ["PNG", "PPM"])
def test_16_bit_gray_keeps_its_range(format):
    values = np.array([[0, 0x4000, 0x8000, 0xC000, 0xFFFF]], np.uint16)
    image = decode_image(encode(Image.fromarray(values), format))
    assert np.asarray(image)[0, :, 0].tolist() == [0, 0x40, 0x80, 0xC0, 0xFF]


def deep(top, format="PNG"):
    """A 16-bit picture whose values end at `top`."""
    return encode(Image.fromarray(np.linspace(0, top, 600).astype(np.uint16).reshape(20, 30)), format)


def deep_rgb(top):
    """A PNG of 16-bit colours, which PIL does not write."""
    row = b"\0" + np.full((8, 3), top, ">u2").tobytes()
    chunks = (b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(row * 8)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


@pytest.mark.parametrize(
    "data, top",
    [
        (deep(255), 255),
        (deep(4095), 4095),
        (deep(16383), 16383),
        (deep(4095, "PPM"), None),
        (deep_rgb(900), 1023),
        (deep(16384), None),
        (deep(65535), None),
        (deep_rgb(40000), None),
        (b"P5\n# 12 bits\n4 1 4095\n" + struct.pack(">4H", 0, 5, 900, 4095), None),
        (encode(Image.new("L", (8, 8), 3), "PNG"), None),
        (encode(Image.new("L", (8, 8), 3), "PPM"), None),
        (encode(scene()), None),
    ],
)
def test_16_bit_pictures_that_come_out_dark_are_told(data, top, caplog, monkeypatch):
    for decode in decode_image, decode_tensor:
        monkeypatch.setattr(images, "_warnings", itertools.count())  # as in a new process
        images.warn_if_dark(data, decode(data), "scan.png")
        if top is not None:
            assert "scan.png: a 16-bit picture" in caplog.text and f"end at {top} of 65535" in caplog.text
            caplog.clear()
    assert not caplog.records


def told_once(caplog, name, monkeypatch):
    monkeypatch.setattr(images, "_warnings", itertools.count())  # as in a new process
    told = [record.getMessage() for record in caplog.records if "16-bit" in record.getMessage()]
    assert len(told) == 1 and name in told[0] and "end at 4095 of 65535" in told[0]
    caplog.clear()


def test_dark_pictures_are_named_once_by_whatever_reads_them(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warnings", itertools.count())
    for number in range(8):
        path = tmp_path / "images" / f"c{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(deep(4095) if number > 1 else deep(65535))
    folder = open_shards(tmp_path / "images")
    crops, _ = split_transform(create_transform(16, is_training=True))
    for loader in (
        eval_loader(folder, create_transform(16), batch_size=2, num_workers=0),
        train_loader(folder, crops, batch_size=2, num_workers=0),
    ):
        assert list(loader) and list(loader)
        told_once(caplog, str(tmp_path / "images" / "c"), monkeypatch)
    keep_in_memory(folder)
    told_once(caplog, str(tmp_path / "images" / "c"), monkeypatch)
    samples, class_names, _ = image_folder(tmp_path / "images")
    make_shards(tmp_path / "shards", "train", samples, class_names)
    told_once(caplog, ".png", monkeypatch)
    assert verify(tmp_path / "shards") == [] and not caplog.records
    assert verify(tmp_path / "shards", full=True) == []
    told_once(caplog, "sample 000000", monkeypatch)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1)])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_one_pixel_wide_or_high(size, format):
    image = decode_image(encode(Image.new("RGB", size, (200, 40, 40)), format))
    assert image.size == size and difference(image, Image.new("RGB", size, (200, 40, 40))) <= 6
    for training in (True, False):
        assert create_transform(32, is_training=training)(image).shape == (3, 32, 32)


@pytest.mark.parametrize("size", [(50, 1), (1, 50), (1, 1), (2, 2)])
def test_crops_of_narrow_pictures_are_never_empty(size):
    """timm's crop may ask for none of one pixel."""
    crops, _ = split_transform(create_transform(16, is_training=True))
    decoded = crops.decode(encode(Image.new("RGB", size, (9, 9, 9)), "PNG"))
    for seed in range(100):
        random.seed(seed)
        torch.manual_seed(seed)
        assert (crops(decoded)[0] == 9).all()


def test_colour_profile_is_converted_to_srgb():
    image = decode_image(encode(Image.new("RGB", (8, 8), (255, 0, 0)), "PNG", icc_profile=swapped_profile()))
    red, green, blue = image.getpixel((4, 4))
    assert green > 240 and red < 15 and blue < 15


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("profile", [b"nonsense", None])
def test_colour_profile_that_cannot_be_applied_is_ignored(mode, profile):
    if profile is None:
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert difference(decode_image(encode(scene(mode), icc_profile=profile)), scene(mode)) <= 16


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_truncated_file_is_an_error(format):
    data = encode(scene(size=(200, 160)), format)
    for length in (len(data) * 2 // 3, 40, 0):
        with pytest.raises(DataError, match="not a readable image") as raised:
            decode_image(data[:length])
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", encode(scene(), "GIF"), b"text"],
    ids=["EPS", "GIF", "text"],
)
def test_only_known_formats_are_opened(data):
    with pytest.raises(DataError, match="not a readable image"):
        decode_image(data)


@pytest.fixture
def folder(request, tmp_path):
    """An image folder of odd files, and those of --image-folder with them."""
    root = tmp_path / "images"
    root.mkdir()
    given = request.config.getoption("--image-folder")
    for path in pathlib.Path(given).iterdir() if given else []:
        if path.is_dir():
            (root / path.name).symlink_to(path.resolve())
    files = {f"exif{n}.JPEG": encode(rotated(n)[0], exif=rotated(n)[1]) for n in SIDES}
    files |= {f"{mode}.JPEG": encode(scene(mode)) for mode in ("L", "CMYK")}
    files |= {f"{mode}.png": encode(scene(mode), "PNG") for mode in ("P", "LA", "RGBA", "1")}
    files["gray16.png"] = encode(Image.fromarray(np.full((20, 30), 40000, np.uint16)), "PNG")
    files["progressive.jpg"] = encode(scene(), progressive=True)
    files["profile.jpeg"] = encode(scene(), icc_profile=swapped_profile())
    files["png.JPEG"] = encode(scene(), "PNG")
    files["narrow.JPEG"] = encode(Image.new("RGB", (1, 60)))
    files["flat.webp"] = encode(Image.new("RGB", (60, 1)), "WEBP")
    files["portable.ppm"] = encode(scene(), "PPM")
    for number, (name, data) in enumerate(files.items()):
        path = root / f"odd{number % 2}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_every_file_goes_through_shards_and_transforms(folder, tmp_path):
    samples, class_names, _ = image_folder(folder)
    assert {s.name for s in samples} == {p.relative_to(folder).as_posix() for p in folder.glob("*/*")}
    assert make_shards(tmp_path / "shards", "train", samples, class_names, shard_size=10) == []
    assert verify(tmp_path / "shards", full=True) == []
    shards = open_shards(tmp_path / "shards")
    assert shards.num_samples == len(samples)
    assert shards.class_names == sorted(p.name for p in folder.iterdir() if p.is_dir())

    transform = create_transform(64, crop_pct=0.875)
    batches = list(eval_loader(shards, transform, batch_size=4, num_workers=0))
    assert sorted(t for _, targets in batches for t in targets.tolist()) == sorted(s.label for s in samples)
    transform = create_transform(64, is_training=True, auto_augment="rand-m6-inc1", re_prob=0.25)
    batches = list(train_loader(shards, transform, batch_size=1, num_workers=0))
    assert len(batches) == len(samples)
    assert all(images.shape == (1, 3, 64, 64) and images.isfinite().all() for images, _ in batches)
