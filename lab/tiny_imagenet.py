"""Makes the data of the studies out of Tiny-ImageNet (http://cs231n.stanford.edu/tiny-imagenet-200.zip): every second
class of the sorted list, from the second on, each with 300 of its 500 training images and its 50 of validation.

python -m lab.tiny_imagenet tiny-imagenet-200 OUT
python -m lab.tiny_imagenet tiny-imagenet-200 OUT --classes 10             # every tenth of these classes
python -m lab.tiny_imagenet tiny-imagenet-200 OUT --classes 10 --first 5   # ten others, from the sixth on

The committed studies ran on a copy whose images had been encoded anew, and perhaps on another 300.
"""

from collections.abc import Sequence
from pathlib import Path

from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.data.sharding import make_shards
from vision_longhorn.data.sources import Sample
from vision_longhorn.errors import UserError
from vision_longhorn.settings import Range

CLASSES, IMAGES = 100, 300


def samples_of(source: Path, classes: int, first: int = 0) -> tuple[dict[str, list[Sample]], list[str]]:
    """Lists the samples of each split, and the class names.

    Args:
        source: Tiny-ImageNet unpacked, with train/CLASS/images/ and val/val_annotations.txt.
        classes: How many of the 100 classes: 10 are every tenth.
        first: The first of them, counted from 0.

    Raises:
        UserError: `source` is something else, or lacks images; `first` leaves too few classes.
    """
    annotations = source / "val" / "val_annotations.txt"
    names = sorted(folder.name for folder in source.glob("train/*") if folder.is_dir())
    if len(names) != 2 * CLASSES:
        raise UserError(
            f"{source}/train has {len(names)} folders and not {2 * CLASSES}: give the folder tiny-imagenet-200"
        )
    if not annotations.is_file():
        raise UserError(f"there is no file {annotations}: unpack the archive again")
    names = names[1::2][first :: CLASSES // classes]
    if len(names) < classes:
        raise UserError(f"first is {first}, which leaves {len(names)} classes, not {classes}: give 0")
    files = {name: sorted(source.glob(f"train/{name}/images/*.JPEG"))[:IMAGES] for name in names}
    if few := [name for name in names if len(files[name]) < IMAGES]:
        raise UserError(f"{source}/train/{few[0]}/images has {len(files[few[0]])} JPEG files, not {IMAGES} or more")
    train = [_sample(file, label) for label, name in enumerate(names) for file in files[name]]
    rows = [line.split("\t")[:2] for line in annotations.read_text(encoding="utf-8").splitlines()]
    val = [_sample(source / "val" / "images" / file, names.index(name)) for file, name in rows if name in names]
    return {"train": train, "val": val}, names


def _sample(file: Path, label: int) -> Sample:
    try:
        return Sample(file.name, label, str(file), 0, file.stat().st_size)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): unpack the archive again") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the command line `argv` says (default: the process's own)."""
    parser = Parser(prog="python -m lab.tiny_imagenet", description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("source", metavar="TINY", type=Path, help="the folder that Tiny-ImageNet's archive unpacks to")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--classes", type=int, choices=(10, CLASSES), default=CLASSES, help=f"how many [{CLASSES}]")
    parser.add_argument("--first", type=Range(0, below=10, kind=int), default=0, help="the first of ten, 0 to 9 [0]")
    args = parser.parse_args(argv)
    splits, names = samples_of(args.source, args.classes, args.first)
    for split, samples in splits.items():
        make_shards(args.out, split, samples, names, shard_size=2000, source="Tiny-ImageNet")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_cli(main)
