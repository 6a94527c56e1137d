"""Making, checking and indexing shards."""

import concurrent.futures
import filecmp
import functools
import hashlib
import io
import json
import logging
import os
import random
import re
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image
from tqdm import tqdm

from vision_longhorn.errors import reason
from vision_longhorn.files import left_aside, written_aside

from . import sources
from .folders import read_names
from .images import DataError, check_image, decode_image, too_dark
from .index import INDEX_NAMES, check_names, find_shards, read_index, write_index
from .samples import RawSample, image_of, label_of, place
from .tars import read_shard

_log = logging.getLogger(__name__)


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
    threads: int | None = None,
    progress: bool = True,
    max_side: int | None = None,
) -> list[str]:
    """Write samples into shards in an order shuffled over all classes, and the index when all are done.

    It may be stopped at any time and run again: shards that are done are kept. Every image is decoded once and stored
    with its bytes untouched, but for those above `max_side`; every shard is read back and compared before it gets its
    name.

    Args:
        out: folder for the shards, `{split}-000000.tar` and on.
        split: name of the split.
        samples: what to store.
        class_names: name of each class by its index.
        shard_size: samples per shard at most; they are filled evenly.
        seed: of the order.
        on_bad: "stop" or "skip" at an image that cannot be decoded.
        source: word for the index about where the samples come from.
        threads: readers and decoders, one per core by default.
        progress: show a bar.
        max_side: store images whose longer side is above it smaller, with that side, as JPEG of quality 95; at least 1.

    Returns:
        names of the images that were skipped

    Raises:
        DataError: if an image cannot be used, or the shards there were begun with other arguments.
    """
    if not re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9]*", split):
        raise DataError(f"split {split!r} must be one word of small letters and digits, like train or val")
    if shard_size < 1 or not samples:
        raise DataError(f"{len(samples)} samples in shards of {shard_size}; both must be at least 1")
    if max_side is not None and max_side < 1:
        raise DataError(f"max_side={max_side}; it must be at least 1, some hundreds for training")
    if threads is not None and threads < 1:
        raise DataError(f"threads={threads}; it must be at least 1")
    files = _fingerprint(samples, class_names)
    plan = {"samples": len(samples), "files": files, "seed": seed, "shard_size": shard_size}
    if max_side is not None:
        plan["max_side"] = max_side
    os.makedirs(out, exist_ok=True)
    journal = sources.Journal(os.path.join(out, f".{split}.journal"))
    done = _resume(out, split, plan, class_names, journal)
    if isinstance(done, list):
        return done

    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    count = -(-len(samples) // shard_size)
    edges = [len(samples) * i // count for i in range(count + 1)]
    names = [f"{split}-{i:06d}.tar" for i in range(count)]
    notes: list[str] = []
    todo = [range(edges[n], edges[n + 1]) for n, name in enumerate(names) if name not in done]
    _check_space(out, [samples[order[position]] for positions in todo for position in positions])
    with (
        concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool,
        tqdm(total=len(samples), unit="img", desc=split, disable=not progress) as bar,
    ):
        for number, name in enumerate(names):
            positions = range(edges[number], edges[number + 1])
            if name not in done:
                chosen = [(position, samples[order[position]]) for position in positions]
                done[name] = _write_shard(
                    os.path.join(out, name), chosen, class_names, on_bad, max_side, pool, bar, notes
                )
                journal.add(done[name])
            else:
                bar.update(len(positions))
    _tell(notes)
    skipped = [image for name in names for image in done[name]["skipped"]]
    facts = {"source": source, "made_with": plan, "skipped": skipped}
    write_index(out, {split: (names, [done[name]["samples"] for name in names], facts)}, class_names)
    journal.remove()
    return skipped


def make_digits(out_dir: Path | str) -> Path | str:
    """Make the shards of the built-in demo set, unless they are there. Several processes may do so at once.

    Args:
        out_dir: folder for 4 training and 2 validation shards with their index.

    Returns:
        out_dir

    Raises:
        DataError: if `out_dir` holds other data.
    """
    index = read_index(out_dir)
    if index is not None:
        if {entry.get("source") for entry in index["splits"].values()} != {"digits"}:
            raise DataError(f"{out_dir} holds other data than the digits; name another folder")
        if all(os.path.exists(os.path.join(out_dir, f)) for s in index["splits"].values() for f in s["filenames"]):
            return out_dir
    splits, class_names = sources.digits()
    os.makedirs(out_dir, exist_ok=True)
    # Everyone makes the same bytes in a place of his own and moves them over, so it does not matter who is first.
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".making-") as aside:
        make_shards(aside, "train", splits["train"], class_names, shard_size=360, source="digits", progress=False)
        make_shards(aside, "val", splits["val"], class_names, shard_size=180, source="digits", progress=False)
        names = sorted(os.listdir(aside), key=lambda name: name == INDEX_NAMES[0])
        for name in names:
            there = os.path.join(out_dir, name)
            if (
                index is None
                and os.path.lexists(there)
                and not filecmp.cmp(os.path.join(aside, name), there, shallow=False)
            ):
                raise DataError(f"{out_dir} holds another {name} than the digits'; name another folder")
        for name in names:
            os.replace(os.path.join(aside, name), os.path.join(out_dir, name))
    return out_dir


def _resume(
    out: str | os.PathLike[str], split: str, plan: dict[str, Any], class_names: list[str], journal: sources.Journal
) -> dict[str, dict[str, Any]] | list[str]:
    """Journal entries of the shards that are done, by name; where the whole split is, names of what was skipped."""
    index = read_index(out) or {"splits": {}}
    if index["splits"] and index.get("class_names") not in (None, class_names):
        raise DataError(f"{out} holds splits with other classes; name another folder")
    entry = index["splits"].get(split)
    begun = journal.entries[0] if journal.entries else entry.get("made_with") if entry else None
    if begun is None and (entry or split in find_shards(out)):
        raise DataError(f"{out} holds {split} shards that were made by other means; name another folder")
    if begun is not None and begun != plan:
        changed = ", ".join(
            f"{key} {begun.get(key)} (now {plan.get(key)})"
            for key in {**begun, **plan}
            if begun.get(key) != plan.get(key)
        )
        raise DataError(f"{out} has {split} shards made with {changed}; use the old values, or name another folder")
    for partial in left_aside(Path(out, f"{split}-*.tar")):
        partial.unlink()
    if entry and all(os.path.exists(os.path.join(out, name)) for name in entry["filenames"]):
        journal.remove()
        return entry["skipped"]
    if not journal.entries:
        journal.add(plan)
    done: dict[str, dict[str, Any]] = {}
    for note in journal.entries[1:]:
        path = os.path.join(out, note["shard"])
        if os.path.exists(path) and os.path.getsize(path) == note["bytes"]:
            done[note["shard"]] = note
    return done


def _fingerprint(samples: Sequence[sources.Sample], class_names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps(class_names).encode())
    for sample in samples:
        digest.update(f"{sample.name}\0{sample.label}\0{sample.size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _check_space(out: str | os.PathLike[str], samples: Sequence[sources.Sample]) -> None:
    needed = sum(sample.size + 4096 for sample in samples)  # tar headers and padding of three members
    free = shutil.disk_usage(out).free
    if needed > free:
        needed, free = (tqdm.format_sizeof(amount, "B") for amount in (needed, free))
        raise DataError(f"{out} needs {needed} more, but has {free} free; make room")


def _write_shard(
    path: str,
    samples: Sequence[tuple[int, sources.Sample]],
    class_names: list[str],
    on_bad: str,
    max_side: int | None,
    pool: concurrent.futures.Executor,
    bar: tqdm,
    notes: list[str],
) -> dict[str, Any]:
    """Write one shard from (position in the shuffled order, sample) pairs; returns its entry for the journal."""
    skipped: list[str] = []
    written: dict[str, tuple[int, bytes]] = {}
    futures = [pool.submit(stored_form, sample, max_side, notes) for _, sample in samples]
    try:
        with written_aside(path) as aside:
            # Without owners and times the same samples make the same bytes.
            anonymous = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
            with open(aside, "wb") as file, wds.TarWriter(file, encoder=False, **anonymous) as tar:
                for (position, sample), future in zip(samples, futures, strict=True):
                    try:
                        data, extension, resized_from = future.result()
                    except DataError as error:
                        if on_bad != "skip":
                            remedy = "leave such files out with --on-bad skip, or mend it and start anew"
                            raise DataError(f"{error}; {remedy}") from None
                        skipped.append(sample.name)
                        bar.update()
                        continue
                    key = _key(position, sample.name)
                    label = str(sample.label).encode()
                    about: dict[str, Any] = {
                        "filename": sample.name,
                        "label": sample.label,
                        "class_name": class_names[sample.label],
                    }
                    if resized_from:
                        about["resized_from"] = resized_from
                    tar.write({"__key__": key, extension: data, "cls": label, "json": json.dumps(about).encode()})
                    written[key] = (zlib.crc32(data), label)
                    bar.update()
            back = {s["__key__"]: (zlib.crc32(image_of(s)), s["cls"]) for s in read_shard(str(aside))}
            if back != written:
                raise DataError(f"{path} did not come back from the disk as it was written; check the disk")
            entry = {"shard": os.path.basename(path), "samples": len(written), "bytes": os.path.getsize(aside)}
    finally:
        for future in futures:
            future.cancel()
    return {**entry, "skipped": skipped}


def _tell(notes: list[str]) -> None:
    """Tells the first of the lines about images that are used."""
    if notes:
        _log.warning("%s%s", min(notes), f" ({len(notes)} such pictures)" if len(notes) > 1 else "")


def stored_form(
    sample: sources.Sample, max_side: int | None, notes: list[str] | None = None
) -> tuple[bytes, str, list[int] | None]:
    """Bytes to store, the extension by which readers find them, and [width, height] of an image that is now smaller.

    A line about an image that comes out dark is added to `notes`.

    Raises:
        DataError: if the image cannot be read or decoded.
    """
    data = sample.read()
    try:
        image = decode_image(data)
    except DataError as error:
        raise DataError(f"{sample.name}: {error}") from None
    if notes is not None and (dark := too_dark(data, image)):
        notes.append(f"{sample.name}: {dark}")
    extension = os.path.splitext(sample.name)[1][1:].lower()
    if max_side is None or max(image.size) <= max_side:
        return data, "jpg" if extension == "jpeg" else extension, None
    smaller = [max(1, round(side * max_side / max(image.size))) for side in image.size]
    file = io.BytesIO()
    image.resize(smaller, Image.Resampling.LANCZOS).save(file, "JPEG", quality=95)
    return file.getvalue(), "jpg", list(image.size)


def _key(position: int, name: str) -> str:
    """Key that is unique in the split."""
    # A reader takes everything after the first dot for the extension.
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.splitext(os.path.basename(name))[0])[:64]
    return f"{position:07d}_{stem}"


def verify(directory: str | os.PathLike[str], full: bool = False, progress: bool = True) -> list[str]:
    """Read all shards of an index again.

    Args:
        directory: folder of shards with an index.
        full: decode every image, instead of its header only.
        progress: show a bar.

    Returns:
        what is wrong, a line each

    Raises:
        DataError: if there is no such folder or no index, or the index is none.
    """
    index = read_index(directory)
    if index is None:
        if not find_shards(directory):
            raise DataError(f"{directory} holds no shards and no index; give a folder of shards")
        command = f"python -m vision_longhorn.shards index {shlex.quote(os.fspath(directory))}"
        raise DataError(f"{directory} has no index; `{command}` writes it")
    problems = [] if index["splits"] else [f"the index of {directory} names no shards"]
    check = decode_image if full else check_image
    notes: list[str] = []
    look = functools.partial(_problems, num_classes=index.get("num_classes"), check=check, notes=notes)
    shards = [
        (os.path.join(directory, name), length)
        for entry in index["splits"].values()
        for name, length in zip(entry["filenames"], entry["shard_lengths"], strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, expected in tqdm(shards, unit="shard", disable=not progress):
            try:
                found = list(pool.map(look, read_shard(path)))
            except DataError as error:
                problems.append(str(error))
                continue
            problems += [problem for of_one in found for problem in of_one]
            if len(found) != expected:
                problems.append(f"shard {path} has {len(found)} samples, the index says {expected}")
    _tell(notes)
    return problems


def _problems(sample: RawSample, num_classes: int | None, check: Any, notes: list[str]) -> list[str]:
    try:
        label = label_of(sample, num_classes)
        data = image_of(sample)
    except DataError as error:
        return [str(error)]
    try:
        if dark := too_dark(data, check(data)):
            notes.append(f"{place(sample)}: {dark}")
        about = json.loads(sample.get("json", b"{}"))
        if isinstance(about, dict) and about.get("label", label) != label:
            return [f"{place(sample)}: label {label} in .cls, but {about['label']} in .json"]
    except ValueError as error:
        return [f"{place(sample)}: {error}"]
    return []


def index_shards(
    directory: str | os.PathLike[str],
    class_names: list[str] | None = None,
    progress: bool = True,
    names: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Count what is in shards that were made by others, and write their index.

    Args:
        directory: folder of shards, whose names or folders tell their splits.
        class_names: name of each class by its index, if known.
        progress: show a bar.
        names: text file of what people call the classes, see `data.folders.read_names`.

    Returns:
        the index written

    Raises:
        DataError: if there are no shards, one cannot be read, or `names` does not fit them.
    """
    before = read_index(directory) or {}
    class_names = class_names or before.get("class_names")
    if class_names:
        check_names("class_names", class_names)
    same = class_names == before.get("class_names")
    display_names = read_names(names, class_names) if names else before.get("display_names") if same else None
    splits: dict[str, tuple[list[str], list[int], Mapping[str, Any]]] = {}
    most = -1
    for split, paths in find_shards(directory).items():
        lengths = []
        for path in tqdm(paths, unit="shard", desc=split, disable=not progress):
            labels = [label_of(sample) for sample in read_shard(path)]
            lengths.append(len(labels))
            most = max([most, *labels])
        splits[split] = ([os.path.relpath(path, directory).replace(os.sep, "/") for path in paths], lengths, {})
    if not splits:
        raise DataError(f"{directory} holds no shards (SPLIT-000000.tar, plain or .gz, .bz2 or .xz)")
    if most < 0:
        raise DataError(f"the shards in {directory} hold no samples; a sample is a KEY.jpg and a KEY.cls")
    named = class_names or display_names
    if named and len(named) <= most:
        raise DataError(f"the shards in {directory} have a label {most}, but only {len(named)} classes are named")
    try:
        write_index(directory, splits, class_names, len(named or range(most + 1)), display_names)
    except OSError as error:
        raise DataError(f"the index cannot be written to {directory} ({reason(error)})") from None
    return read_index(directory) or {}
