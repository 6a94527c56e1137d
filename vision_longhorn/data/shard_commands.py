"""What the commands of `python -m vision_longhorn.shards` do."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterable

from tqdm import tqdm

from . import sources
from .folders import NAMES_FILE, alike, find_splits, known_split, read_lines, read_names, same_split
from .images import DataError
from .index import read_index, write_index
from .sharding import index_shards, make_digits, make_shards, verify
from .walk import list_others


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
        print(f"left out of {args.src}, as no splits: {'; '.join(left_out)}", file=sys.stderr)
    listed = {}
    # All are listed before anything is written, the one whose classes hold for the others first.
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
    _report(args.out)


def _imagenet(args: Namespace) -> None:
    if args.train_tar == "-" and args.val_tar == "-":
        raise DataError("both tars are left out; name at least one")
    truth = None if args.val_tar == "-" else sources.ground_truth(args.truth, args.synsets)
    os.makedirs(args.out, exist_ok=True)
    listing = os.path.join(args.out, ".listing.journal")
    train = None
    if args.train_tar == "-":
        class_names = (read_index(args.out) or {}).get("class_names") or sorted(set(truth or ()))
    else:

        def show(names: list[str]) -> Iterable[str]:
            return tqdm(names, unit="class", desc="listing")

        train, class_names = sources.ilsvrc_train(args.train_tar, listing, show)
    # Listed before anything is written, so that a val tar that does not fit is told at once.
    val = None if truth is None else sources.ilsvrc_val(args.val_tar, truth, class_names)
    if val is not None:
        _make(args, "val", val, class_names, "ILSVRC-2012")
    if train is not None:
        _make(args, "train", train, class_names, "ILSVRC-2012")
        sources.Journal(listing).remove()
    _report(args.out)


def _make(args: Namespace, split: str, samples: list[sources.Sample], class_names: list[str], source: str) -> None:
    skipped = make_shards(
        args.out,
        split,
        samples,
        class_names,
        shard_size=args.shard_size,
        seed=args.seed,
        on_bad=args.on_bad,
        source=source,
        threads=args.threads,
        max_side=args.max_side,
    )
    for name in skipped:
        print(f"skipped, as it cannot be read: {name}", file=sys.stderr)


def _report(directory: str) -> None:
    index = read_index(directory) or {"splits": {}}
    for name, entry in index["splits"].items():
        print(
            f"{directory}: {name}, {entry['num_samples']} images in {len(entry['filenames'])} shards, "
            f"{index['num_classes']} classes"
        )


def carry_out(args: Namespace) -> None:
    """Does what the command line `args` of `vision_longhorn.shards` says. Raises UserError, of one line."""
    if args.command == "imagefolder":
        _imagefolder(args)
    elif args.command == "imagenet":
        _imagenet(args)
    elif args.command == "digits":
        make_digits(args.out)
        _report(args.out)
    elif args.command == "verify":
        problems = verify(args.directory, args.full)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            raise DataError(f"{args.directory} has {len(problems)} problems; fetch or make these shards again")
        print(f"{args.directory}: no problems")
    elif args.command == "index":
        index_shards(args.directory, read_lines(args.classes) if args.classes else None, names=args.names)
        _report(args.directory)
