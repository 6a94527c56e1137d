"""What the commands of `python -m vision_longhorn.shards` do."""

import os
import sys
from argparse import Namespace

from vision_longhorn.errors import spelled

from . import sources
from .folders import NAMES_FILE, alike, find_splits, known_split, read_lines, read_names, same_split
from .images import DataError
from .index import read_index, write_index
from .sharding import index_shards, make_digits, make_shards, verify
from .walk import list_others


@spelled(on_bad="--on-bad")
def carry_out(args: Namespace) -> None:
    """Carry out the command line `args` of `vision_longhorn.shards`. Raises UserError, of one line."""
    if args.command == "verify":
        return _verify(args)
    directory = args.directory if args.command == "index" else args.out
    if args.command == "imagefolder":
        _imagefolder(args)
    elif args.command == "imagenet":
        _imagenet(args)
    elif args.command == "digits":
        make_digits(directory)
    else:
        index_shards(directory, read_lines(args.classes) if args.classes else None, names=args.names)
    index = read_index(directory) or {"splits": {}}
    for name, entry in index["splits"].items():
        print(
            f"{directory}: {name}, {entry['num_samples']} images in {len(entry['filenames'])} shards, "
            f"{index['num_classes']} classes"
        )


def _verify(args: Namespace) -> None:
    problems = verify(args.directory, args.full)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise DataError(f"{args.directory} has {len(problems)} problems; fetch or make these shards again")
    print(f"{args.directory}: no problems")


def _imagefolder(args: Namespace) -> None:
    class_names: list[str] | None = (read_index(args.out) or {}).get("class_names")
    paths, left_out = find_splits(args.src, class_names=class_names)
    if paths and args.split:
        one = paths[(alike(args.split, paths) or list(paths))[0]]
        raise DataError(
            f"{args.src} has splits ({', '.join(paths)}), which all become shards: leave out --split, or give {one}"
        )
    splits = {args.split or "train": args.src} if not paths else {}
    for name, path in paths.items():
        split = name.lower() if name.isalnum() else known_split(name)
        if split in splits:
            raise DataError(f"{splits[split]} and {path} would both be split {split!r}; rename one, or move it away")
        splits[split] = path
    if left_out:
        print(f"left out of {args.src}, as no splits: {', '.join(left_out)}", file=sys.stderr)
    listed = {}
    # List all splits before anything is written, and train first: its classes hold for the others.
    for split in sorted(splits, key=lambda split: (not same_split(split, "train"), split != "train")):
        listed[split], class_names, others = sources.image_folder(splits[split], class_names)
        if others:
            print(f"left out of {splits[split]}: {list_others(others)}", file=sys.stderr)
    names = args.names or os.path.join(args.src, NAMES_FILE)
    display_names = read_names(names, class_names) if args.names or os.path.isfile(names) else None
    for split, samples in listed.items():
        _make(args, split, samples, class_names or [], "imagefolder")
    if display_names:
        write_index(args.out, {}, display_names=display_names)


def _imagenet(args: Namespace) -> None:
    if args.train_tar == "-" and args.val_tar == "-":
        raise DataError("both tars are left out; name at least one")
    truth = None if args.val_tar == "-" else sources.ground_truth(args.truth)
    os.makedirs(args.out, exist_ok=True)
    train = None
    if args.train_tar == "-":
        class_names = (read_index(args.out) or {}).get("class_names") or sorted(set(truth or ()))
    else:
        train, class_names = sources.ilsvrc_train(args.train_tar)
    # List both before anything is written, so that a val tar that does not fit is an error at once.
    val = None if truth is None else sources.ilsvrc_val(args.val_tar, truth, class_names)
    for split, samples in ("val", val), ("train", train):
        if samples is not None:
            _make(args, split, samples, class_names, "ILSVRC-2012")


def _make(args: Namespace, split: str, samples: list[sources.Sample], class_names: list[str], source: str) -> None:
    options = {name: getattr(args, name) for name in ("shard_size", "seed", "on_bad", "max_side")}
    for name in make_shards(args.out, split, samples, class_names, source=source, **options):
        print(f"skipped, as it cannot be read: {name}", file=sys.stderr)
