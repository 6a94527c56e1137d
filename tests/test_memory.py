"""Decoded images kept in memory: the same samples, without their files."""

import io
import shutil
import tarfile

import pytest
import torch
from test_images import encode, scene, swapped_profile
from test_loader import write_index, write_shards
from test_shards import picture, write_tar
from test_train import QUICK, REPOSITORY, shards  # noqa: F401  (a fixture)
from timm.data import create_transform

from vision_longhorn.data import (
    DataError,
    ShardSet,
    eval_loader,
    keep_in_memory,
    open_shards,
    split_transform,
    train_loader,
)
from vision_longhorn.data import memory as memory_module
from vision_longhorn.data.samples import PIXELS
from vision_longhorn.train import main as train

WHOLE = create_transform(16, is_training=True, scale=(0.3, 1.0), auto_augment="rand-m9-n1", mean=[0.5] * 3, std=[1] * 3)
SPLIT, _ = split_transform(WHOLE)


def write_set(folder, label=lambda number: b"%d" % (number % 5), **images):
    """Three shards of 20 pictures, of sizes and colours of their own; `images` are files for some, `i7=b"..."`."""
    folder.mkdir()
    for shard in range(3):
        members = []
        for number in range(20 * shard, 20 * shard + 20):
            data = images.get(f"i{number}", picture(number, size=(20 + number % 7, 30 - number % 3)))
            members += [(f"s{number:04d}.jpg", data), (f"s{number:04d}.cls", label(number))]
        write_tar(folder / f"train-{shard:06d}.tar", members)
    write_index(folder, {"train": {f"train-{shard:06d}.tar": 20 for shard in range(3)}})
    return open_shards(folder, num_classes=5)


def same(one, other):
    """Whether two structures of batches are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def passes(some, transform, workers=0, **options):
    """Two epochs of training and a pass of evaluation, with what was skipped."""
    options = {"batch_size": 8, "num_workers": workers, "keys": True, **options}
    loader = train_loader(some, transform, **options)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found += [*loader, loader.skipped]
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [WHOLE, SPLIT], ids=["whole", "split"])
def test_same_batches_without_the_files(tmp_path, transform, workers):
    # Profiles are applied before or after resampling, whichever is less work: here are some of both.
    coloured = {
        f"i{n}": encode(scene().resize((size, size)), icc_profile=swapped_profile()) for n, size in ((3, 90), (44, 9))
    }
    on_disk = write_set(tmp_path / "set", **coloured)
    evaluation = create_transform(16)
    options = {"repeats": 2, "shuffle_buffer": 5}
    wanted = passes(on_disk, transform, workers, **options)
    to_evaluate = list(eval_loader(on_disk, evaluation, batch_size=7, num_workers=workers))
    kept = keep_in_memory(on_disk, workers)
    shutil.rmtree(tmp_path / "set")
    assert same(passes(kept, transform, workers, **options), wanted)
    assert same(list(eval_loader(kept, evaluation, batch_size=7, num_workers=workers)), to_evaluate)


def test_same_batches_of_an_image_folder(tmp_path):
    coloured = encode(scene(), icc_profile=swapped_profile())
    for number in range(40):
        path = tmp_path / "set" / "train" / "ab"[number % 2] / f"{number}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number) if number % 8 else coloured)
    on_disk = open_shards(tmp_path / "set")
    wanted = passes(on_disk, SPLIT)
    kept = keep_in_memory(on_disk)
    shutil.rmtree(tmp_path / "set")
    assert same(passes(kept, SPLIT), wanted)


def test_bad_samples_count_as_they_do_on_disk(tmp_path, caplog):
    """Images that do not decode, labels that are none, and a shard that is cut short."""
    labels = {5: b"five", 30: b"1\0", 31: b"7"}
    on_disk = write_set(tmp_path / "set", lambda number: labels.get(number, b"%d" % (number % 5)), i12=b"no image")
    path = tmp_path / "set" / "train-000002.tar"
    path.write_bytes(path.read_bytes()[:-30_000])
    wanted = passes(on_disk, SPLIT, max_bad_samples=40)
    skipped = wanted[-1]
    assert len(skipped) >= 5 and sum(count for _, count in skipped) > 5, "the shard lost more than one"
    kept = keep_in_memory(on_disk)
    assert same(passes(kept, SPLIT, max_bad_samples=40), wanted)
    with pytest.raises(DataError) as before:
        passes(on_disk, SPLIT)
    with pytest.raises(DataError) as after:
        passes(kept, SPLIT)
    assert str(after.value) == str(before.value)


def test_a_shard_that_fails_once_is_read_again(tmp_path):
    on_disk = write_set(tmp_path / "set")
    wanted = passes(on_disk, SPLIT)
    path = tmp_path / "set" / "train-000001.tar"
    path.rename(tmp_path / "away")
    kept = keep_in_memory(on_disk)
    (tmp_path / "away").rename(path)
    assert same(passes(kept, SPLIT), wanted)


def test_keys_are_those_of_the_files(tmp_path):
    keys = ["b\u00e4\u65e5", b"\xff".decode("utf-8", "surrogateescape")]
    with tarfile.open(tmp_path / "train-0.tar", "w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as tar:
        for key in keys:
            for name, data in (f"{key}.jpg", picture(1)), (f"{key}.cls", b"1"):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    on_disk = open_shards(tmp_path / "train-0.tar", num_samples=2, num_classes=5)
    kept = keep_in_memory(on_disk)
    assert [sample["__key__"] for sample in kept.read(0)] == [sample["__key__"] for sample in on_disk.read(0)] == keys


@pytest.mark.parametrize("profile", [False, True], ids=["decoded", "files"])
def test_what_does_not_fit_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, profile):
    """Also where the pictures have colour profiles, and stay files."""
    coloured = encode(scene().resize((200, 200)), icc_profile=swapped_profile())
    images = {f"i{number}": coloured for number in range(60)} if profile else {}
    on_disk = write_set(tmp_path / "set", **images)
    memory = memory_module.psutil.virtual_memory()
    monkeypatch.setattr(memory_module.psutil, "virtual_memory", lambda: memory._replace(available=9_000))
    before, read = ShardSet.read, []
    monkeypatch.setattr(ShardSet, "read", lambda self, number: read.append(number) or before(self, number))
    with pytest.raises(DataError, match="keep_in_memory.*train.*GiB"):
        keep_in_memory(on_disk)
    assert read == [0]


def test_shards_may_be_of_any_size(tmp_path, monkeypatch):
    """A large one that comes first is not taken for what all of them are like."""
    lengths = [30, *[1] * 20]
    on_disk = write_shards(tmp_path / "set", lengths, indexed=True)
    needed = sum(3 * (number + 1) for number in range(sum(lengths)))
    memory = memory_module.psutil.virtual_memory()
    monkeypatch.setattr(memory_module.psutil, "virtual_memory", lambda: memory._replace(available=needed))
    assert len(keep_in_memory(on_disk).kept) == 21


def test_pictures_of_all_sizes_are_not_judged_by_the_first_ones(tmp_path, monkeypatch):
    images = [picture(number, size=(60, 60) if number < 16 else (12, 12)) for number in range(64)]
    for number, data in enumerate(images):
        path = tmp_path / "train" / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    memory, taken = memory_module.psutil.virtual_memory(), []
    # As much as they need, of which the first ones take a part.
    needed = 16 * 3 * 60**2 + 48 * 3 * 12**2
    monkeypatch.setattr(
        memory_module, "nbytes", lambda sample: taken.append(sample[PIXELS].nbytes) or sample[PIXELS].nbytes
    )
    monkeypatch.setattr(
        memory_module.psutil, "virtual_memory", lambda: memory._replace(available=needed + 9_000 - sum(taken))
    )
    kept = keep_in_memory(open_shards(tmp_path, "train"))
    assert len(kept.kept) > 1 and sum(taken) == needed


def test_training_comes_to_the_same(tmp_path, shards, capsys):  # noqa: F811
    ends = []
    for name, more in ("disk", []), ("memory", ["--keep-in-memory", "true"]):
        train([*QUICK, *shards, "--epochs", "2", "--workers", "1", "--run-dir", str(tmp_path / name), *more])
        ends.append(torch.load(tmp_path / name / "last.pt", weights_only=True))
    assert all(torch.equal(value, ends[1]["state_dict"][key]) for key, value in ends[0]["state_dict"].items())
    assert [entry["val"] for entry in ends[0]["history"]] == [entry["val"] for entry in ends[1]["history"]]
    assert capsys.readouterr().out.count("kept in the memory of each process: 0.0 MB") == 1
