"""Where the samples of new shards come from: image folders, the ILSVRC-2012 tars, scikit-learn's digits."""

import contextlib
import dataclasses
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from PIL import Image
from tqdm import tqdm

from vision_longhorn.errors import bad_input, reason

from .folders import list_images, read_lines
from .images import DataError
from .walk import is_hidden

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_WNID = re.compile(r"n\d{8}")


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image to be stored: `size` bytes at `offset` of the file `path`, perhaps a tar; or its bytes, `data`."""

    name: str  # file name in its source, with a folder if it has one
    label: int  # class index
    path: str = ""
    offset: int = 0
    size: int = 0
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the image file. Raises DataError if they are not all there."""
        if self.data is not None:
            return self.data
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read from {self.path} ({reason(error)})") from None
        if len(data) != self.size:
            raise DataError(f"{self.name}: {self.path} ended too early or changed while it was read")
        return data


def image_folder(
    root: str | os.PathLike[str], class_names: Sequence[str] | None = None
) -> tuple[list[Sample], list[str], list[tuple[str, str]]]:
    """Return the images of `folders.list_images` as samples, with its class names and what it left out."""
    listed, class_names, others = list_images(root, class_names)
    samples = []
    for name, label in listed:
        path = os.path.join(root, name)
        try:
            size = os.path.getsize(path)
        except OSError:  # such as a link that leads nowhere: like other bad images, it is an error when it is read
            size = 0
        samples.append(Sample(name, label, path, 0, size))
    return samples, class_names, others


def ilsvrc_train(path: str | os.PathLike[str]) -> tuple[list[Sample], list[str]]:
    """List ILSVRC2012_img_train.tar, a tar of one tar per class, by its headers alone. Returns the samples and the
    classes (WordNet ids, sorted); raises DataError if it is not such a tar, or is cut short."""
    listed = {}
    with _opened(path) as outer:
        members = {os.path.splitext(os.path.basename(m.name))[0]: m for m in _files(outer)}
        strange = [name for name in members if not _WNID.fullmatch(name)]
        if strange or not members:
            first = strange[0] if strange else "nothing"
            raise DataError(f"{path} holds {first}, not one tar per class (n01440764.tar)")
        names = sorted(members, key=lambda name: members[name].offset)
        for name in tqdm(names, "listing", unit="class", disable=None):
            start = members[name].offset_data
            with _opened(path, outer.extractfile(members[name])) as inner:
                listed[name] = sorted((m.name, start + m.offset_data, m.size) for m in _files(inner))
    class_names = sorted(members)
    samples = [
        Sample(f"{name}/{file}", label, os.fspath(path), offset, size)
        for label, name in enumerate(class_names)
        for file, offset, size in listed[name]
    ]
    return samples, class_names


def ilsvrc_val(path: str | os.PathLike[str], truth: Sequence[str], class_names: Sequence[str]) -> list[Sample]:
    """List ILSVRC2012_img_val.tar. `truth` has the WordNet id of each image by its number (see `ground_truth`). Raises
    DataError if images, labels and classes do not fit together."""
    labels = {name: label for label, name in enumerate(class_names)}
    with _opened(path) as tar:
        members = {}
        for member in _files(tar):
            number = re.search(r"_(\d+)\.JPEG$", member.name)
            if not number:
                raise DataError(f"{path} holds {member.name}, not images like ILSVRC2012_val_00000001.JPEG")
            members[int(number[1])] = member
    if sorted(members) != list(range(1, len(truth) + 1)):
        raise DataError(f"{path} has {len(members)} images, but the ground truth has {len(truth)} labels; check both")
    unknown = sorted(set(truth) - set(labels))
    if unknown:
        raise DataError(
            f"class {unknown[0]} of the ground truth is not among the {len(labels)} classes of the training tar; "
            "check that both files are those of ILSVRC-2012 and complete"
        )
    return [
        Sample(os.path.basename(m.name), labels[truth[number - 1]], os.fspath(path), m.offset_data, m.size)
        for number, m in sorted(members.items())
    ]


def ground_truth(path: str | os.PathLike[str]) -> list[str]:
    """Read the WordNet id of each validation image, in the order of the images' numbers.

    The devkit's own file holds ILSVRC ids from 1 to 1000, which do not follow the order of class indices; only the
    devkit's meta.mat tells which class is which.

    Args:
        path: the devkit (`ILSVRC2012_devkit_t12.tar.gz`, or the folder unpacked from it), or a text file with one
            WordNet id a line.

    Raises:
        DataError: if the ids cannot be found for certain.
    """
    wanted = GROUND_TRUTH, "meta.mat"
    found: dict[str, bytes] = {}
    if os.path.isdir(path):
        places = [os.path.join(folder, file) for folder, _, files in os.walk(path) for file in files if file in wanted]
        found = {os.path.basename(place): Path(place).read_bytes() for place in places}
    elif os.path.isfile(path) and tarfile.is_tarfile(path):
        with _opened(path, mode="r") as tar:
            members = [m for m in tar if m.isreg() and os.path.basename(m.name) in wanted]
            found = {os.path.basename(m.name): cast(IO[bytes], tar.extractfile(m)).read() for m in members}
    else:
        lines = read_lines(path)
        if not lines or not all(_WNID.fullmatch(line) for line in lines):
            raise DataError(
                f"{path} does not hold one WordNet id per line (n01440764); give "
                "ILSVRC2012_devkit_t12.tar.gz or its folder"
            )
        return lines
    if len(found) < 2:
        raise DataError(f"{path} holds no {' and '.join(wanted)}; give ILSVRC2012_devkit_t12.tar.gz or its folder")
    from scipy.io import loadmat

    with bad_input(f"meta.mat of {path}"):
        synsets = loadmat(io.BytesIO(found["meta.mat"]), squeeze_me=True)["synsets"]
        # Only leaves of the hierarchy are classes of images; its inner nodes have children.
        names = {str(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
    ids = found[GROUND_TRUTH].decode("ascii", "replace").split()
    if unknown := [number for number in ids if number not in names]:
        raise DataError(f"{path}: {unknown[0]!r} in {GROUND_TRUTH} is no ILSVRC id (1 to {len(names)})")
    return [names[number] for number in ids]


def digits() -> tuple[dict[str, list[Sample]], list[str]]:
    """Load scikit-learn's handwritten digits: 1797 scans of 8 x 8 pixels, 360 of them held out, stratified by class.

    Source: UCI "Optical Recognition of Handwritten Digits", as shipped inside scikit-learn. The 17 gray levels are
    spread over 0 to 255, stored as PNG without loss. Returns the samples of each split, and the class names.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    samples = []
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        file = io.BytesIO()
        Image.fromarray((image * (255 / 16)).round().astype("uint8")).save(file, "PNG")
        samples.append(Sample(f"digit_{number:04d}.png", int(label), size=file.tell(), data=file.getvalue()))
    train, val = train_test_split(range(len(samples)), test_size=360, stratify=data.target, random_state=0)
    names = [str(name) for name in data.target_names]
    return {"train": [samples[i] for i in sorted(train)], "val": [samples[i] for i in sorted(val)]}, names


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], fileobj: IO[bytes] | None = None, mode: Any = "r:"
) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path, mode, fileobj) as tar:
            yield tar
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; check the path") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        kind = "uncompressed tar" if mode == "r:" else "tar"
        raise DataError(f"{path} is no {kind}, or is damaged or cut short ({reason(error)}); fetch it again") from None


def _files(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    return [member for member in tar if member.isreg() and not is_hidden(member.name)]
