"""Making, checking and indexing shards."""

import concurrent.futures
import dataclasses
import filecmp
import functools
import hashlib
import io
import json
import os
import random
import re
import shlex
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import webdataset as wds
from PIL import Image
from tqdm import tqdm

from vision_longhorn.errors import one_line, reason
from vision_longhorn.files import append, clear_aside, written_aside
from vision_longhorn.settings import DIGITS

from . import sources
from .folders import read_names
from .images import DataError, check_image, decode_image, warn_if_dark
from .index import INDEX_NAMES, read_index, write_index
from .places import find_shards
from .samples import RawSample, image_of, label_of, place
from .tars import read_shard

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    max_side: int | None = None,
) -> list[str]:
    """Write samples into shards in an order shuffled over all classes, and the index when all are done.

    It may be stopped and run again: finished shards are kept. Every image is decoded once and stored untouched, unless
    it is above `max_side`. Every shard is read back and compared before it gets its name.

    Args:
        out: folder for the shards, `{split}-000000.tar` and on.
        class_names: name of each class by its index.
        shard_size: samples per shard at most; they are filled evenly.
        on_bad: "stop" or "skip" at an image that cannot be decoded.
        source: word for the index about where the samples come from.
        threads: readers and decoders, one per core by default.
        max_side: store images whose longer side is above it smaller, with that side, as JPEG of quality 95; at least 1.

    Returns:
        names of the images that were skipped

    Raises:
        DataError: if an image cannot be used, or the shards there were begun with other arguments.
    """
    plan = _plan(split, samples, class_names, seed, shard_size, max_side, threads)
    os.makedirs(out, exist_ok=True)
    journal = Journal(os.path.join(out, f".{split}.journal"))
    if (done := _resume(out, split, plan, class_names, journal)) is None:
        return read_index(out)["splits"][split]["skipped"]  # type: ignore[index]  # which `_resume` has read
    shards = _shuffled(split, samples, seed, shard_size)
    with (
        concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool,
        tqdm(total=len(samples), unit="img", desc=split, disable=None) as bar,
    ):
        writer = _Writer(class_names, on_bad, max_side, pool, bar)
        for name, part in shards.items():
            if name in done:
                bar.update(len(part))
            else:
                done[name] = writer.write(os.path.join(out, name), part)
                journal.add(done[name])
    skipped = [image for name in shards for image in done[name]["skipped"]]
    facts = {"source": source, "made_with": plan, "skipped": skipped}
    write_index(out, {split: (list(shards), [done[name]["samples"] for name in shards], facts)}, class_names)
    journal.remove()
    return skipped


def _plan(
    split: str,
    samples: Sequence[sources.Sample],
    class_names: list[str],
    seed: int,
    shard_size: int,
    max_side: int | None,
    threads: int | None,
) -> dict[str, Any]:
    """What the bytes of the shards depend on. Raises DataError for arguments that cannot be."""
    if not re.fullmatch(r"[a-z0-9]*[a-z][a-z0-9]*", split):
        raise DataError(f"split {split!r} must be one word of small letters and digits, like train or val")
    if shard_size < 1 or not samples:
        raise DataError(f"{len(samples)} samples in shards of {shard_size}; both must be at least 1")
    for name, value in ("max_side", max_side), ("threads", threads):
        if value is not None and value < 1:
            raise DataError(f"{name}={value}; it must be at least 1")
    digest = hashlib.sha256(json.dumps(class_names).encode())
    for sample in samples:
        digest.update(f"{sample.name}\0{sample.label}\0{sample.size}\n".encode("utf-8", "surrogateescape"))
    plan = {"samples": len(samples), "files": digest.hexdigest()[:16], "seed": seed, "shard_size": shard_size}
    return plan if max_side is None else {**plan, "max_side": max_side}


class Journal:
    """Notes of what is done, one JSON object a line, so that a run that was stopped can go on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        text = self.path.read_bytes() if self.path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:  # stopped in the middle of a line
            with written_aside(path) as aside:
                aside.write_bytes(whole)
        try:
            self.entries: list[dict[str, Any]] = [dict(json.loads(line)) for line in whole.splitlines()]
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({one_line(error)}); remove it, and its shards are made anew") from None

    def add(self, entry: Any) -> None:
        append(self.path, json.dumps(entry).encode() + b"\n")
        self.entries.append(entry)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _resume(
    out: str | os.PathLike[str], split: str, plan: dict[str, Any], class_names: list[str], journal: Journal
) -> dict[str, dict[str, Any]] | None:
    """Journal entries of the finished shards, by name; None if the whole split is finished."""
    index = read_index(out) or {"splits": {}}
    if index["splits"] and index.get("class_names") not in (None, class_names):
        raise DataError(f"{out} holds splits with other classes; name another folder")
    entry = index["splits"].get(split)
    begun = journal.entries[0] if journal.entries else entry.get("made_with") if entry else None
    if begun is None and (entry or split in find_shards(out)):
        raise DataError(f"{out} holds {split} shards that were made by other means; name another folder")
    if begun is not None and begun != plan:
        changed = [key for key in {**begun, **plan} if begun.get(key) != plan.get(key)]
        words = ", ".join(f"{key} {begun.get(key)} (now {plan.get(key)})" for key in changed)
        raise DataError(f"{out} has {split} shards made with {words}; use the old values, or name another folder")
    clear_aside(Path(out, f"{split}-*.tar"))
    if entry and all(os.path.exists(os.path.join(out, name)) for name in entry["filenames"]):
        journal.remove()
        return None
    if not journal.entries:
        journal.add(plan)
    found = ((note, Path(out, note["shard"])) for note in journal.entries[1:])
    return {note["shard"]: note for note, path in found if path.exists() and path.stat().st_size == note["bytes"]}


def _shuffled(
    split: str, samples: Sequence[sources.Sample], seed: int, shard_size: int
) -> dict[str, list[tuple[int, sources.Sample]]]:
    """(position in the shuffled order, sample) of the samples of each shard, by its name."""
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    count = -(-len(samples) // shard_size)
    edges = [len(samples) * i // count for i in range(count + 1)]
    return {
        f"{split}-{i:06d}.tar": [(position, samples[order[position]]) for position in range(edges[i], edges[i + 1])]
        for i in range(count)
    }


@dataclasses.dataclass
class _Writer:
    class_names: list[str]
    on_bad: str
    max_side: int | None
    pool: concurrent.futures.Executor
    bar: tqdm

    def write(self, path: str, samples: Sequence[tuple[int, sources.Sample]]) -> dict[str, Any]:
        """Write one shard from (position in the shuffled order, sample) pairs; returns its entry for the journal."""
        skipped: list[str] = []
        written: dict[str, tuple[int, bytes]] = {}
        futures = [self.pool.submit(stored_form, sample, self.max_side) for _, sample in samples]
        try:
            with written_aside(path) as aside:
                # Without owners and times the same samples make the same bytes.
                anonymous = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
                with open(aside, "wb") as file, wds.TarWriter(file, encoder=False, **anonymous) as tar:
                    for (position, sample), future in zip(samples, futures, strict=True):
                        self.bar.update()
                        try:
                            data, extension, resized_from = future.result()
                        except DataError as error:
                            if self.on_bad != "skip":
                                remedy = "leave such files out with on_bad skip, or mend it and start anew"
                                raise DataError(f"{error}; {remedy}") from None
                            skipped.append(sample.name)
                            continue
                        about = {
                            "filename": sample.name,
                            "label": sample.label,
                            "class_name": self.class_names[sample.label],
                            **({"resized_from": resized_from} if resized_from else {}),
                        }
                        key, label = _key(position, sample.name), str(sample.label).encode()
                        tar.write({"__key__": key, extension: data, "cls": label, "json": json.dumps(about).encode()})
                        written[key] = (zlib.crc32(data), label)
                back = {s["__key__"]: (zlib.crc32(image_of(s)), s["cls"]) for s in read_shard(str(aside))}
                if back != written:
                    raise DataError(f"{path} did not come back from the disk as it was written; check the disk")
                size = os.path.getsize(aside)
        finally:
            for future in futures:
                future.cancel()
        return {"shard": os.path.basename(path), "samples": len(written), "bytes": size, "skipped": skipped}


def _key(position: int, name: str) -> str:
    """Key of a sample. The position makes it unique; a reader takes all after the first dot for the extension."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.splitext(os.path.basename(name))[0])[:64]
    return f"{position:07d}_{stem}"


def stored_form(sample: sources.Sample, max_side: int | None) -> tuple[bytes, str, list[int] | None]:
    """Read and decode an image, and encode it anew if a side is above `max_side`. Returns the bytes to store, the
    extension by which readers find them, and [width, height] of the original if it is smaller now."""
    data = sample.read()
    try:
        image = decode_image(data)
    except DataError as error:
        raise DataError(f"{sample.name}: {error}") from None
    warn_if_dark(data, image, sample.name)
    extension = os.path.splitext(sample.name)[1][1:].lower()
    if max_side is None or max(image.size) <= max_side:
        return data, "jpg" if extension == "jpeg" else extension, None
    smaller = [max(1, round(side * max_side / max(image.size))) for side in image.size]
    file = io.BytesIO()
    image.resize(smaller, Image.Resampling.LANCZOS).save(file, "JPEG", quality=95)
    return file.getvalue(), "jpg", list(image.size)


def make_digits(out_dir: Path | str) -> Path | str:
    """Make the shards of the built-in demo set in `out_dir`, unless they are there, and return it. Several processes
    may do so at once. Raises DataError if `out_dir` holds other data."""
    index = read_index(out_dir)
    if index is not None:
        if {entry.get("source") for entry in index["splits"].values()} != {"digits"}:
            raise DataError(f"{out_dir} holds other data than the digits; name another folder")
        if all(os.path.exists(os.path.join(out_dir, f)) for s in index["splits"].values() for f in s["filenames"]):
            return out_dir
    splits, class_names = sources.digits()
    os.makedirs(out_dir, exist_ok=True)
    # Each process makes the same bytes in a folder of its own and moves them over, so any of them may be first.
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".making-") as aside:
        make_shards(aside, "train", splits["train"], class_names, shard_size=360, source="digits")
        make_shards(aside, "val", splits["val"], class_names, shard_size=180, source="digits")
        names = sorted(os.listdir(aside), key=lambda name: name == INDEX_NAMES[0])
        pairs = [(Path(aside, name), Path(out_dir, name)) for name in names]
        for made, there in pairs if index is None else ():
            if os.path.lexists(there) and not filecmp.cmp(made, there, shallow=False):
                raise DataError(f"{out_dir} holds another {there.name} than the digits'; name another folder")
        for made, there in pairs:
            made.replace(there)
    return out_dir


def locate_data(spec: str, accelerator: "Accelerator") -> str:
    """`spec` itself, or the folder ./data/digits for the built-in digits, which are made there if they are missing."""
    if spec != DIGITS:
        return spec
    folder = Path("data", DIGITS)
    if accelerator.is_local_main_process:
        make_digits(folder)
    accelerator.wait_for_everyone()
    return str(folder)


def verify(directory: str | os.PathLike[str], full: bool = False) -> list[str]:
    """Read all shards of an index again, and decode every image if `full`, else its header. Returns what is wrong, a
    line each; raises DataError if there is no such folder or no index, or the index cannot be understood."""
    index = read_index(directory)
    if index is None:
        if not find_shards(directory):
            raise DataError(f"{directory} holds no shards and no index; give a folder of shards")
        command = f"python -m vision_longhorn.shards index {shlex.quote(os.fspath(directory))}"
        raise DataError(f"{directory} has no index; `{command}` writes it")
    problems = [] if index["splits"] else [f"the index of {directory} names no shards"]
    look = functools.partial(_problem, num_classes=index.get("num_classes"), full=full)
    shards = [shard for s in index["splits"].values() for shard in zip(s["filenames"], s["shard_lengths"], strict=True)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
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


def _problem(sample: RawSample, num_classes: int | None, full: bool) -> str:
    """What is wrong with a sample, or ""."""
    try:
        label = label_of(sample, num_classes)
        data = image_of(sample)
    except DataError as error:
        return str(error)
    try:
        if full:
            warn_if_dark(data, decode_image(data), place(sample))
        else:
            check_image(data)
        about = json.loads(sample.get("json", b"{}"))
        if isinstance(about, dict) and about.get("label", label) != label:
            return f"{place(sample)}: label {label} in .cls, but {about['label']} in .json"
    except ValueError as error:
        return f"{place(sample)}: {error}"
    return ""


def index_shards(
    directory: str | os.PathLike[str],
    class_names: list[str] | None = None,
    names: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Count the samples in shards made by others, and write their index.

    Args:
        directory: folder of shards, whose names or folders tell their splits.
        class_names: name of each class by its index, if known.
        names: text file of what people call the classes, see `data.folders.read_names`.

    Returns:
        the index written

    Raises:
        DataError: if there are no shards, one cannot be read, or `names` does not fit them.
    """
    before = read_index(directory) or {}
    class_names = class_names or before.get("class_names")
    same = class_names == before.get("class_names")
    display_names = read_names(names, class_names) if names else before.get("display_names") if same else None
    splits: dict[str, tuple[list[str], list[int], Mapping[str, Any]]] = {}
    most = -1
    for split, paths in find_shards(directory).items():
        lengths = []
        for path in tqdm(paths, unit="shard", desc=split, disable=None):
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
