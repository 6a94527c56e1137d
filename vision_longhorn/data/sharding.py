"""Makes, checks and indexes shards: what the commands of `vision-longhorn shards` do."""

import concurrent.futures
import filecmp
import hashlib
import io
import itertools
import json
import os
import random
import re
import shlex
import sys
import tempfile
import zlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image
from tqdm import tqdm

from vision_longhorn.cores import cores
from vision_longhorn.errors import spelled
from vision_longhorn.files import clear_aside, read_json, write_text, written_aside
from vision_longhorn.settings import DIGITS

from . import sources
from .folders import alike, find_splits, known_split, read_lines, read_names, same_split
from .images import DataError, check_image, decode_image, is_stored_as_seen, warn_if_dark
from .index import INDEX_NAMES, read_index, write_index
from .places import find_shards
from .samples import RawSample, decoded, image_of, label_of
from .tars import read_shard
from .walk import list_others


def make_shards(
    out: str | os.PathLike[str],
    split: str,
    samples: Sequence[sources.Sample],
    class_names: list[str],
    *,
    shard_size: int = 1000,
    seed: int = 0,
    on_bad: str = "stop",
    source: str = "",
    max_side: int | None = None,
) -> list[str]:
    """Write samples into shards in an order shuffled over all classes, and at the end the index.

    It may be stopped and run again: finished shards are kept. Every image is decoded once as a check and stored as it
    is, except with `max_side`. Every shard is read back and compared before it gets its name.

    Args:
        out: folder for the shards, `{split}-000000.tar` and on.
        class_names: name of each class by its index.
        shard_size: most samples in a shard; all shards are filled evenly.
        on_bad: "stop" or "skip" at an image that cannot be decoded.
        source: word that tells in the index where the samples come from.
        max_side: longest side in pixels, at least 1. Larger images are scaled down to it. With those that are turned or
            have a colour profile, they become upright JPEGs in sRGB, of quality 95, which load faster.

    Returns:
        names of the images that were skipped

    Raises:
        DataError: if an image cannot be used, or the shards there were begun with other arguments.
    """
    if not re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9]*", split):
        raise DataError(f"split {split!r} must be one word of lower-case letters and digits, like train or val")
    if shard_size < 1 or not samples:
        raise DataError(f"{len(samples)} samples in shards of {shard_size}; both must be at least 1")
    if max_side is not None and max_side < 1:
        raise DataError(f"max_side={max_side}; it must be at least 1")
    # What the bytes of the shards depend on
    files = _digest(samples, class_names)
    plan = {"samples": len(samples), "files": files, "seed": seed, "shard_size": shard_size}
    plan |= {} if max_side is None else {"max_side": max_side}
    os.makedirs(out, exist_ok=True)
    note = Path(out, f".{split}.plan.json")  # exists while shards are missing
    index = read_index(out) or {"splits": {}}
    entry = index["splits"].get(split, {})
    begun = read_json(note) or entry.get("made_with")
    if index["splits"] and index.get("class_names") not in (None, class_names):
        raise DataError(f"{out} holds splits with other classes; name another folder")
    if not isinstance(begun, dict) and (begun or entry or split in find_shards(out)):
        raise DataError(f"{out} holds {split} shards that were made by other means; name another folder")
    if begun is not None and begun != plan:
        changed = [key for key in {**begun, **plan} if begun.get(key) != plan.get(key)]
        words = ", ".join(f"{key} {begun.get(key)} (now {plan.get(key)})" for key in changed)
        raise DataError(f"{out} has {split} shards made with {words}; use the old values, or name another folder")
    clear_aside(Path(out, f"{split}-*.tar"))
    if entry and all(os.path.exists(os.path.join(out, name)) for name in entry["filenames"]):
        note.unlink(missing_ok=True)
        return entry.get("skipped") or []
    write_text(note, json.dumps(plan))
    shards = _shuffled(split, samples, seed, shard_size)
    lengths: list[int] = []
    skipped: list[str] = []
    with (
        concurrent.futures.ThreadPoolExecutor(cores()) as pool,
        tqdm(total=len(samples), unit="img", desc=split, disable=None) as bar,
    ):
        for name, part in shards.items():
            path = os.path.join(out, name)
            if os.path.exists(path):
                kept = {sample["__key__"] for sample in read_shard(path)}
            else:
                futures = [pool.submit(stored_form, sample, max_side) for sample in part.values()]
                kept = _write(path, part, futures, class_names, on_bad)
            lengths.append(len(kept))
            skipped += [sample.name for key, sample in part.items() if key not in kept]
            bar.update(len(part))
    facts = {"source": source, "made_with": plan, "skipped": skipped}
    write_index(out, {split: {"filenames": list(shards), "shard_lengths": lengths, **facts}}, class_names)
    note.unlink()
    return skipped


def _digest(samples: Sequence[sources.Sample], class_names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps(class_names).encode())
    for sample in samples:
        digest.update(f"{sample.name}\0{sample.label}\0{sample.size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _shuffled(
    split: str, samples: Sequence[sources.Sample], seed: int, shard_size: int
) -> dict[str, dict[str, sources.Sample]]:
    """Shuffle the samples into shards. Returns a dict from a shard's name to its samples by key."""
    order = list(samples)
    random.Random(seed).shuffle(order)
    names = (os.path.splitext(os.path.basename(sample.name))[0] for sample in order)
    # The position makes a key unique. A key has no dot, since readers take what follows the first for the extension.
    keys = [f"{position:07d}_{re.sub('[^A-Za-z0-9_-]', '_', name)[:64]}" for position, name in enumerate(names)]
    count = -(-len(samples) // shard_size)
    edges = [len(samples) * i // count for i in range(count + 1)]
    return {
        f"{split}-{i:06d}.tar": dict(zip(keys[start:stop], order[start:stop], strict=True))
        for i, (start, stop) in enumerate(itertools.pairwise(edges))
    }


def _write(
    path: str,
    samples: dict[str, sources.Sample],
    futures: list[concurrent.futures.Future[Any]],
    class_names: list[str],
    on_bad: str,
) -> set[str]:
    """Write one shard. `samples` are by key, and `futures` are what `stored_form` makes of each. Returns the keys of
    those that could be used."""
    written: dict[str, tuple[int, bytes]] = {}
    try:
        with written_aside(path, lasting=True) as aside:
            # Without owners and times the same samples make the same bytes.
            anonymous = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
            with open(aside, "wb") as file, wds.TarWriter(file, encoder=False, **anonymous) as tar:
                for (key, sample), future in zip(samples.items(), futures, strict=True):
                    try:
                        data, extension = future.result()
                    except DataError as error:
                        if on_bad == "skip":
                            continue
                        remedy = "leave such files out with on_bad skip, or repair this one and start again"
                        raise DataError(f"{error}; {remedy}") from None
                    about = {"filename": sample.name, "label": sample.label, "class_name": class_names[sample.label]}
                    label = str(sample.label).encode()
                    tar.write({"__key__": key, extension: data, "cls": label, "json": json.dumps(about).encode()})
                    written[key] = (zlib.crc32(data), label)
            back = {s["__key__"]: (zlib.crc32(image_of(s)), s["cls"]) for s in read_shard(str(aside))}
            if back != written:
                raise DataError(f"{path} does not read back as it was written; check the disk")
    finally:
        for future in futures:
            future.cancel()
    return set(written)


def stored_form(sample: sources.Sample, max_side: int | None) -> tuple[bytes, str]:
    """Read and decode an image. With a `max_side`, encode it again if it is larger, turned, or not in sRGB. Returns the
    bytes to store, and the extension by which readers find them."""
    data = sample.read()
    try:
        image = decode_image(data)
    except DataError as error:
        raise DataError(f"{sample.name}: {error}") from None
    warn_if_dark(data, image, sample.name)
    extension = os.path.splitext(sample.name)[1][1:].lower()
    longest = max(image.size)
    if max_side is None or (longest <= max_side and is_stored_as_seen(data)):
        return data, "jpg" if extension == "jpeg" else extension
    if longest > max_side:
        smaller = [max(1, round(side * max_side / longest)) for side in image.size]
        image = image.resize(smaller, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue(), "jpg"


def make_digits(out: str | os.PathLike[str]) -> None:
    """Make the shards of the built-in demo set in `out`, unless they are there. Several processes may do so at once.
    Raises DataError if `out` holds other data."""
    index = read_index(out)
    entries = list(index["splits"].values()) if index else []
    if index and {entry.get("source") for entry in entries} != {"digits"}:
        raise DataError(f"{out} holds other data than the digits; name another folder, or move it away")
    if index and all(os.path.exists(os.path.join(out, name)) for entry in entries for name in entry["filenames"]):
        return
    splits, class_names = sources.digits()
    os.makedirs(out, exist_ok=True)
    # Each process makes the same bytes in a folder of its own and moves them over, so any of them may be first.
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as aside:
        make_shards(aside, "train", splits["train"], class_names, shard_size=360, source="digits")
        make_shards(aside, "val", splits["val"], class_names, shard_size=180, source="digits")
        names = sorted(os.listdir(aside), key=lambda name: name == INDEX_NAMES[0])  # the index comes last
        if index is None and (others := filecmp.cmpfiles(aside, out, names, shallow=False)[1]):
            raise DataError(f"{out} holds other data than the digits ({others[0]}); name another folder, or move it")
        for name in names:
            os.replace(os.path.join(aside, name), os.path.join(out, name))


def locate_data(spec: str, accelerator: Any) -> str:
    """Return `spec`, or for the built-in digits the folder ./data/digits, and make them there if they are missing."""
    if spec != DIGITS:
        return spec
    with accelerator.local_main_process_first():
        make_digits(folder := os.path.join("data", DIGITS))
    return folder


def verify(directory: str | os.PathLike[str], full: bool = False) -> list[str]:
    """Read all shards of an index again, and decode every image if `full`, else its header. Returns one line for each
    problem. Raises DataError if there is no such folder or no index, or the index cannot be understood."""
    index = read_index(directory)
    if index is None:
        find_shards(directory)  # raises if it is no folder
        command = f"vision-longhorn shards index {shlex.quote(os.fspath(directory))}"
        raise DataError(f"{directory} has no index; `{command}` writes it")
    problems = [] if index["splits"] else [f"the index of {directory} names no shards"]

    def look(sample: RawSample) -> str:
        try:
            decoded(sample, index.get("num_classes"), decode_image if full else check_image)
        except DataError as error:
            return str(error)
        return ""

    shards = [shard for s in index["splits"].values() for shard in zip(s["filenames"], s["shard_lengths"], strict=True)]
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        for name, expected in tqdm(shards, unit="shard", disable=None):
            path = os.path.join(directory, name)
            try:
                found = list(pool.map(look, read_shard(path)))
            except DataError as error:
                problems.append(str(error))
                continue
            problems += filter(None, found)
            if len(found) != expected:
                problems.append(f"shard {path} has {len(found)} samples, the index says {expected}")
    return problems


def index_shards(directory: str | os.PathLike[str], class_names: list[str] | None = None) -> None:
    """Count the samples in shards made by others, and write their index.

    Args:
        directory: folder of shards; their names or folders tell their splits.
        class_names: name of each class by its index, if known.

    Raises:
        DataError: if there are no shards, one cannot be read, or names.txt there does not fit them.
    """
    before = read_index(directory) or {}
    class_names = class_names or before.get("class_names")
    same = class_names == before.get("class_names")
    display_names = read_names(directory, class_names) or (before.get("display_names") if same else None)
    splits: dict[str, dict[str, Any]] = {}
    most = -1
    for split, paths in find_shards(directory).items():
        lengths = []
        for path in tqdm(paths, unit="shard", desc=split, disable=None):
            labels = [label_of(sample) for sample in read_shard(path)]
            lengths.append(len(labels))
            most = max([most, *labels])
        names = [os.path.relpath(path, directory).replace(os.sep, "/") for path in paths]
        splits[split] = {"filenames": names, "shard_lengths": lengths}
    if most < 0:
        raise DataError(
            f"{directory} holds no shards with samples (SPLIT-000000.tar, plain or .gz, .bz2 or .xz, with KEY.jpg and "
            "KEY.cls in it)"
        )
    named = class_names or display_names
    if named and len(named) <= most:
        raise DataError(
            f"the shards in {directory} have a label {most}, but only {len(named)} classes are named: name all of them"
        )
    write_index(directory, splits, class_names, len(named or range(most + 1)), display_names)


@spelled(on_bad="--on-bad")
def carry_out(args: Namespace) -> None:
    """Carry out the command line `args` of `vision_longhorn.shards`. Raises UserError."""
    if args.command == "imagefolder":
        _imagefolder(args)
    elif args.command == "imagenet":
        _imagenet(args)
    elif args.command == "digits":
        make_digits(args.out)
    elif args.command == "index":
        index_shards(args.out, read_lines(args.classes) if args.classes else None)
    else:
        problems = verify(args.out, args.full)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems:
            raise DataError(f"{args.out} has {len(problems)} problems; fetch or make these shards again")
        print(f"{args.out}: no problems")
        return
    index = read_index(args.out) or {"splits": {}}
    for name, entry in index["splits"].items():
        print(
            f"{args.out}: {name}, {entry['num_samples']} images in {len(entry['filenames'])} shards, "
            f"{index['num_classes']} classes"
        )


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
    # List all splits before anything is written, and train first, since it fixes the classes of the others.
    for split in sorted(splits, key=lambda split: (not same_split(split, "train"), split != "train")):
        listed[split], class_names, others = sources.image_folder(splits[split], class_names)
        if others:
            print(f"left out of {splits[split]}: {list_others(others)}", file=sys.stderr)
    display_names = read_names(args.src, class_names)
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
