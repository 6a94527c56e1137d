"""Decodes the bytes of an image file to an upright sRGB picture."""

import contextlib
import functools
import io
import itertools
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps

from vision_longhorn.errors import UserError, one_line

try:
    from torchvision.io import decode_jpeg
except ImportError:  # torchvision will move this to torchcodec, which needs torch 2.11
    try:
        from torchcodec.decoders import decode_jpeg
    except ImportError:
        decode_jpeg = None

_log = logging.getLogger(__name__)
_warnings = itertools.count()  # `next` is safe in threads, such as those of `keep_in_memory`

# Without a list PIL also tries formats that start other programs (EPS runs ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "PPM")
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm")

# Tables, comments, and what programs add besides EXIF data (0xFFE1), profiles (0xFFE2) and Photoshop's (0xFFED)
_PLAIN_MARKERS = {0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, *range(0xFFE3, 0xFFED), 0xFFEE, 0xFFEF, 0xFFFE}
_PLAIN_PIXELS = 2**26  # PIL warns of larger pictures

# What turns a stored image (3, H, W) upright, by EXIF orientation: whether rows become columns, then which axes to flip
_TURNS = {
    2: (False, (2,)), 3: (False, (1, 2)), 4: (False, (1,)),
    5: (True, ()), 6: (True, (2,)), 7: (True, (1, 2)), 8: (True, (1,)),
}  # fmt: skip
_PROFILED = ("RGB", "CMYK", "L")  # modes of images to which a profile applies as they are
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


class DataError(UserError):
    """Data that cannot be used. The message is one line that names the thing at fault and the remedy."""


def decode_image(data: bytes | np.ndarray) -> Image.Image:
    """Decode an image as people see it.

    EXIF orientation is applied, an embedded colour profile is converted to sRGB (one that cannot be applied is
    ignored), 16-bit gray is scaled to 8 bits, alpha is dropped. The content decides the format, not the file's name.

    Args:
        data: a JPEG, PNG, WebP or PPM file; or its decoded pixels, uint8 (H, W, 3).

    Returns:
        PIL image, mode RGB.

    Raises:
        DataError: if the bytes are not such an image, end too early, or hold floating-point numbers.
    """
    if isinstance(data, np.ndarray):
        return Image.fromarray(data)
    with _readable():
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    profile = image.info.get("icc_profile")
    with contextlib.suppress(Exception):  # broken EXIF data in a picture that is fine
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
        raise DataError("it holds floating-point numbers, whose range it does not say: save it with 8 bits a channel")
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if profile:
        # The profile describes the channels as stored, so it applies directly to images of these modes only.
        source = image if image.mode in _PROFILED else image.convert("RGB")
        with contextlib.suppress(ImageCms.PyCMSError, OSError, ValueError):
            if transform := _srgb_transform(profile, source.mode):
                image = transform.apply(source)
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_tensor(data: bytes | np.ndarray) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """Decode an image to a tensor, with the bits of `decode_image`, but faster for ordinary JPEGs.

    Its colours may still have to be converted, which the caller does only for the part of the picture that it uses.

    Returns:
        uint8 tensor (3, H, W); a function that converts a part of it to sRGB, None if it is sRGB already.

    Raises:
        DataError: as `decode_image` does.
    """
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data).permute(2, 0, 1), None
    with contextlib.suppress(Exception):  # after any error PIL's decoder tries, whose messages are clearer
        if decode_jpeg and _is_plain(data):
            return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB"), None
        header = Image.open(io.BytesIO(data), formats=FORMATS)  # refuses pictures too large to decode
        if decode_jpeg and header.format == "JPEG" and header.mode in ("RGB", "L"):
            turn, transform = _turn_of(header), _transform_of(header)
            image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
            if turn in _TURNS:
                is_transposed, axes = _TURNS[turn]
                image = (image.transpose(1, 2) if is_transposed else image).flip(axes)
            correct = _looked_up if header.mode == "L" else _transformed
            return image, functools.partial(correct, transform) if transform else None
    return _tensor(decode_image(data)), None


def is_stored_as_seen(data: bytes) -> bool:
    """Tell whether an image is stored upright and in sRGB, as far as its header can be read."""
    with contextlib.suppress(Exception):
        if not _is_plain(data):
            header = Image.open(io.BytesIO(data), formats=FORMATS)
            return _turn_of(header) not in _TURNS and _transform_of(header) is None
    return True


def _turn_of(header: Image.Image) -> int | None:
    return header.getexif().get(ExifTags.Base.Orientation)


def _transform_of(header: Image.Image) -> ImageCms.ImageCmsTransform | None:
    profile = header.info.get("icc_profile")
    return _srgb_transform(profile, header.mode if header.mode in _PROFILED else "RGB") if profile else None


def _is_plain(data: bytes) -> bool:
    """Tell whether a file is a JPEG in gray or RGB without EXIF data, XMP or a profile. PIL takes far longer to
    read a header."""
    is_known, at = data[:2] == b"\xff\xd8", 2
    while is_known:
        marker, length = struct.unpack_from(">HH", data, at)
        if marker == 0xFFDA:  # the pixels follow
            return True
        if marker in (0xFFC0, 0xFFC1, 0xFFC2):
            bits, height, width, colours = struct.unpack_from(">BHHB", data, at + 4)
            is_known = bits == 8 and colours in (1, 3) and 0 < height * width <= _PLAIN_PIXELS
        else:
            # PIL refuses JFIF (0xFFE0) and Adobe's (0xFFEE) if they are too short.
            is_known = marker in _PLAIN_MARKERS and (length >= 9 or marker not in (0xFFE0, 0xFFEE))
        at += 2 + length
    return False


def _transformed(transform: ImageCms.ImageCmsTransform, image: torch.Tensor) -> torch.Tensor:
    return _tensor(transform.apply(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())))


def _looked_up(transform: ImageCms.ImageCmsTransform, image: torch.Tensor) -> torch.Tensor:
    """Do what `_transformed` does for a gray image, whose three channels are equal, by a table of its 256 values."""
    table = np.asarray(transform.apply(Image.fromarray(np.arange(256, dtype=np.uint8)[None])))[0]  # (256, 3)
    return torch.from_numpy(table[image[0].numpy()]).permute(2, 0, 1)


def _tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def warn_if_dark(data: Any, image: Any, name: str) -> None:
    """Log the first 16-bit PNG of this process that comes out dark or black, as it uses only 8, 12 or 14 bits.
    `image` is what `decode_image` or `decode_tensor` has made of `data`."""
    if isinstance(data, bytes) and data[:4] == b"\x89PNG" and data[24:25] == b"\x10":
        pixels = image[0] if isinstance(image, tuple) else image
        top = int(np.asarray(pixels).max()) if isinstance(pixels, (Image.Image, torch.Tensor)) else 255
        if top < 64 and next(_warnings) == 0:
            why = f"its values end at {256 * top + 255} of 65535: scale them to the whole range"
            _log.warning("%s: a 16-bit picture, and dark or black, as %s", name, why)


def check_image(data: bytes) -> None:
    """Parse an image's header without decoding its pixels. Raises DataError if the bytes do not start like an image."""
    with _readable():
        Image.open(io.BytesIO(data), formats=FORMATS)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # PIL's decoders raise anything from SyntaxError to struct.error on broken files
        no_format = isinstance(error, Image.UnidentifiedImageError)
        why = f"none of {', '.join(FORMATS)}" if no_format else one_line(error)
        raise DataError(f"not a readable image ({why})") from None


@functools.lru_cache(maxsize=64)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Build the transform from `profile` to sRGB; None if it is sRGB already, as most are."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if "sRGB" in ImageCms.getProfileDescription(source):
        return None
    return ImageCms.buildTransform(source, _SRGB, mode, "RGB")
