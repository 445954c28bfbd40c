"""Height and width of a picture from the head of its file.

Sources: PNG specification (section 5.6: IHDR is first), ITU-T T.81 annex B (JPEG's markers), GIF89a section 18, the
headers BITMAPINFOHEADER and BITMAPCOREHEADER, RFC 9649 (WebP). Other formats are left to Pillow, where it is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

#: Suffixes of files that are taken for pictures.
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".jp2"})


def is_picture(path: Any) -> bool:
    """True for the path of a picture."""
    return isinstance(path, (str, Path)) and Path(path).suffix.lower() in SUFFIXES


def picture_size(path: str | Path) -> tuple[int, int]:
    """Height and width, without orientation by EXIF, which most readers ignore too.

    Raises:
        OSError: the file cannot be read.
        ValueError: nobody here knows its format.
    """
    with Path(path).open("rb") as file:
        head = file.read(32)
        for begins, read in _FORMATS.items():
            if head.startswith(begins):
                return read(head, file)
    return _by_pillow(path)


def _png(head: bytes, _file: BinaryIO) -> tuple[int, int]:
    width, height = struct.unpack(">II", head[16:24])
    return height, width


def _gif(head: bytes, _file: BinaryIO) -> tuple[int, int]:
    width, height = struct.unpack("<HH", head[6:10])
    return height, width


def _bmp(head: bytes, _file: BinaryIO) -> tuple[int, int]:
    old = struct.unpack("<I", head[14:18])[0] == 12
    width, height = struct.unpack("<HH", head[18:22]) if old else struct.unpack("<ii", head[18:26])
    return abs(height), width  # negative: from the top down


def _webp(head: bytes, _file: BinaryIO) -> tuple[int, int]:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[27:30], "little"), 1 + int.from_bytes(head[24:27], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    width, height = struct.unpack("<HH", head[26:30])
    return height & 0x3FFF, width & 0x3FFF


def _jpeg(_head: bytes, file: BinaryIO) -> tuple[int, int]:
    file.seek(2)
    while len(marker := file.read(4)) == 4 and marker[0] == 0xFF:
        if marker[1] == 0xFF:  # fill bytes before a marker
            file.seek(-3, 1)
            continue
        length = int.from_bytes(marker[2:], "big")
        if 0xC0 <= marker[1] <= 0xCF and marker[1] not in (0xC4, 0xC8, 0xCC):
            _precision, height, width = struct.unpack(">BHH", file.read(5))
            return height, width
        file.seek(length - 2, 1)
    raise ValueError("no frame header")


def _by_pillow(path: str | Path) -> tuple[int, int]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("unknown format") from error
    with Image.open(path) as image:
        return image.height, image.width


_FORMATS: dict[bytes, Callable[[bytes, BinaryIO], tuple[int, int]]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8": _jpeg,
    b"GIF8": _gif,
    b"BM": _bmp,
    b"RIFF": _webp,
}
