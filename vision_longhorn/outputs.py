"""What a command may write, checked before it starts to work: it replaces only what it has written itself."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vision_longhorn.errors import UserError
from vision_longhorn.runs import Run

# Endings that say what a file is. Any other, or none, is the user's choice.
ENDINGS = set(
    ".bin .csv .gif .gz .jpeg .jpg .json .onnx .pdf .png .pt .pt2 .pth .py .safetensors .sha256 .svg .tar .tiff .webp "
    ".yaml .yml .zip".split()
)


def check_output(
    option: str,
    path: str | os.PathLike[str],
    endings: Sequence[str],
    is_own: Callable[[Path], bool] = lambda _: False,
    others: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Raises UserError where a command may not write a file to `path`, which `option` gave.

    Its name may have one of `endings`. A file that is there is replaced if `is_own` says that it is the command's own.
    `others` are what the same command reads, or writes as well.
    """
    named, path = f"{option} {os.fspath(path) or repr('')}", Path(path)
    if path.is_dir():  # as the path "" is
        raise UserError(f"{named} cannot be written: it is a folder, name a file")
    _check_name(named, path, others, f"let it end in {' or '.join(endings)}", endings)
    if path.is_symlink() or os.path.lexists(path) and not (path.is_file() and is_own(path)):
        raise UserError(f"{named} is there already and was not written by this tool: name another file")


def check_new_folder(option: str, path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Checks a folder to make, as `check_output` does a file; an empty one may be there."""
    named = f"{option} {os.fspath(path)}"
    _check_name(named, Path(path), others, "it is to be a folder")
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise UserError(f"{named} is there already: remove it, or name another folder")


def _check_name(
    named: str, path: Path, others: Iterable[str | os.PathLike[str]], remedy: str, endings: Sequence[str] = ()
) -> None:
    for other in others:
        with contextlib.suppress(OSError):
            if os.path.realpath(path) == os.path.realpath(other) or os.path.samefile(path, other):
                raise UserError(f"{named} is named twice in this command: give another name")
    if path.suffix.lower() in ENDINGS - set(endings):
        raise UserError(f"{named} has the name of another kind of file: {remedy}")
    run = Run(path.parent)
    if path in run.texts and run.config_file.exists():
        raise UserError(f"{named} is what a run calls a file of its own: name another")
