"""From the bytes of an image file to an upright sRGB picture."""

import functools
import io

import numpy as np
from PIL import Image, ImageCms, ImageOps

from ..errors import UserError

# Without a list PIL also tries formats that start other programs (EPS runs ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "PPM")
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm")

_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


class DataError(UserError):
    """Data that cannot be used. The message is one line that names the thing at fault and the remedy."""


def decode_image(data):
    """Decode an image as people see it.

    EXIF orientation is applied, an embedded colour profile is converted to sRGB (one that cannot be applied is
    ignored), 16-bit gray is scaled to 8 bits, alpha is dropped. The content decides the format, not the file's name.

    Args:
        data: bytes of a JPEG, PNG, WebP or PPM file.

    Returns:
        PIL image, mode RGB.

    Raises:
        DataError: if the bytes are not such an image, or end too early.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    except Exception as error:  # PIL's decoders raise anything from SyntaxError to struct.error on broken files
        raise DataError(f"not a readable image ({_reason(error)})") from None
    profile = image.info.get("icc_profile")
    image = _upright(image)
    if image.mode.startswith("I"):  # 16-bit gray, which PIL would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if profile:
        image = _to_srgb(image, profile)
    return image if image.mode == "RGB" else image.convert("RGB")


def check_image(data):
    """Parse an image's header without decoding its pixels.

    Raises:
        DataError: if the bytes do not start as an image.
    """
    try:
        Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise DataError(f"not a readable image ({_reason(error)})") from None


def _reason(error):
    if isinstance(error, Image.UnidentifiedImageError):
        return "none of " + ", ".join(FORMATS)
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image):
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # broken EXIF data in a picture that is fine
        pass
    return image


def _to_srgb(image, profile):
    # A profile describes the channels as stored, so only these modes can go through it unchanged.
    source = image if image.mode in ("RGB", "CMYK", "L") else image.convert("RGB")
    try:
        transform = _srgb_transform(profile, source.mode)
        return image if transform is None else transform.apply(source)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image


@functools.lru_cache(maxsize=64)
def _srgb_transform(profile, mode):
    """The transform from `profile` (bytes) to sRGB; None if it is sRGB already, as most are."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if "sRGB" in ImageCms.getProfileDescription(source):
        return None
    return ImageCms.buildTransform(source, _SRGB, mode, "RGB")
