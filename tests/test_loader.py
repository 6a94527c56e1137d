"""Reading shards: who gets which sample, in which order, and what is said about bad data."""

import bz2
import collections
import contextlib
import dataclasses
import errno
import functools
import gzip
import http.server
import io
import itertools
import json
import lzma
import os
import pickle
import tarfile
import threading
from urllib.error import HTTPError, URLError

import pytest
import torch
from test_shards import picture, write_tar
from webdataset.tariterators import group_by_keys, tar_file_expander

from vision_longhorn.data import DataError, eval_loader, open_shards, tars, train_loader
from vision_longhorn.data.memory import keep_in_memory
from vision_longhorn.data.streams import TrainStream
from vision_longhorn.data.tars import read_shard
from vision_longhorn.errors import reason, spelled
from vision_longhorn.evaluation.evaluate import evaluate


def number_of(image):
    """Stands in for a transform: the picture's width is its number."""
    return torch.full((3, 2, 2), float(image.width))


def noisy_number_of(image):
    return number_of(image) + torch.rand(()) / 2


@functools.cache
def numbered(number):
    return picture(number, size=(number + 1, 1))


def members(numbers, label=lambda number: number % 5):
    for number in numbers:
        yield f"s{number:04d}.jpg", numbered(number)
        yield f"s{number:04d}.cls", b"%d" % label(number)


def write_shards(directory, lengths, split="train", suffix=".tar", indexed=False):
    """Shards of the given lengths whose samples are numbered through from 0."""
    directory.mkdir(exist_ok=True)
    start, index = 0, {}
    for shard, length in enumerate(lengths):
        name = f"{split}-{shard:06d}{suffix}"
        write_tar(directory / name, members(range(start, start + length)))
        start += length
        index[name] = length
    if indexed:
        write_index(directory, {split: index})
    return open_shards(directory, split, num_samples=start, num_classes=5)


def write_index(directory, splits, **facts):
    entries = {
        name: {
            "name": name,
            "num_samples": sum(shards.values()),
            "filenames": list(shards),
            "shard_lengths": list(shards.values()),
        }
        for name, shards in splits.items()
    }
    (directory / "_info.json").write_text(json.dumps({"splits": entries, **facts}))


def numbers(batches):
    return [int(n) - 1 for images, _ in batches for n in images[:, 0, 0, 0].tolist()]


def all_parts(loader_of, ranks, workers):
    """What each worker of each rank yields, without starting processes: lists of batches in the order of shares."""
    return [
        list(loader_of(rank).stream.batches(worker, max(workers, 1)))
        for rank in range(ranks)
        for worker in range(max(workers, 1))
    ]


@pytest.mark.parametrize("lengths", [[1], [3], [13, 1, 4], [0, 5, 0], [40], [6] * 8, [1] * 20, [9, 2, 31, 1, 1, 7, 2]])
def test_evaluation_sees_every_sample_once(tmp_path, lengths):
    """The next test has more pairs of processes and workers."""
    for indexed in True, False:
        shards = write_shards(tmp_path / f"s{indexed}", lengths, indexed=indexed)
        for ranks, workers in (1, 3), (2, 1), (3, 2), (5, 4):
            parts = all_parts(
                lambda rank: eval_loader(shards, number_of, batch_size=4, num_workers=0, rank=rank, world_size=ranks),
                ranks,
                workers,
            )
            assert sorted(n for part in parts for n in numbers(part)) == list(range(sum(lengths))), (ranks, workers)


def test_evaluation_is_shared_out_evenly(tmp_path):
    """No worker reads it all while the others have nothing."""
    shards = write_shards(tmp_path / "s", [24, 36], indexed=True)
    for ranks, workers in (1, 3), (2, 2), (3, 2):
        parts = all_parts(
            lambda rank: eval_loader(shards, number_of, batch_size=4, num_workers=0, rank=rank, world_size=ranks),
            ranks,
            workers,
        )
        fair = 60 / (ranks * workers)
        assert all(abs(len(numbers(part)) - fair) <= 3 for part in parts), (ranks, workers)


class OneOfSeveral:
    """Stands in for an accelerator: sums over processes that take their turns."""

    device = torch.device("cpu")
    autocast = staticmethod(contextlib.nullcontext)
    total = 0

    def reduce(self, sums):
        self.total = self.total + sums
        return self.total


def test_evaluation_counts_the_same_on_any_number_of_processes_and_workers(tmp_path):
    lengths = [9, 2, 31, 1, 0, 7, 17]
    shards = write_shards(tmp_path / "s", lengths)
    scores = torch.randn(67, 7, generator=torch.Generator().manual_seed(0))

    def model(images):
        return scores[images[:, 0, 0, 0].long() - 1]

    counts = {}
    for ranks, workers in itertools.product([1, 2, 3, 5], range(5)):
        accelerator, seen = OneOfSeveral(), 0
        for rank in range(ranks):
            loader = eval_loader(shards, number_of, batch_size=4, num_workers=0, rank=rank, world_size=ranks)
            batches = [b for worker in range(workers or 1) for b in loader.stream.batches(worker, workers or 1)]
            seen += sum(len(targets) for _, targets in batches)
            model.eval = lambda: None
            result = evaluate({"it": model}, batches, accelerator, seen, 4)["it"]
        counts[ranks, workers] = [result[key] for key in ("count", "top1_count", "top5_count")]
    order = scores.argsort(dim=1, descending=True)
    labels = torch.arange(67) % 5
    hits = [int((order[:, :k] == labels[:, None]).sum()) for k in (1, 5)]
    assert set(map(tuple, counts.values())) == {(67, *hits)}


@pytest.mark.parametrize("lengths, ranks, workers", [([9, 2, 14], 1, 2), ([1], 3, 2), ([5] * 6, 2, 1)])
def test_evaluation_with_real_workers(tmp_path, lengths, ranks, workers):
    shards = write_shards(tmp_path / "s", lengths)
    seen, labels = [], []
    for rank in range(ranks):
        loader = eval_loader(shards, number_of, batch_size=4, num_workers=workers, rank=rank, world_size=ranks)
        for _ in range(2):  # workers that outlive a pass must be as exact in the next
            batches = list(loader)
        seen += numbers(batches)
        labels += [label for _, targets in batches for label in targets.tolist()]
        assert all(x.dtype == torch.float32 and y.dtype == torch.int64 for x, y in batches)
    assert sorted(seen) == list(range(sum(lengths)))
    assert labels == [number % 5 for number in seen]


@pytest.mark.parametrize(
    "lengths, ranks, workers, batch_size",
    [
        ([60], 1, 3, 4),
        ([60], 2, 1, 8),
        ([60], 5, 3, 2),
        ([21, 1, 30, 8], 1, 0, 7),
        ([21, 1, 30, 8], 3, 2, 5),
        ([21, 1, 30, 8], 5, 3, 2),
        ([5] * 12, 2, 3, 1),
        ([5] * 12, 3, 2, 5),
        ([1] * 60, 1, 3, 4),
        ([1] * 60, 2, 1, 8),
    ],
)
def test_training_epoch(tmp_path, lengths, ranks, workers, batch_size):
    shards = write_shards(tmp_path / "s", lengths, indexed=True)
    loaders = [
        train_loader(shards, number_of, batch_size=batch_size, num_workers=0, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    parts = all_parts(loaders.__getitem__, ranks, workers)
    batches = [batch for part in parts for batch in part]
    per_rank = 60 // (batch_size * ranks)
    assert [len(loader) for loader in loaders] == [per_rank] * ranks and len(batches) == per_rank * ranks
    assert all(len(targets) == batch_size for _, targets in batches)
    seen = numbers(batches)
    # All but what is borrowed from the next epoch where shares come out uneven.
    assert len(set(seen)) >= 0.85 * len(seen)


def test_training_epoch_with_even_shares_is_a_permutation(tmp_path):
    shards = write_shards(tmp_path / "s", [16] * 4)
    seen = []
    for rank in range(2):
        loader = train_loader(shards, number_of, batch_size=8, num_workers=2, rank=rank, world_size=2)
        assert len(loader) == len(list(loader)) == 4
        seen += numbers(loader)
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_new_each_epoch_and_repeatable(tmp_path, workers):
    shards = write_shards(tmp_path / "s", [16] * 4)
    loader = train_loader(shards, number_of, batch_size=8, num_workers=workers, seed=1)
    other = train_loader(shards, number_of, batch_size=8, num_workers=workers, seed=2)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append(numbers(loader))
        assert sorted(orders[-1]) == list(range(64))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    loader.set_epoch(1)
    for _ in zip(range(3), loader, strict=False):  # a pass that was broken off must not spoil the next
        pass
    assert numbers(loader) == orders[1]
    assert numbers(other) != orders[0]


def test_shard_order_is_new_each_epoch(tmp_path):
    shards = write_shards(tmp_path / "s", [4] * 8)
    loader = train_loader(shards, number_of, batch_size=4, num_workers=0, shuffle_buffer=1)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([number // 4 for number in numbers(loader)][::4])
    assert sorted(orders[0]) == list(range(8)) and orders[0] != orders[1] != orders[2]


def test_workers_augment_differently_and_repeatably(tmp_path):
    shards = write_shards(tmp_path / "s", [16] * 2)

    def noise(rank, epoch):
        loader = train_loader(shards, noisy_number_of, batch_size=4, num_workers=2, rank=rank, world_size=2)
        loader.set_epoch(epoch)
        return [round(float(x) % 1, 6) for images, _ in loader for x in images[:, 0, 0, 0]]

    first = noise(0, 0)
    assert first == noise(0, 0)
    assert len(set(first + noise(1, 0) + noise(0, 1))) == 3 * len(first)


@pytest.mark.parametrize("workers", [0, 2])
def test_repeats(tmp_path, workers):
    shards = write_shards(tmp_path / "s", [24] * 4)
    loader = train_loader(shards, noisy_number_of, batch_size=8, num_workers=workers, repeats=3)
    everything = collections.Counter()
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = list(loader)
        seen = numbers(batches)
        assert len(batches) == len(loader) == 12 and len(seen) == 96
        values = {float(x) for images, _ in batches for x in images[:, 0, 0, 0]}
        assert len(values) == 96, "augmented once, not each time"
        counts = collections.Counter(seen)
        # A few may come more or less often, where a worker's share comes out uneven.
        assert sum(count == 3 for count in counts.values()) >= 28 and len(counts) <= 36
        assert seen[:3] == [seen[0]] * 3, "the views of an image belong together in a batch"
        everything += counts
    assert len(everything) >= 90, "the epochs together must go through all images"


def test_batch_larger_than_the_data(tmp_path):
    shards = write_shards(tmp_path / "s", [5])
    for size, ranks, message in (
        (3, 2, "^5 samples do not make one batch of 3 on each of 2 processes; lower batch_size to 2 at most$"),
        (6, 1, "^5 samples do not make one batch of 6; lower batch_size to 5 at most$"),
        (1, 6, "; start fewer processes$"),
    ):
        with pytest.raises(DataError, match=message):
            train_loader(shards, number_of, batch_size=size, num_workers=0, world_size=ranks)
    train_loader(shards, number_of, batch_size=2, num_workers=0, world_size=2)


def test_shards_that_hold_nothing_end_training_with_an_error(tmp_path):
    write_tar(tmp_path / "train-0.tar", [])
    shards = open_shards(tmp_path, num_samples=10)
    with pytest.raises(DataError, match="hold no samples"):
        list(train_loader(shards, number_of, batch_size=2, num_workers=0))


def claimed(shards, count, **fields):
    return dataclasses.replace(shards, num_samples=count, **fields)


@pytest.mark.parametrize("lengths", [[16] * 4, [30, 2, 1, 31], [16, 16, 16, 16, 1], [1, 1, 40], [64]])
def test_a_count_without_an_index_sets_the_length_of_an_epoch(tmp_path, lengths):
    """Whatever the shares of ranks come to."""
    shards = write_shards(tmp_path / "s", lengths)
    for count, ranks in (shards.num_samples, 1), (shards.num_samples, 2), (shards.num_samples, 3), (20, 3), (100, 2):
        for rank in range(ranks):
            loader = train_loader(
                claimed(shards, count), number_of, batch_size=2, num_workers=0, rank=rank, world_size=ranks
            )
            for epoch in range(3):
                loader.set_epoch(epoch)
                assert len(list(loader)) == len(loader)


def test_an_epoch_that_is_longer_than_the_data_goes_on_at_any_batch(tmp_path):
    shards = claimed(write_shards(tmp_path / "s", [16] * 2), 100)
    loader = train_loader(shards, noisy_number_of, batch_size=4, num_workers=0, seed=3)
    whole = list(loader)
    assert {number for images, _ in whole for number in images[:, 0, 0, 0].long().tolist()} == set(range(1, 33))
    for start in 1, 9, 20:
        loader.set_epoch(0, start)
        for (images, labels), (again, same) in zip(whole[start:], loader, strict=True):
            assert torch.equal(images, again) and torch.equal(labels, same)


@pytest.mark.parametrize("max_bad_samples", [0, 40])
def test_a_shard_without_an_index_that_cannot_be_read(tmp_path, max_bad_samples):
    """What it would have held is unknown."""
    shards = claimed(write_shards(tmp_path / "s", [16] * 4), 70)
    with open(shards.urls[2], "r+b") as file:
        file.truncate(5000)
    loader = train_loader(shards, number_of, batch_size=4, num_workers=0, max_bad_samples=max_bad_samples)
    with (
        pytest.raises(DataError, match="train-000002.tar cannot be read")
        if not max_bad_samples
        else (contextlib.nullcontext())
    ):
        assert len(list(loader)) == 17


def test_workers_without_a_batch_are_not_started(tmp_path, caplog):
    shards = write_shards(tmp_path / "s", [16] * 4)
    few, many = (train_loader(shards, noisy_number_of, batch_size=32, num_workers=n) for n in (2, 1000))
    assert many.options["num_workers"] == 2
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(few, many, strict=True))
    assert eval_loader(shards, number_of, batch_size=16, num_workers=1000, world_size=3).options["num_workers"] == 2


def test_accelerate_has_no_dataloader_to_replace(tmp_path):
    loader = train_loader(write_shards(tmp_path / "s", [8]), number_of, batch_size=2, num_workers=0)
    assert not isinstance(loader, torch.utils.data.DataLoader)


def loaders(shards, workers, **options):
    return (
        train_loader(shards, number_of, batch_size=2, num_workers=workers, **options),
        eval_loader(shards, number_of, batch_size=2, num_workers=workers, **options),
    )


@pytest.mark.parametrize(
    "spoil, message",
    [
        ({"cls": b"5"}, "label 5 is out of range for 5 classes"),
        ({"cls": b"-1"}, "label -1 is out of range"),
        ({"cls": b"cat"}, "label b'cat' is not a number"),
        ({"cls": None}, "no label"),
        ({"jpg": None}, "no image"),
        ({"jpg": numbered(6)[:200]}, "not a readable image"),
        ({"jpg": b"text"}, "not a readable image"),
    ],
)
def test_bad_sample_is_named(tmp_path, spoil, message):
    files = dict(members(range(8)))
    for extension, data in spoil.items():
        if data is None:
            del files[f"s0006.{extension}"]
        else:
            files[f"s0006.{extension}"] = data
    write_tar(tmp_path / "train-0.tar", files.items())
    shards = open_shards(tmp_path, num_samples=8, num_classes=5)
    for loader in loaders(shards, workers="cls" in spoil and spoil["cls"] is None):  # a worker's error says no more
        with pytest.raises(DataError, match=rf"^shard \S+train-0\.tar, sample s0006: {message}[^\n]*$") as raised:
            list(loader)
        # In training one may be skipped, in an evaluation none.
        assert ("max_bad_samples" in str(raised.value)) == isinstance(loader.stream, TrainStream)


@pytest.mark.parametrize(
    "names, message",
    [
        (
            "a.jpg b.jpg a.cls b.cls",
            "a: no label .*, only a.jpg; .* follow each other in the tar, as `tar --sort=name`",
        ),
        ("a.cls b.cls a.jpg b.jpg", "a: no image .*, only a.cls; .* follow each other in the tar"),
        (
            "a.jpg a.label.cls",
            "a: no label .*, only a.jpg, a.label.cls; .* one name up to its first dot",
        ),
        ("d.1/a.v2.cls d.1/a.v2.jpg", "d.1/a: no label .*, only d.1/a.v2.cls, d.1/a.v2.jpg; .* up to its first dot"),
        ("a.cls a.v2.png", "a: no image .*, only a.cls, a.v2.png; .* up to its first dot"),
        ("a.jpg a.txt a.json", "a: no label .*, only a.jpg, a.txt, a.json; "),
        (
            "a.jpg " + " ".join(f"a.{n}" for n in range(999)),
            r"a: no label .*, only a.jpg, a.0, a.1, .{,300}; ",
        ),
    ],
)
def test_a_label_or_image_that_is_elsewhere_is_told_by_what_is_there(tmp_path, names, message):
    write_tar(tmp_path / "train-0.tar", [(name, b"0" if "cls" in name else numbered(0)) for name in names.split()])
    shards = open_shards(tmp_path, num_samples=1, num_classes=5)
    for kept in shards, keep_in_memory(shards):
        with pytest.raises(DataError, match=rf"^shard \S+train-0\.tar, sample .*{message}"):
            list(eval_loader(kept, number_of, batch_size=1, num_workers=0))


def test_more_classes_by_hand(tmp_path):
    write_tar(tmp_path / "train-0.tar", members(range(8), label=lambda number: 7))
    shards = open_shards(tmp_path, num_samples=8, num_classes=8)
    for loader in loaders(shards, 0):
        assert {label for _, targets in loader for label in targets.tolist()} == {7}


def test_an_index_of_more_classes_than_are_trained_on_does_not_let_their_labels_pass(tmp_path):
    train = write_shards(tmp_path / "t", [8])
    (tmp_path / "v").mkdir()
    write_tar(tmp_path / "v" / "val-0.tar", members(range(8), label=lambda number: 7))
    write_index(tmp_path / "v", {"val": {"val-0.tar": 8}}, num_classes=8)
    val = open_shards(tmp_path / "v", "val", train=train)
    with pytest.raises(DataError, match="label 7 is out of range for 5 classes"):
        list(eval_loader(val, number_of, batch_size=4, num_workers=0))


@pytest.mark.parametrize(
    "suffix, step, cut",
    [
        *((".tar", 512, cut) for cut in range(8)),
        *((".tar", 1, cut) for cut in range(0, 8, 2)),
        *((".tar.gz", 1, cut) for cut in (1, 4, 7)),
    ],
)
def test_shard_that_is_cut_short(tmp_path, suffix, step, cut):
    shards = write_shards(tmp_path / "s", [30], suffix=suffix)
    data = open(shards.urls[0], "rb").read()
    with open(shards.urls[0], "wb") as file:  # in headers, in images and in labels
        file.write(data[: (len(data) * (9 + cut) // 20 - 7) // step * step])
    for loader in loaders(shards, workers=(cut, step) == (0, 1)):
        with pytest.raises(DataError, match=r"train-000000\.tar\S* cannot be read after sample s00\d\d"):
            list(loader)


def test_shard_with_fewer_samples_than_its_index_says(tmp_path):
    write_index(tmp_path, {"train": {"train-0.tar": 8}})
    write_tar(tmp_path / "train-0.tar", members(range(7)))
    for loader in loaders(open_shards(tmp_path), 0):
        with pytest.raises(DataError, match="has 7 samples where the index says 8"):
            list(loader)


class Exploit:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("extension", ["pyd", "pickle", "pkl", "pth", "pt", "npy", "ten"])
def test_nothing_in_a_shard_is_unpickled(tmp_path, extension):
    files = dict(members(range(4)))
    for number in range(4):
        files[f"s{number:04d}.{extension}"] = pickle.dumps(Exploit(tmp_path / "exploited"))
    write_tar(tmp_path / "train-0.tar", sorted(files.items()))
    for loader in loaders(open_shards(tmp_path, num_samples=4, num_classes=5), 0):
        assert sorted(numbers(loader)) == [0, 1, 2, 3]
    assert not (tmp_path / "exploited").exists()
    pickle.loads(files[f"s0000.{extension}"]).close()
    assert (tmp_path / "exploited").exists(), "the exploit itself does not work"


@pytest.mark.parametrize(
    "url, allowed, message",
    [
        ("pipe:touch {0}/run; cat {0}/s/train-000000.tar", False, r"--allow-pipe \(in Python allow_pipe=True\)"),
        ("PIPE:touch {0}/run", False, "--allow-pipe"),
        ("gs://bucket/train-{{0..3}}.tar", True, "gs: is refused"),
        ("file:x.tar", True, "file: is refused"),
        ("pipe: ", True, "names no command"),
    ],
)
def test_urls_that_run_commands_are_refused(tmp_path, url, allowed, message):
    write_shards(tmp_path / "s", [4])
    with pytest.raises(DataError, match=message):
        open_shards(url.format(tmp_path), num_samples=4, allow_pipe=allowed)
    assert not (tmp_path / "run").exists()


def test_a_folder_named_like_a_command_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "pipe:touch run;", [8])
    shards = open_shards("pipe:touch run;", num_samples=8, num_classes=5)
    for loader in loaders(shards, 0):
        assert sorted(numbers(loader)) == list(range(8))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("suffix, workers", [(".tar", 2), (".tar.gz", 0)])
def test_shards_that_commands_print(tmp_path, monkeypatch, suffix, workers):
    """What braces and backslashes the shell is to see, it sees."""
    write_shards(tmp_path / "s", [6, 5, 1], suffix=suffix)
    monkeypatch.setenv("SHARDS", str(tmp_path / "s"))
    pattern = r"""pipe:cat "${SHARDS}"/$(echo 'train 00000{0..2}' | sed 's/\ /-/')""" + suffix
    shards = open_shards(pattern, num_samples=12, num_classes=5, allow_pipe=True)
    assert len(shards.urls) == 3 and (shards.num_samples, shards.samples_per_shard) == (12, None)
    for loader in loaders(shards, workers):
        for _ in range(2):
            seen = numbers(loader)
            assert sorted(set(seen)) == list(range(12)) if loader.num_batches is None else len(seen) == 12
    with pytest.raises(DataError, match="number of samples .* is unknown; give num_samples"):
        open_shards(pattern, allow_pipe=True)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("train-{000000..000003}.tar", r"train-000002\.tar is missing \(2 of 4"),
        ("train-{}.tar", "no file or folder"),
        ("train-{0..}.tar", "no file or folder"),
        ("train-{0..1.tar", "unbalanced braces"),
        ("other-*.tar", "no file matches"),
        ("train-000009.tar", r"no file or folder '.*train-000009\.tar'"),
        ("train-{000001..000009}.tar", r"train-000002\.tar is missing \(8 of 9"),
        ("train-{000000..000001}.tar", "number of samples .* is unknown.*shards index"),
    ],
)
def test_bad_patterns(tmp_path, pattern, message):
    write_shards(tmp_path / "s", [4, 4])
    with pytest.raises(DataError, match=message):
        open_shards(f"{tmp_path}/s/{pattern}")


def test_patterns_and_counts(tmp_path):
    write_shards(tmp_path / "s", [4, 3, 2], suffix=".tar.gz")
    for pattern, count in (("train-{000000..000001}.tar.gz", 7), ("train-*.tar.gz", 9), ("train-000002.tar.gz", 2)):
        shards = open_shards(f"{tmp_path}/s/{pattern}", num_samples=count, num_classes=5)
        assert (shards.num_samples, shards.num_classes, shards.samples_per_shard) == (count, 5, None)
        assert len(numbers(eval_loader(shards, number_of, batch_size=4, num_workers=0))) == count
    with pytest.raises(DataError, match="is unknown; give num_samples, or write .*shards index FOLDER`$"):
        open_shards(tmp_path / "s")
    with pytest.raises(DataError, match="is unknown; give num_samples, or write .*shards index FOLDER`$"):
        open_shards(f"{tmp_path}/s/train-*.tar.gz")
    with pytest.raises(DataError, match="is unknown; give num_samples"):
        open_shards("http://localhost/train-{0..3}.tar")
    with pytest.raises(DataError, match="num_classes=-3; it must be at least 1"):
        open_shards(tmp_path / "s", num_samples=9, num_classes=-3)
    with pytest.raises(DataError, match="no split 'val'; it has train"):
        open_shards(tmp_path / "s", "val", num_samples=9)
    names = {f"train-{i:06d}.tar.gz": n for i, n in enumerate([4, 3, 2])}
    write_index(tmp_path / "s", {"train": names}, class_names=list("abcde"), num_classes=5)
    shards = open_shards(f"{tmp_path}/s/train-{{000001..000002}}.tar.gz")
    assert (shards.num_samples, shards.samples_per_shard, shards.num_classes) == (5, [3, 2], 5)
    assert open_shards(tmp_path / "s", num_classes=6).num_classes == 6
    write_shards(tmp_path / "more", [6, 1], indexed=True)
    both = open_shards(f"{tmp_path}/{{s,more}}/train-*.tar*")
    assert (both.samples_per_shard, both.class_names) == ([4, 3, 2, 6, 1], list("abcde"))
    with pytest.raises(DataError, match="num_classes=4, but .* has 5 classes; drop it, or give 5 or more"):
        open_shards(tmp_path / "s", num_classes=4)
    with pytest.raises(DataError, match="num_samples=8, but the index .* says 9; drop it, or give 9"):
        open_shards(tmp_path / "s", num_samples=8)
    with (
        pytest.raises(DataError, match="^--val-samples=8, but the index .* says 9; drop it, or give 9"),
        spelled(num_samples="--val-samples"),
    ):
        open_shards(tmp_path / "s", num_samples=8)
    (tmp_path / "s" / "train-000001.tar.gz").unlink()
    with pytest.raises(DataError, match=r"train-000001\.tar\.gz is missing \(1 of 3"):
        open_shards(tmp_path / "s")
    (tmp_path / "s" / "_info.json").write_text('{"splits": {"train": {}}}')
    with pytest.raises(DataError, match="not an index of shards"):
        open_shards(tmp_path / "s")


def test_layout_of_imagenet_1k_wds(tmp_path):
    def shard(name, count, start):
        files = []
        for number in range(start, start + count):
            about = {"filename": f"n0144076{number % 5}/x_{number}.JPEG", "label": number % 5, "width": number + 1}
            key = f"n0144076{number % 5}_{number}"
            files += [(f"{key}.cls", b"%d" % (number % 5)), (f"{key}.jpg", numbered(number))]
            files.append((f"{key}.json", json.dumps(about).encode()))
        write_tar(tmp_path / name, files)

    shard("imagenet1k-train-0000.tar", 6, 0)
    shard("imagenet1k-train-0001.tar", 5, 6)
    shard("imagenet1k-validation-00.tar", 4, 11)
    for indexed in (False, True):
        if indexed:
            write_index(
                tmp_path,
                {
                    "train": {"imagenet1k-train-0000.tar": 6, "imagenet1k-train-0001.tar": 5},
                    "validation": {"imagenet1k-validation-00.tar": 4},
                },
            )
        train = open_shards(tmp_path, "train", num_samples=None if indexed else 11, num_classes=5)
        val = open_shards(tmp_path, "val", num_samples=None if indexed else 4, train=train)
        assert (train.num_samples, val.num_samples) == (11, 4)
        batches = eval_loader(val, number_of, batch_size=4, num_workers=0)
        assert sorted(numbers(batches)) == [11, 12, 13, 14]
        batches = list(train_loader(train, number_of, batch_size=11, num_workers=0))
        assert sorted(numbers(batches)) == list(range(11))


def test_shards_over_http(tmp_path):
    write_shards(tmp_path / "s", [4, 3])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=os.fspath(tmp_path / "s"))
    handler.func.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/train-{{000000..000001}}.tar"
        shards = open_shards(url, num_samples=7, num_classes=5)
        assert sorted(numbers(eval_loader(shards, number_of, batch_size=4, num_workers=0))) == list(range(7))
        (tmp_path / "s" / "train-000001.tar").unlink()
        with pytest.raises(DataError, match=r"http://\S+/train-000001\.tar cannot be read from its start .*404"):
            list(eval_loader(shards, number_of, batch_size=4, num_workers=0))
        server.shutdown()


FORMS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


# Each kind in each form, and each at each of three places.
@pytest.mark.parametrize(
    "form, odd, odd_at",
    [
        *((form, "none", None) for form in FORMS),
        *(
            (form, odd, (0, 5, 11)[(i + j) % 3])
            for i, form in enumerate(FORMS)
            for j, odd in enumerate(["long", "folder", "link", "meta", "unicode", "mtime"])
        ),
    ],
)
def test_members_of_every_kind_are_read_as_webdataset_reads_them(tmp_path, form, odd, odd_at):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(12):
            name = f"s{number:02d}"
            if number == odd_at:
                name = {"long": "f" * 90 + "/" + "s" * 60, "unicode": "ß漢", "meta": "__meta__/s"}.get(odd, name)
            for end in ("jpg", "cls", "txt") if odd == "link" and number == odd_at else ("jpg", "cls"):
                member = tarfile.TarInfo(f"{name}.{end}")
                member.mtime = 0.5 if odd == "mtime" and number == odd_at else 7
                member.size = size = number * 100  # 0 and 512's neighbours among them
                if number == odd_at and (odd, end) in (("folder", "cls"), ("link", "txt")):
                    member.type, member.size = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[odd], 0
                tar.addfile(member, io.BytesIO(bytes([number]) * size))
    with open(path, "rb") as file:
        wanted = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": file}])))
    assert list(read_shard(str(path))) == wanted and len(wanted) >= 11
    with gzip.open(tmp_path / "0.tar.gz", "wb") as file:
        file.write(path.read_bytes())
    assert [{**sample, "__url__": str(path)} for sample in read_shard(str(tmp_path / "0.tar.gz"))] == wanted
    whole = path.read_bytes()
    for cut in (300, 512, 1000, len(whole.rstrip(b"\0")) // 2, len(whole.rstrip(b"\0")) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="unexpected end of data|truncated header|empty header"):
            list(read_shard(str(path)))
    broken = bytearray(whole)
    broken[30] ^= 1
    path.write_bytes(broken)
    with pytest.raises(DataError, match="cannot be read from its start"):
        list(read_shard(str(path)))


def ordinary_header(name, size, width=11):
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = (b"%0*o" % (width, size)).ljust(12, b"\0")
    return checked(header)


def checked(header):
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * ord(" "))
    return bytes(header)


def test_ordinary_members_do_without_tarfile_and_sizes_of_twelve_digits_are_read(tmp_path, monkeypatch):
    for width in (11, 12):
        path = tmp_path / f"{width}.tar"
        path.write_bytes(
            b"".join(ordinary_header(f"s{n}.jpg", 1600, width) + bytes([n]) * 1600 + bytes(448) for n in range(3))
            + bytes(1024)
        )
        assert [sample["jpg"] for sample in read_shard(str(path))] == [bytes([n]) * 1600 for n in range(3)]

    def fail(**_):
        raise AssertionError("tarfile was asked")

    monkeypatch.setattr("vision_longhorn.data.tars.tarfile.open", fail)
    assert len(list(read_shard(str(tmp_path / "11.tar")))) == 3
    with pytest.raises(AssertionError, match="was asked"):
        list(read_shard(str(tmp_path / "12.tar")))


@pytest.mark.parametrize(
    "pack, ending",
    [
        (gzip.compress, "gz"),
        (bz2.compress, "bz2"),
        (lzma.compress, "xz"),
        (lambda data: lzma.compress(data, lzma.FORMAT_ALONE), ""),
    ],
    ids=["gzip", "bzip2", "xz", "lzma"],
)
def test_packed_shards_whatever_they_are_called(tmp_path, pack, ending):
    plain, path = tmp_path / "plain.tar", tmp_path / "0.tar"
    write_tar(plain, members(range(40)))
    packed = pack(plain.read_bytes())
    path.write_bytes(packed)
    wanted = [{**sample, "__url__": str(path)} for sample in read_shard(str(plain))]
    assert list(read_shard(str(path))) == wanted
    if ending:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / f"val-0.tar.{ending}").write_bytes(packed)
        shards = open_shards(tmp_path / "s", "val", num_samples=40)
        assert len(numbers(eval_loader(shards, number_of, batch_size=4, num_workers=0))) == 40
    for part in packed[: len(packed) * 2 // 3], packed[: len(packed) // 2] + packed[len(packed) // 2 + 9 :]:
        path.write_bytes(part)
        with pytest.raises(
            DataError, match=r"0\.tar cannot be read (from its start|after sample s00\d\d) \([^\n]+\); "
        ):
            list(read_shard(str(path)))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"PK\x03\x04", "is a zip, rar or 7z file: unpack it, and pack with `tar"),
        (b"Rar!\x1a\x07\x00", "is a zip, rar or 7z file: unpack it"),
        (b"7z\xbc\xaf\x27\x1c", "is a zip, rar or 7z file: unpack it"),
        (b"\x28\xb5\x2f\xfd", "is packed with zstd or lz4: unpack it with `zstd -d`"),
        (b"\x04\x22\x4d\x18", "is packed with zstd or lz4: unpack it with `zstd -d` or `lz4 -d`"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*`git lfs pull`"),
        (b"\n<!DOCTYPE html><html>", "is a web page"),
    ],
)
def test_other_files_under_the_name_of_a_tar_are_told(tmp_path, data, message):
    path = tmp_path / "0.tar"
    for size in 0, 4000:
        path.write_bytes(data + bytes(size))
        with pytest.raises(DataError, match=rf"^shard \S+0\.tar {message}.*; a shard is a tar, plain or packed with"):
            list(read_shard(str(path)))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (os.remove, "No such file or directory"),
        (lambda path: (os.remove(path), os.mkdir(path)), "Is a directory"),
        (lambda path: path.write_bytes(b""), "empty file"),
        (lambda path: path.write_bytes(b"\x1f\x8b" + bytes(600)), "Unknown compression method"),
    ],
)
def test_why_a_shard_cannot_be_read_is_told_in_words(tmp_path, spoil, words):
    path = tmp_path / "0.tar"
    write_tar(path, members(range(2)))
    spoil(path)
    with pytest.raises(
        DataError,
        match=rf"^shard {path} cannot be read from its start \({words}\); (make or fetch it|a shard is a tar)",
    ):
        list(read_shard(str(path)))


def test_an_error_of_the_system_amid_a_shard_is_told_in_words(tmp_path, monkeypatch):
    """Also where webdataset reads it, which adds the stream and the URL to what was said."""
    for names in ("a.jpg", "b.jpg", "c.jpg"), ("a.jpg", "b" * 120 + ".jpg", "c.jpg"):
        path = tmp_path / "0.tar"
        write_tar(path, [(name, bytes(3000)) for name in names])
        data = path.read_bytes()

        class Failing(io.BytesIO):
            def peek(self, size):
                return data[:size]

            def read(self, size):
                if self.tell() + size > 8000:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().read(size)

        monkeypatch.setattr(tars, "_opened", lambda url, pipe: Failing(data))
        with pytest.raises(
            DataError, match=r"0\.tar cannot be read [^(]+ \(Input/output error\); make or fetch it again$"
        ):
            list(read_shard(str(path)))


@pytest.mark.parametrize(
    "error, words",
    [
        (URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")), "Connection refused"),
        (URLError("unknown url type"), "<urlopen error unknown url type>"),
        (HTTPError("http://host/0.tar", 404, "Not Found", {}, None), "HTTP Error 404: Not Found"),
        (FileNotFoundError(errno.ENOENT, "No such file", "here"), "No such file"),
        (ValueError("two\nlines"), "two lines"),
        (EOFError(), "EOFError"),
    ],
)
def test_the_reason_of_an_error_has_no_number(error, words):
    assert reason(error) == words


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, lambda data: b"J" * 512], ids=["gzip", "bzip2", "xz", "junk"]
)
def test_what_is_no_member_between_members_is_an_error_and_not_unpacked(tmp_path, pack):
    def tar(*names):
        return b"".join(ordinary_header(f"{name}.jpg", 512) + bytes(512) for name in names) + bytes(1024)

    inner = pack(tar("x", "y"))
    path = tmp_path / "0.tar"
    path.write_bytes(tar("a", "b", "c")[:-1024] + inner + bytes(-len(inner) % 512 + 1024))
    with pytest.raises(DataError, match=r"0.tar cannot be read after sample a \(invalid header\)"):
        list(read_shard(str(path)))
