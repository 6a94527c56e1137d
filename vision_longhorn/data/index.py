"""Finding shards, reading what is in them, and the index file that says how much it is.

A shard is a tar file (plain or gzip) whose samples are runs of members with one name: `KEY.jpg`, `KEY.cls` (the class
index in ASCII) and perhaps `KEY.json`. The index, `_info.json`, is the one that timm's `ReaderWds` reads, with
`num_classes`, `class_names` and `display_names` added. An image folder that is read as it is stands for shards as well.
"""

import contextlib
import dataclasses
import glob
import gzip
import json
import os
import re
import shlex
import subprocess
import tarfile
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path

import braceexpand
from webdataset.gopen import Pipe
from webdataset.tariterators import group_by_keys, tar_file_expander

from vision_longhorn.command_line.signals import COMMANDS, end_command
from .folders import NAMES_FILE, SPLITS, ImageFiles, class_folders, find_splits, list_images, read_names
from .images import EXTENSIONS, DataError

INDEX_NAMES = ("_info.json", "info.json")
_SHARD = re.compile(r"\.tar(\.gz)?$|\.tgz$")
_ALIASES = {"val": "validation", "validation": "val"}


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """The shards of one split.

    Attributes:
        urls: paths or http(s) URLs of the shards, or `pipe:COMMAND`; for an image folder its path, once for each run of
            files that serves as a shard.
        num_samples: samples in all shards together.
        num_classes: number of classes, None if unknown.
        class_names: name of each class by its index, None if unknown.
        split: name of the split.
        samples_per_shard: samples in each of `urls`, None if unknown.
        pipes: whether `urls` are commands, to be run for what they print. Nothing in a shard or an index can set it.
        display_names: what people call each class, by its index, None if unknown.
        files: the `ImageFiles` of an image folder, None for shards.
        hint: a line for whoever reads an image folder: how to make shards of it, and what is left out; else "".
        samples_option: what the caller calls `num_samples`, for messages.
    """

    urls: list
    num_samples: int
    num_classes: int | None = None
    class_names: list | None = None
    split: str = ""
    samples_per_shard: list | None = None
    pipes: bool = False
    display_names: list | None = None
    files: ImageFiles | None = None
    hint: str = ""
    samples_option: str = "num_samples"

    def read(self, number):
        """The samples of shard `number`, as `read_shard` yields them. Raises DataError as it does."""
        return self.files.samples(number) if self.files else read_shard(self.urls[number], self.pipes)


def open_shards(spec, split="train", num_samples=None, num_classes=None, allow_pipe=False, *, train=None,
                class_names=None, samples_option="num_samples"):
    """Find the shards of a split, or the images of a folder, and learn how many samples and classes they hold.

    A folder without shards is read as it is: `spec/SPLIT/CLASS/IMAGE`, or `spec/CLASS/IMAGE` for whatever split.

    Args:
        spec: a directory of shards or of images; or a path, glob or brace pattern (`train-{000000..000015}.tar`), local
            or http(s); or with `allow_pipe` a shell command that prints a shard, `pipe:COMMAND`, with brace patterns as
            well.
        split: which split of a directory; "val" and "validation" mean the same.
        num_samples: number of samples, where no index tells it.
        num_classes: number of classes, where no index tells it (or to use a model with more).
        allow_pipe: run the command of a `pipe:` in `spec`.
        train: ShardSet that is trained on, where this one is to evaluate: it has the same classes. An image folder
            without splits cannot be both.
        class_names: the classes by index that labels are to follow; default those of `train`. Without either, those of
            an image folder are its folders by name: of `spec/train`, where there is one.
        samples_option: what the user calls `num_samples`, for messages.

    Returns:
        ShardSet

    Raises:
        DataError: if shards are missing, the count is unknown, the classes are not those that they should be, or the
            URL is of a kind that could run commands.
    """
    spec = os.fspath(spec)
    class_names = class_names or (train and train.class_names)
    if num_classes is not None and num_classes < 1:
        raise DataError(f"num_classes={num_classes}; it must be at least 1")
    pipes = allow_pipe and _is_pipe(spec)
    if pipes:
        urls, index, counts = _expand_command(spec), None, None
    elif "://" not in spec and os.path.isdir(spec):
        index = read_index(spec)
        if index is None:
            splits = find_shards(spec)
            if not splits:
                return _open_folder(spec, split, num_samples, num_classes, train, class_names, samples_option)
            urls, counts = splits[_pick(split, splits, spec)], None
        else:
            split = _pick(split, index["splits"], spec)
            entry = index["splits"][split]
            urls = [os.path.join(spec, name) for name in entry["filenames"]]
            counts = list(entry["shard_lengths"])
    else:
        urls = _expand(spec)
        index = read_index(os.path.dirname(urls[0]) or ".") if "://" not in urls[0] else None
        counts = _look_up(urls, index)
    missing = [url for url in urls if not pipes and "://" not in url and not os.path.isfile(url)]
    if missing:
        raise DataError(f"shard {missing[0]} is missing ({len(missing)} of {len(urls)} in {spec!r}); check the path")
    if counts is not None:
        if num_samples not in (None, sum(counts)):
            raise DataError(f"{samples_option}={num_samples}, but the index of {spec!r} says {sum(counts)}; drop one")
        num_samples = sum(counts)
    if num_samples is None:
        if pipes or "://" in urls[0]:
            remedy = f", which no index tells of a {'command' if pipes else 'URL'}"
        else:
            folder = spec if os.path.isdir(spec) else os.path.dirname(urls[0]) or "."
            remedy = f", or write an index with `python -m vision_longhorn.shards index {shlex.quote(folder)}`"
        raise DataError(f"the number of samples in {spec!r} ({split}) is unknown; give {samples_option}{remedy}")
    if num_samples < 1:
        raise DataError(f"{samples_option}={num_samples} for {spec!r}; it must be at least 1")
    index = index or {}
    _compare_classes(spec, index.get("class_names"), class_names)
    return ShardSet(urls, num_samples, num_classes or index.get("num_classes"), index.get("class_names"), split, counts,
                    pipes, index.get("display_names"), samples_option=samples_option)


def _compare_classes(spec, names, wanted):
    """Raises DataError where a class of `wanted` has another index in `names`. Other names may be other words only."""
    for number, name in enumerate(names or ()):
        if wanted and name in wanted and wanted[number:number + 1] != [name]:
            raise DataError(f"class {name!r} has index {number} in {spec!r}, but {wanted.index(name)} in the training "
                            "data; make the shards of both in one folder, so that their classes agree")


def _open_folder(spec, split, num_samples, num_classes, train, class_names, samples_option):
    """The ShardSet of an image folder."""
    home, folder, splits = spec, spec, find_splits(spec, (*SPLITS, split))
    if splits:
        split = _pick(split, splits, spec)
        folder = splits[split]
    else:
        above, name = os.path.split(os.path.abspath(spec))
        if name in SPLITS:
            with contextlib.suppress(DataError, OSError):
                splits = find_splits(above)
                home = above
        if train is not None and train.files and os.path.samefile(train.files.folder, folder):
            remedy = f"{above}, which has {', '.join(splits)}" if len(splits) > 1 else (
                f"--val-data, or part its images into {os.path.join(spec, 'train')} and {os.path.join(spec, 'val')}")
            raise DataError(f"{spec} has no splits but classes ({', '.join(train.class_names[:2])}, ...), and all of "
                            f"it is trained on; give {remedy}")
    if class_names is None and "train" in splits and not os.path.samefile(splits["train"], folder):
        class_names = class_folders(splits["train"])
    listed, names, others = list_images(folder, class_names)
    if not listed:
        raise DataError(
            f"{folder} holds no shards and no folders of images; give a folder with train/CLASS/IMAGE.jpg and "
            "val/CLASS/IMAGE.jpg, or of shards, which `python -m vision_longhorn.shards imagefolder IMAGES OUT` makes"
        )
    if len(names) == 1 and class_names is None:
        raise DataError(f"{folder} has one class only, {names[0]!r}; give the folder whose folders are the classes")
    if train is not None and class_names is None and train.num_classes not in (None, len(names)):
        raise DataError(f"{folder} has {len(names)} classes, the training data {train.num_classes}, whose names are "
                        "unknown; give the training data an index with class names")
    if num_samples not in (None, len(listed)):
        raise DataError(f"{samples_option}={num_samples}, but {folder} holds {len(listed)} images; drop it")
    command = f"python -m vision_longhorn.shards imagefolder {shlex.quote(home)} OUT"
    hint = f"{folder} is read image by image, and shards load faster: {command}{'' if splits else f' --split {split}'}"
    if others:
        hint += f"; left out there, as no images by name: {len(others)} ({', '.join(others[:3])})"
    file = os.path.join(home, NAMES_FILE)
    display_names = read_names(file, names) if os.path.isfile(file) else None
    files = ImageFiles.mixed(folder, listed)
    return ShardSet([folder] * len(files.lengths), len(listed), num_classes or len(names), names, split, files.lengths,
                    display_names=display_names, files=files, hint=hint, samples_option=samples_option)


def _is_pipe(spec):
    return spec[:5].lower() == "pipe:"


def _pick(split, splits, spec):
    for name in (split, _ALIASES.get(split)):
        if name in splits:
            return name
    have = ", ".join(sorted(splits)) or "no shards"
    raise DataError(f"{spec!r} has no split {split!r}; it has {have}; name one of these, or other data for {split!r}")


def _expand(spec):
    """Local paths and http(s) URLs that a pattern stands for, in order."""
    if _is_pipe(spec) and not os.path.exists(spec):
        raise DataError(f"{spec!r} is not read, as pipe: runs a command; where that is meant, --allow-pipe (in Python "
                        "allow_pipe=True) has to be given, each time, also to resume a run or to evaluate a checkpoint")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):", spec)  # two letters at least: C: is a drive
    if scheme and scheme[1].lower() not in ("http", "https") and not os.path.exists(spec):
        raise DataError(f"{spec!r}: {scheme[1]}: is not read, as it may run commands; give a path or an http(s) URL")
    urls = _expand_braces(spec)
    if any("{" in url or "}" in url for url in urls):
        raise DataError(f"{spec!r} has an empty brace range; write train-{{000000..000015}}.tar")
    found = []
    for url in urls:
        if "://" in url or not glob.has_magic(url) or os.path.exists(url):
            found.append(url)
        else:
            found += sorted(glob.glob(url))
    if not found:
        raise DataError(f"no file matches {spec!r}; check the pattern")
    return found


def _expand_command(spec):
    """The `pipe:` commands that a pattern stands for, in order. Backslashes, and braces without a pattern in them, are
    left to the shell."""
    if not spec[5:].strip():
        raise DataError(f"{spec!r} names no command; write 'pipe:cat train-{{000000..000015}}.tar'")
    return _expand_braces(spec, escape=False)


def _expand_braces(spec, **options):
    for low, high in re.findall(r"\{(\d+)\.\.(\d+)[^}]*\}", spec):
        if int(low) > int(high):
            raise DataError(f"{spec!r}: the range {low}..{high} is empty; write the smaller number first")
    try:
        return list(braceexpand.braceexpand(spec, **options))
    except braceexpand.UnbalancedBracesError:
        raise DataError(f"{spec!r} has unbalanced braces; write train-{{000000..000015}}.tar") from None


def _look_up(urls, index):
    """The counts of `urls` from the index in their folder, None unless it has every one."""
    counts = {}
    for entry in (index or {"splits": {}})["splits"].values():
        counts.update(zip(entry["filenames"], entry["shard_lengths"]))
    names = [os.path.basename(url) for url in urls]
    return [counts[name] for name in names] if all(name in counts for name in names) else None


def find_shards(directory):
    """Shards of a directory by split name, read from their file names.

    `train-000000.tar`, `imagenet1k-validation-00.tar` and `val_3.tar.gz` belong to train, validation and val.

    Returns:
        dict of split name -> sorted paths

    Raises:
        DataError: if there is no such directory.
    """
    if not os.path.isdir(directory):
        raise DataError(f"{directory} is not a folder; check the path")
    splits = {}
    for name in sorted(os.listdir(directory)):
        if not _SHARD.search(name) or name.startswith("."):
            continue
        words = [word for word in re.split(r"[-_.]", _SHARD.sub("", name)) if not word.isdigit()]
        known = [word for word in words if word in ("train", "val", "validation", "test")]
        split = (known or words or ["train"])[-1]
        splits.setdefault(split, []).append(os.path.join(directory, name))
    return splits


def read_index(directory):
    """The index of a directory of shards.

    Returns:
        dict with "splits" and perhaps "num_classes", "class_names" and "display_names"; None if there is none.

    Raises:
        DataError: if there is one that cannot be understood.
    """
    for name in INDEX_NAMES:
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                index = json.load(file)
            for entry in index["splits"].values():
                if len(entry["filenames"]) != len(entry["shard_lengths"]):
                    raise ValueError("filenames and shard_lengths differ in length")
                if sum(entry["shard_lengths"]) != entry["num_samples"]:
                    raise ValueError("shard_lengths do not add up to num_samples")
                if any(os.path.isabs(n) or "://" in n or _is_pipe(n) or ".." in re.split(r"[/\\]", n)
                       for n in entry["filenames"]):
                    raise ValueError("filenames name files outside of its folder")
            if index.get("display_names") and len(index["display_names"]) != index["num_classes"]:
                raise ValueError("display_names are not num_classes in number")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not an index of shards ({error!r}); remove it and write a new one with "
                "`python -m vision_longhorn.shards index DIR`"
            ) from None
        return index
    return None


def write_index(directory, splits, class_names=None, num_classes=None, display_names=None):
    """Write the index of a directory, replacing the splits named and keeping the others.

    Args:
        directory: where the shards lie.
        splits: dict of split name -> (file names, samples per shard, dict of further facts to keep).
        class_names: name of each class by its index, if known.
        num_classes: number of classes, if there are no names.
        display_names: what people call each class, by its index, if known.
    """
    index = read_index(directory) or {"splits": {}}
    for name, (filenames, lengths, facts) in splits.items():
        index["splits"][name] = {
            "name": name,
            "num_samples": sum(lengths),
            "filenames": list(filenames),
            "shard_lengths": list(lengths),
            **facts,
        }
    if class_names is not None:
        num_classes = len(class_names)
        if index.get("class_names") != list(class_names):
            index.pop("display_names", None)
        index["class_names"] = list(class_names)
    if num_classes is not None:
        index["num_classes"] = num_classes
    if display_names is not None:
        index["display_names"] = list(display_names)
    write_aside(os.path.join(directory, INDEX_NAMES[0]), json.dumps(index, indent=1).encode())


def write_aside(path, data):
    """Write bytes to a file so that it is either absent or whole."""
    aside = f"{path}.{os.getpid()}.partial"
    try:
        with open(aside, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    finally:
        if os.path.exists(aside):
            os.remove(aside)


def read_shard(url, pipe=False):
    """Read the samples of one shard as they are: nothing in it is decoded, and nothing in it is run.

    Args:
        url: path or http(s) URL of a tar or tar.gz file.
        pipe: whether `url` is `pipe:COMMAND` instead, whose command prints such a file.

    Yields:
        dict with "__key__", "__url__" and the bytes of each member by its extension in lower case.

    Raises:
        DataError: if the shard cannot be read to its end.
    """
    last = key = None
    try:
        # webdataset's own opener would run curl, or for other kinds of URL whatever they say.
        with (_output_of(url[5:]) if pipe else urllib.request.urlopen(url, timeout=60) if "://" in url
              else open(url, "rb")) as file:
            stream = _Tail(gzip.open(file) if file.peek(2)[:2] == b"\x1f\x8b" else file)
            for sample in group_by_keys(_members(stream, url)):
                if last is not None:
                    key = last["__key__"]
                    yield last
                last = sample
            while stream.read(1 << 20):
                pass
            # tarfile takes a cut before or in a header for the end; the sample before it may then be a half one.
            if stream.tail != bytes(tarfile.BLOCKSIZE):
                raise EOFError("unexpected end of data")
        if last is not None:
            yield last
    except (OSError, EOFError, ValueError, HTTPException, tarfile.TarError, zlib.error) as error:
        where = f"after sample {key}" if key else "from its start"
        reason = str(error.args[0] if error.args else error) or type(error).__name__
        raise DataError(f"shard {url} cannot be read {where} ({reason}); make or fetch it again") from None


@contextlib.contextmanager
def _output_of(command):
    """What a shell command prints, as a stream. Where it fails, that is an OSError at the end; where the stream is left
    before its end, all processes of the command are ended."""
    # They form a group of their own, to be ended together. ssh and its like would take the terminal's input.
    pipe = Pipe(command, mode="rb", ignore_errors=True, shell=True, stdin=subprocess.DEVNULL, start_new_session=True)
    group = pipe.proc.pid
    COMMANDS[group] = os.getpid()
    ended = False  # by itself, so that its exit code says something
    try:
        yield pipe.stream
        ended = True
    except Exception:
        ended = not pipe.stream.peek(1)
        raise
    finally:
        if not ended:
            end_command(group)
        try:
            pipe.close()  # waits for it, for two hours at most, which leaves the code in `status`
        except subprocess.TimeoutExpired:
            end_command(group)
            raise OSError("its command goes on after its output has ended") from None
        finally:
            COMMANDS.pop(group, None)
        if ended and pipe.status:
            how = f"exit code {pipe.status}" if pipe.status > 0 else f"signal {-pipe.status}"
            raise OSError(f"its command ended with {how}")


def _members(stream, url):
    """What webdataset's `tar_file_expander` yields of a sound tar; damage between members is an error here.

    Ordinary members, which are all in most shards, do without tarfile, which takes as long for the three of a sample as
    the crop does. From the first other one on (long names, folders, extended headers), all is webdataset's. Of an
    ordinary header only the name, the size and the checksum are looked at.
    """
    count = 0
    while True:
        header = stream.read(tarfile.BLOCKSIZE)
        if header == bytes(tarfile.BLOCKSIZE):
            return
        name, size = header[:100].rstrip(b"\0"), header[124:135]
        checksum = b"%06o" % (sum(header) - sum(header[148:156]) + 8 * ord(" "))
        ordinary = (header[148:154] == checksum and header[257:262] == b"ustar" and header[156:157] == b"0"
                    and header[345:346] == b"\0" and b"\0" not in name and not name.startswith(b"__")
                    and size.isdigit() and header[135:136] in (b"\0", b" ") and int(size, 8) < 1 << 30)
        if not ordinary:
            break
        size = int(size, 8)
        data = stream.read(size)
        if len(data) < size or len(stream.read(-size % tarfile.BLOCKSIZE)) < -size % tarfile.BLOCKSIZE:
            raise EOFError("unexpected end of data")
        yield {"fname": name.decode("utf-8", "surrogateescape"), "data": data, "__url__": url}
        count += 1
    if count and len(header) < tarfile.BLOCKSIZE:
        raise EOFError("unexpected end of data")
    if count and header[257:262] != b"ustar":  # which tarfile might take for the start of a compressed tar
        raise tarfile.ReadError("invalid header")
    yield from tar_file_expander([{"url": url, "stream": _Again(header, stream)}])


class _Again:
    """A stream that gives once more what was read from it last."""

    def __init__(self, data, stream):
        self.data = data
        self.stream = stream

    def read(self, size):
        data, self.data = self.data[:size], self.data[size:]
        return data + self.stream.read(size - len(data)) if len(data) < size else data


class _Tail:
    """A stream that remembers the last block read from it: a whole tar file ends with zeros."""

    def __init__(self, stream):
        self.stream = stream
        self.tail = b""

    def read(self, size):
        data = self.stream.read(size)
        self.tail = (self.tail + data[-tarfile.BLOCKSIZE :])[-tarfile.BLOCKSIZE :]
        return data


def image_of(sample):
    """Bytes of a sample's image.

    Raises:
        DataError: if it has none, or its file cannot be read.
    """
    for extension in EXTENSIONS:
        if extension in sample:
            image = sample[extension]
            # Members of a shard are bytes, whatever they hold: only `ImageFiles` can name a file.
            if not isinstance(image, Path):
                return image
            try:
                return image.read_bytes()
            except OSError as error:
                raise DataError(f"{place(sample)} cannot be read ({error.strerror}); mend or remove it") from None
    has = ", ".join(name for name in sample if not name.startswith("__")) or "nothing"
    raise DataError(f"{place(sample)}: no image ({', '.join(EXTENSIONS)}), only {has}")


def label_of(sample, num_classes=None):
    """Class index of a sample.

    Raises:
        DataError: if it has none, or one outside 0 <= label < num_classes.
    """
    text = sample.get("cls")
    if text is None:
        raise DataError(f"{place(sample)}: no label; a .cls member with the class index is needed")
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{place(sample)}: label {text[:20]!r} is not a number") from None
    if label < 0 or (num_classes is not None and label >= num_classes):
        known = "; labels start at 0" if num_classes is None else f" for {num_classes} classes; check both"
        raise DataError(f"{place(sample)}: label {label} is out of range{known}")
    return label


def place(sample):
    """Where a sample lies, for messages: its "__url__" and "__key__" are enough."""
    if os.path.isdir(sample["__url__"]):  # an image folder
        return f"image {os.path.join(sample['__url__'], sample['__key__'])}"
    return f"shard {sample['__url__']}, sample {sample['__key__']}"
