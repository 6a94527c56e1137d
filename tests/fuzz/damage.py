"""Ways to damage a file, drawn by a generator."""

import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit is another."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(1, len(data))]


def cut_a_little(data: bytes, rng: random.Random) -> bytes:
    """The last bytes are missing."""
    return data[: -rng.randint(1, min(64, len(data) - 1))]


def zero(data: bytes, rng: random.Random) -> bytes:
    """A stretch of it is zeros, as after a power cut."""
    length = rng.randint(16, max(17, len(data) // 3))
    at = rng.randrange(max(1, len(data) - length))
    return data[:at] + bytes(len(data[at : at + length])) + data[at + length :]


def scramble(data: bytes, rng: random.Random) -> bytes:
    """A stretch of it is noise."""
    length = rng.randint(1, min(4096, len(data)))
    at = rng.randrange(len(data) - length + 1)
    return data[:at] + rng.randbytes(length) + data[at + length :]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Two parts of it have changed places."""
    at = rng.randrange(1, len(data))
    return data[at:] + data[:at]


def lengthen(data: bytes, rng: random.Random) -> bytes:
    """There is something behind its end."""
    return data + rng.randbytes(rng.randint(1, 2000))


def empty(data: bytes, rng: random.Random) -> bytes:
    """It is empty."""
    return b""


def foreign(data: bytes, rng: random.Random) -> bytes:
    """It holds something else."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    return rng.choice(
        (
            b"not what it should be\n",
            b"<!DOCTYPE html><html><body>404: Not Found</body></html>",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
            b"\x89PNG\r\n\x1a\n" + rng.randbytes(300),
            b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
            archive.getvalue(),
            json.dumps({"state_dict": {}}).encode(),
            rng.randbytes(5000),
            bytes(10000),
        )
    )


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bit, cut, cut_a_little, zero, scramble, swap, empty, foreign,
)  # fmt: skip


def damage(path: Path, rng: random.Random, how: Callable[[bytes, random.Random], bytes] | None = None) -> str:
    """Damages a file in one of the ways, and returns its name. A file that hard links share is parted from them."""
    how = how or rng.choice(DAMAGES)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(how(data, rng))
    return how.__name__


# Values that somebody's file might hold in the place of the right one
STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 3.5, 1e300, "", "3", "three", [], [1], [[1]], ["a"], {}, {"a": 1}, "日本", 2**70,
    float("nan"), float("inf"), [None], "a\nb", "../x",
)  # fmt: skip


def spoil(value: Any, rng: random.Random, depth: int = 6) -> Any:
    """A JSON value of which one part, drawn at some depth, is missing, stands twice or is a strange one."""
    if isinstance(value, dict) and value and depth and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: spoil(value[key], rng, depth - 1)}
    if isinstance(value, list) and value and depth and rng.random() < 0.6:
        at = rng.randrange(len(value))
        if rng.random() < 0.3:
            return value[:at] + value[at + 1 :]
        if rng.random() < 0.3:
            return [*value, value[at]]
        return [*value[:at], spoil(value[at], rng, depth - 1), *value[at + 1 :]]
    return rng.choice([strange for strange in STRANGE if strange is not value])
