"""From where a row says that a picture is to the bytes of its file, which are decoded once so that none fails later."""

from __future__ import annotations

import base64
import binascii
import io
import re
import stat
import struct
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import xxhash

from flatout.data.conversation import Origin, PictureSource
from flatout.errors import DataError, needs_extra, reason_of
from flatout.io.allowed import require_allowed
from flatout.io.near_path import expand_home

# a picture of more pixels takes over half a gigabyte while it is decoded and resized
MAX_PIXELS, MAX_FILE_BYTES = 1 << 26, 64 << 20
# others are rare, and reading some of them runs other programs, as PostScript does
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# transformers takes three rows of pixels for three channels
MIN_SIDE = 4
_EXIF_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
# modes of color that become RGB without loss of range
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "RGBX")
_BARE_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{300,}={0,2}\s*")
_DATA_URI = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_LONGEST_NAME = 200
# what other files begin with, in lower case
_OTHER_KINDS = {
    "a HEIC picture": rb"....ftyp(hei|hev|mif1|msf1)", "an AVIF picture": rb"....ftypavi",
    "a JPEG XL picture": rb"\xff\n|....jxl ", "a JPEG 2000 picture": rb"....jp  |\xffo\xffq",
    "a video": rb"....ftyp|\x1ae\xdf\xa3|riff....avi ", "a PDF document": rb"%pdf", "a PostScript drawing": rb"%!ps",
    "a ZIP archive": rb"pk\x03\x04", "a web page": rb"<!doctype html|<html", "an SVG drawing": rb".*<svg",
    "a pointer of Git LFS (run git lfs pull)": rb"version https://git-lfs", "text": rb"[\t\n\r -~\x80-\xff]{8,}$",
}  # fmt: skip
# what Pillow raises for files that are damaged
_DAMAGES = (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError, struct.error, MemoryError)


class PictureFile(NamedTuple):
    """A picture's file; height and width are those of the picture as it is shown.

    `digest` is xxh3-128 of the file, and `has_alpha` is set if a pixel is not opaque. `path` is where the file was read
    (empty for content in the row), and `mtime_ns` when it was changed before.
    """

    content: bytes
    height: int
    width: int
    digest: bytes
    has_alpha: bool
    path: str
    mtime_ns: int


def require_pillow() -> Any:
    """Return the package that decodes pictures. Raises UsageError if it is not installed."""
    with needs_extra("a row with pictures", "images"):
        import PIL.Image  # lazy: nothing but pictures needs it
        import PIL.ImageOps
    return PIL


def read_picture(source: PictureSource, origin: Origin, media_root: Path | None) -> PictureFile:
    """Return the file of a picture, decoded once to see that it is whole.

    A relative path is below `media_root`, or below the folder of the file of rows; for rows from memory, below the
    working folder. Raises DataError for a picture that is at a URL, missing, broken, of none of FORMATS, animated, too
    large, or of a mode of color that has no exact RGB form.
    """
    where = f"{origin}: {source.place}"
    if isinstance(source.value, str) and not _DATA_URI.match(source.value):
        where += f" ({source.value[:_LONGEST_NAME]!r})"
    folder = Path(origin.source).parent
    # rows from memory name files from where their script runs
    root = media_root or (Path() if folder.parent.name == "in_memory" else folder)
    content, path, mtime_ns = _content(source, where, root)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{where}: its file has {len(content) >> 20:,} MiB (limit {MAX_FILE_BYTES >> 20}); resize it")
    pil = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a large one is refused below
            with pil.Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check(image, where)
                image.load()  # a PNG may have its EXIF behind the pixels
                is_turned = image.getexif().get(_EXIF_ORIENTATION) in _TURNED  # it may lie on its side
                height, width = image.size if is_turned else image.size[::-1]
                has_alpha = is_transparent(image)
    except DataError:
        raise
    except pil.UnidentifiedImageError:
        start = content[:512].lstrip().lower()
        kinds = (kind for kind, magic in _OTHER_KINDS.items() if re.match(magic, start, re.DOTALL))
        kind = next(kinds, "of an unknown type, or damaged") if content else "empty"
        raise DataError(
            f"{where}: its file is {kind}; expected a picture in one of {', '.join(FORMATS)}: convert or replace it"
        ) from None
    except pil.Image.DecompressionBombError:
        raise DataError(f"{where}: it has far more than {MAX_PIXELS:,} pixels, the limit; resize it") from None
    except _DAMAGES as error:
        raise DataError(f"{where}: its file is damaged or cut off: {reason_of(error)}; replace it") from None
    return PictureFile(content, height, width, xxhash.xxh3_128_digest(content), has_alpha, path, mtime_ns)


def is_transparent(image: Any) -> bool:
    """Return whether a pixel of an image of Pillow's is not opaque."""
    return bool(image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] < 255)


def decoded(content: bytes) -> Any:
    """Return a file that `read_picture` has read as an upright image of Pillow's, for the model's own processor.

    It is RGB, as transformers' `load_image` returns it; but with transparent pixels, it is as the file has it, because
    only the processor knows the background that it shows them on.
    """
    pil = require_pillow()
    with pil.Image.open(io.BytesIO(content), formats=FORMATS) as image:
        upright = pil.ImageOps.exif_transpose(image)
        if is_transparent(upright):
            return upright
        # the same colors; Pillow warns if a palette with transparency loses that in one step
        return (upright.convert("RGBA") if "transparency" in upright.info else upright).convert("RGB")


def _check(image: Any, where: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"{where}: {width:,} x {height:,} pixels are too many (limit {MAX_PIXELS:,}); resize it")
    if min(width, height) < MIN_SIDE:
        raise DataError(f"{where}: {width} x {height} pixels are too few (at least {MIN_SIDE} a side); remove the row")
    # phones put further pictures behind the one that is shown, in a format of their own (MPO)
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise DataError(f"{where}: animated, with {image.n_frames} frames; give one picture, or remove the row")
    if image.mode not in _MODES:
        raise DataError(f"{where}: its pixels are of mode {image.mode}; convert it to 8-bit RGB")


def _embedded(uri: str, where: str) -> bytes:
    if not (match := _DATA_URI.match(uri)):
        raise DataError(f"{where}: of data URIs, only data:image/png;base64,... and the like are read; write it so")
    try:
        return base64.b64decode(re.sub(r"\s", "", uri[match.end() :]), validate=True)  # mails break its lines
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: its base64 is damaged: {error}; replace it, or remove the row") from None


def _content(source: PictureSource, where: str, root: Path) -> tuple[bytes, str, int]:
    """Return a picture's file, its path (empty for content in the row), and when it was changed (else 0)."""
    value = source.value
    if isinstance(value, bytes):
        return value, "", 0
    if value[:5].lower() == "data:":
        return _embedded(value, where), "", 0
    if _BARE_BASE64.fullmatch(value):
        raise DataError(f"{where}: looks like base64, not like a path; write data:image/png;base64, before it")
    value = unquote(value.removeprefix("file://")) if value.startswith("file:///") else value
    if _ADDRESS.match(value):
        raise DataError(
            f"{where}: is an address, and pictures are not downloaded; download it first (wget -i URLS, or img2dataset "
            "for many), and give the path of its file"
        )
    try:
        path = root / expand_home(value)
        require_allowed(path, where=f"{where}: ")
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise DataError(f"{where}: {path} has over {MAX_FILE_BYTES >> 20} MiB; resize it")
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device may have no end
            raise OSError("it is no file")
        return path.read_bytes(), str(path.absolute()), status.st_mtime_ns
    except (OSError, ValueError) as error:
        folder = "the folder that you start in" if root == Path() else f"the folder of the file of rows: {root}"
        raise DataError(
            f"{where}: cannot be read: {reason_of(error)}; relative paths are below data.media_root, or below {folder}"
        ) from None
