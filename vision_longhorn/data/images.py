"""From the bytes of an image file to an upright sRGB picture."""

import functools
import io
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps

from vision_longhorn.errors import UserError

try:
    from torchvision.io import decode_jpeg
except ImportError:  # torchvision is to give this over to torchcodec, which needs torch 2.11
    try:
        from torchcodec.decoders import decode_jpeg
    except ImportError:
        decode_jpeg = None

_log = logging.getLogger(__name__)
_has_warned = False
_warning = threading.Lock()  # images kept in memory are decoded in threads

# Without a list PIL also tries formats that start other programs (EPS runs ghostscript).
FORMATS = ("JPEG", "PNG", "WEBP", "PPM")
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm")

_DEPTH_OF_PPM = re.compile(rb"P[2356](?:\s+(?:#[^\n]*\n\s*)*\d+){2}\s+(?:#[^\n]*\n\s*)*(\d{3,5})\s")
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
        DataError: if the bytes are not such an image, or end too early.
    """
    if isinstance(data, np.ndarray):
        return Image.fromarray(data)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
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


def decode_tensor(data: bytes | np.ndarray) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]:
    """`decode_image` as a tensor, to the bit, and faster for ordinary JPEGs.

    Its colours may be left uncorrected: the caller corrects only the part of the picture that it uses.

    Args:
        data: a JPEG, PNG, WebP or PPM file; or its decoded pixels, uint8 (H, W, 3).

    Returns:
        uint8 tensor (3, H, W); a function that converts a part of it to sRGB, None if it is sRGB already.

    Raises:
        DataError: if the bytes are not such an image, or end too early.
    """
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data).permute(2, 0, 1), None
    try:
        header = Image.open(io.BytesIO(data), formats=FORMATS)  # refuses pictures too large to decode
        turned = header.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
        if decode_jpeg and header.format == "JPEG" and header.mode in ("RGB", "L") and not turned:
            profile = header.info.get("icc_profile")
            transform = _srgb_transform(profile, header.mode) if profile else None
            if header.mode == "RGB" or transform is None:
                image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
                return image, functools.partial(_transformed, transform) if transform else None
    except Exception:  # PIL's own decoder says better what is wrong
        pass
    return _tensor(decode_image(data)), None


def _transformed(transform: ImageCms.ImageCmsTransform, image: torch.Tensor) -> torch.Tensor:
    return _tensor(transform.apply(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())))


def _tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def too_dark(data: Any, decoded: Any) -> str:
    """A warning about a 16-bit picture that comes out dark or black because its values have 8, 12 or 14 bits; "" for
    all other pictures.

    Args:
        data: the file, or pixels.
        decoded: result of `decode_image` or `decode_tensor` for it.
    """
    if not isinstance(data, bytes):
        return ""
    depth = _DEPTH_OF_PPM.match(data)
    if not (int(depth[1]) > 255 if depth else data[:4] == b"\x89PNG" and data[24:25] == b"\x10"):
        return ""
    image = decoded[0] if isinstance(decoded, tuple) else decoded
    if isinstance(image, Image.Image):
        image = torch.from_numpy(np.array(image))
    if not isinstance(image, torch.Tensor) or image.max() > 63:
        return ""
    top = 256 * int(image.max()) + 255
    return f"a 16-bit picture, and dark or black, as its values end at {top} of 65535: scale them to the whole range"


def warn_if_dark(data: Any, decoded: Any, name: str) -> None:
    """Log a warning about the first 16-bit picture of this process that comes out dark (see `too_dark`)."""
    global _has_warned
    if _has_warned or not (dark := too_dark(data, decoded)):
        return
    with _warning:
        if not _has_warned:
            _log.warning("%s: %s", name, dark)
        _has_warned = True


def check_image(data: bytes) -> None:
    """Parse an image's header without decoding its pixels.

    Raises:
        DataError: if the bytes do not start as an image.
    """
    try:
        Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise DataError(f"not a readable image ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "none of " + ", ".join(FORMATS)
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # broken EXIF data in a picture that is fine
        pass
    return image


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    # A profile describes the channels as stored, so only these modes can go through it unchanged.
    source = image if image.mode in ("RGB", "CMYK", "L") else image.convert("RGB")
    try:
        transform = _srgb_transform(profile, source.mode)
        return image if transform is None else transform.apply(source)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image


@functools.lru_cache(maxsize=64)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from `profile` to sRGB; None if it is sRGB already, as most are."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if "sRGB" in ImageCms.getProfileDescription(source):
        return None
    return ImageCms.buildTransform(source, _SRGB, mode, "RGB")
