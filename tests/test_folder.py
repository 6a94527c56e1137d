"""Image folders that are read as they are: found, shared out, ordered and resumed as shards are."""

import os
import shlex

import pytest
import torch
from test_loader import all_parts, noisy_number_of, number_of, numbered, numbers, write_shards
from test_shards import contents, picture
from timm.data import create_transform

from vision_longhorn import shards as maker
from vision_longhorn.data import DataError, device_batches, eval_loader, open_shards, split_transform, train_loader

CLASSES = ["bee", "cat", "dog", "emu"]


def write_folder(folder, count, classes=CLASSES, start=0):
    """Images numbered from `start`, one after the other to each class."""
    for number in range(start, start + count):
        path = folder / classes[number % len(classes)] / f"{number:03d}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbered(number))
    return folder


@pytest.fixture
def root(tmp_path):
    """50 images to train on and 14 to evaluate."""
    write_folder(tmp_path / "root" / "train", 50)
    write_folder(tmp_path / "root" / "val", 14, start=50)
    return tmp_path / "root"


def train_on(shards, workers=0, transform=number_of, **options):
    return train_loader(shards, transform, **{"batch_size": 5, "num_workers": workers, **options})


def test_splits_counts_and_classes_are_known_without_an_index(root):
    train = open_shards(root)
    val = open_shards(root, "validation", train=train)
    assert (train.num_samples, val.num_samples, train.num_classes, val.num_classes) == (50, 14, 4, 4)
    assert train.class_names == val.class_names == CLASSES and val.split == "val"
    assert sum(train.samples_per_shard) == 50 and open_shards(root, num_classes=9).num_classes == 9
    with pytest.raises(DataError, match="--train-samples=51, but .*train holds 50 images; drop it"):
        open_shards(root, num_samples=51, samples_option="--train-samples")
    for split in "train", "val":
        with pytest.raises(DataError, match=f"--num-classes=3, but {root} has 4 classes; drop it, or give 4 or more"):
            open_shards(root, split, num_classes=3, classes_option="--num-classes")


@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 3), (2, 7), (3, 1)])
def test_evaluation_sees_every_file_once(root, ranks, workers):
    shards = open_shards(root, "train")

    def loader_of(rank):
        return eval_loader(shards, number_of, batch_size=4, num_workers=0, rank=rank, world_size=ranks)

    batches = [batch for part in all_parts(loader_of, ranks, workers) for batch in part]
    assert sorted(numbers(batches)) == list(range(50))
    assert [label for _, labels in batches for label in labels.tolist()] == [n % 4 for n in numbers(batches)]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_order_is_new_each_epoch_mixed_and_repeatable(root, workers):
    shards = open_shards(root)
    loader, again = train_on(shards, workers), train_on(open_shards(root), workers)
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        again.set_epoch(epoch)
        batches = list(loader)
        orders.append(numbers(batches))
        assert orders[-1] == numbers(again) and len(batches) == 10
        assert len(set(orders[-1])) >= 45
        assert sum(len(set(labels.tolist())) > 1 for _, labels in batches) >= 9, "batches must mix the classes"
    assert orders[0] != orders[1]
    # Also before a worker's buffer: the files themselves lie in an order that mixes.
    assert len({int(sample["cls"]) for sample in shards.read(0)}) == 4


@pytest.mark.parametrize("workers, repeats", [(0, 1), (2, 3)])
def test_going_on_within_an_epoch_gives_the_same_batches(root, workers, repeats):
    loader = train_on(open_shards(root), workers, noisy_number_of, repeats=repeats)
    whole = [images for images, _ in loader]
    for start in (1, 6):
        loader.set_epoch(0, start)
        assert all(torch.equal(*pair) for pair in zip(whole[start:], (images for images, _ in loader), strict=True))


def test_only_the_images_that_a_worker_decodes_are_read(root):
    train = open_shards(root)
    loader = train_on(train)
    skipped = [name for batch in loader.samples_of(0, range(5)).values() for _, name in batch]
    for name in skipped:
        (root / "train" / name).unlink()
    loader.set_epoch(0, 5)
    assert len(list(loader)) == 5, "what was taken before is not read again"


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_skipped_within_the_budget_and_named(root, workers):
    (root / "train" / "dog" / "006.JPG").write_bytes(b"text")
    (root / "train" / "cat" / "009.JPG").unlink()
    (root / "train" / "cat" / "009.JPG").symlink_to("nowhere")
    shards = open_shards(root)
    assert shards.num_samples == 50
    loader = train_on(shards, workers, max_bad_samples=4)
    batches = list(loader)
    assert len(batches) == 10 and not {6, 9} & set(numbers(batches))
    texts = " ".join(text for text, _ in loader.skipped)
    assert f"image {root}/train/dog/006.JPG: not a readable image" in texts
    assert f"image {root}/train/cat/009.JPG cannot be read (No such file or directory)" in texts
    for loader in (train_on(shards, workers), eval_loader(shards, number_of, batch_size=4, num_workers=workers)):
        with pytest.raises(DataError, match=r"^image \S+/(dog/006|cat/009)\.JPG[ :][^\n]+$"):
            list(loader)


def test_samples_of_a_batch_are_its_files(root):
    loader = train_on(open_shards(root), 2, repeats=2)
    delivered = [numbers([batch]) for batch in loader]
    for batch, found in loader.samples_of(0, range(10)).items():
        assert [os.path.join(*place) for place in found] == [
            f"{root}/train/{CLASSES[n % 4]}/{n:03d}.JPG" for n in delivered[batch]
        ]


def test_a_split_transform_gets_the_bytes(root):
    for path in (root / "train").glob("*/*"):
        path.write_bytes(picture(0, size=(20, 30)))
    crops, finish = split_transform(create_transform(16, is_training=True, auto_augment="rand-m9"))
    batches = list(device_batches(train_on(open_shards(root), transform=crops), "cpu", finish))
    assert len(batches) == 10 and batches[0][0].shape == (5, 3, 16, 16)


def test_validation_has_the_indices_of_training(root, tmp_path):
    for path in sorted((root / "val" / "bee").iterdir()):
        path.unlink()
    (root / "val" / "bee").rmdir()  # alone, the others would be counted from 0
    train = open_shards(root)
    for val in (
        open_shards(root, "val"),
        open_shards(root / "val", "val"),
        open_shards(root / "val", train=train),
        open_shards(root / "val", class_names=CLASSES),
    ):
        found = list(eval_loader(val, number_of, batch_size=4, num_workers=0))
        assert [label for _, labels in found for label in labels.tolist()] == [n % 4 for n in numbers(found)]
    write_folder(root / "val", 1, ["fox"])
    for spec, options in ((root, {}), (root / "val", {"train": train})):
        with pytest.raises(DataError, match="class 'fox' of .*val is not among the 4 classes"):
            open_shards(spec, "val", **options)
    write_folder(tmp_path / "few", 8, ["cat", "dog"])
    unnamed = write_shards(tmp_path / "shards", [8])  # of five classes without names
    with pytest.raises(DataError, match="few has 2 classes, the training data 5, whose names are unknown"):
        open_shards(tmp_path / "few", "val", train=unnamed)


def test_shards_whose_classes_have_other_indices_than_in_training_are_refused(root, tmp_path):
    write_folder(tmp_path / "few", 8, ["cat", "dog"])
    maker.main(["imagefolder", str(tmp_path / "few"), str(tmp_path / "out"), "--split", "val"])
    with pytest.raises(DataError, match="class 'cat' has index 0 in .*out', but 1 in the training data"):
        open_shards(tmp_path / "out", "val", train=open_shards(root))
    assert open_shards(tmp_path / "out", "val", class_names=["n01", "n02"]).num_samples == 8  # other words for them


def test_a_folder_of_classes_has_no_splits(root):
    train = open_shards(root / "train")
    assert train.num_samples == 50 and open_shards(root / "val", "anything").num_samples == 14
    with pytest.raises(DataError, match=f"^{root}/train has no splits but .* give {root}, which has train, val$"):
        open_shards(root / "train", "val", train=train)
    (root / "val").rename(root / "other")
    with pytest.raises(DataError, match=f"give --val-data, or part its images into {root}/train/train and "):
        open_shards(root / "train", "val", train=train)
    with pytest.raises(DataError, match="no split 'val'; it has train"):
        open_shards(root / "train" / "..", "val", train=train)


def test_what_is_neither_classes_nor_splits_for_certain_is_refused(root, tmp_path):
    (tmp_path / "none" / "sub").mkdir(parents=True)
    for folder in (tmp_path / "none", tmp_path / "none" / "sub", root / "val" / "cat"):
        with pytest.raises(DataError, match="holds no shards .*vision_longhorn.shards imagefolder IMAGES OUT"):
            open_shards(folder)
    write_folder(root, 3, ["fox"])
    with pytest.raises(DataError, match=r"has both splits \(train, val\) and classes \(fox\) in it"):
        open_shards(root)
    write_folder(tmp_path / "one" / "Data", 4)
    with pytest.raises(DataError, match="one has one class only, 'Data'"):
        open_shards(tmp_path / "one")


def test_classes_may_be_called_as_splits_are(tmp_path):
    write_folder(tmp_path / "vehicles", 9, ["bus", "test", "train"])
    assert open_shards(tmp_path / "vehicles").class_names == ["bus", "test", "train"]


def test_hint_gives_the_command_that_makes_shards_and_tells_what_is_left_out(root, tmp_path, capsys):
    for name in ("cat/a.gif", "dog/._003.jpg"):
        (root / "train" / name).write_bytes(b"")
    root = root.rename(root.with_name("my root"))
    train, val = open_shards(root), open_shards(root / "val", "val")
    assert "left out there, as no images by name: 2 (cat/a.gif, dog/._003.jpg)" in train.hint
    assert "left out" not in val.hint and train.num_samples == 50
    for hint in (train.hint, val.hint):
        command = shlex.split(hint[hint.index("python -m") :].partition(";")[0])
        out = tmp_path / "out"
        maker.main([str(out) if word == "OUT" else word for word in command[3:]])
        before = contents(out)
    assert open_shards(out).num_samples == 50 and open_shards(out, "val").num_samples == 14
    assert open_shards(out).hint == "" and contents(out) == before


def test_names_beside_the_splits(root):
    assert open_shards(root).display_names is None
    (root / "names.txt").write_text("emu\tEmu, a bird\ncat\tCat\nbee\tHoney bee\nyak\tYak\ndog\tDog\n")
    wanted = ["Honey bee", "Cat", "Dog", "Emu, a bird"]
    assert open_shards(root).display_names == open_shards(root / "val").display_names == wanted
    (root / "names.txt").write_text("Honey bee\nCat\nDog\n")
    with pytest.raises(DataError, match="names.txt has 3 names for 4 classes"):
        open_shards(root)
