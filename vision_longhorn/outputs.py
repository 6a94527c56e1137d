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
    endings: Sequence[str] = (),
    is_own: Callable[[Path], bool] = lambda _: False,
    others: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """Raises UserError where a command may not write to `path`, which `option` gave.

    With `endings`, it is to be a file whose name may end so. One that exists is replaced if `is_own` says that this
    command wrote it. Without `endings`, it is to be a new or empty folder. `others` are further paths that the command
    reads or writes.
    """
    named, path = f"{option} {os.fspath(path) or repr('')}", Path(path)
    if endings and path.is_dir():  # as the path "" is
        raise UserError(f"{named} cannot be written: it is a folder, name a file")
    for other in others:
        with contextlib.suppress(OSError):
            if os.path.realpath(path) == os.path.realpath(other) or os.path.samefile(path, other):
                raise UserError(f"{named} is named twice in this command: give another name")
    if path.suffix.lower() in ENDINGS - set(endings):
        remedy = f"let it end in {' or '.join(endings)}" if endings else "it is to be a folder"
        raise UserError(f"{named} has the name of another kind of file: {remedy}")
    run = Run(path.parent)
    if path in run.texts and run.config_file.exists():
        raise UserError(f"{named} has the name of a file that the run writes: give another name")
    above = next((folder for folder in path.absolute().parents if folder.exists()), path)  # "/" has none
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"{named} cannot be written: {above} is no folder where you may write, name another place")
    if os.path.lexists(path):
        is_free = path.is_file() and is_own(path) if endings else path.is_dir() and not os.listdir(path)
        if path.is_symlink() or not is_free:
            why = "was not written by this tool: give another name" if endings else "is no empty folder: name another"
            raise UserError(f"{named} is there already and {why}")
