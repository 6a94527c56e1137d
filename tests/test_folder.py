"""Image folders that are read as they are: found, shared out, ordered and resumed as shards are."""

import itertools
import os

import pytest
import torch
from test_loader import all_parts, noisy_number_of, number_of, numbered, numbers, write_shards
from test_shards import picture
from timm.data import create_transform
from torchvision.datasets import ImageFolder

from vision_longhorn import shards as maker
from vision_longhorn.data import (
    DataError,
    device_batches,
    eval_loader,
    keep_in_memory,
    open_shards,
    split_transform,
    train_loader,
)
from vision_longhorn.data.folders import list_images
from vision_longhorn.data.walk import walk
from vision_longhorn.evaluation.images import find_images

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
    with pytest.raises(DataError, match="num_samples=51, but .*train holds 50; drop it, or give 50"):
        open_shards(root, num_samples=51)
    for split in "train", "val":
        with pytest.raises(DataError, match=f"num_classes=3, but {root} has 4 classes; drop it, or give 4 or more"):
            open_shards(root, split, num_classes=3)


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
    loader = train_on(train, keys=True)
    skipped = [name for _, _, places in itertools.islice(loader, 5) for _, name in places]
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


def test_places_of_a_batch_are_its_files(root):
    for images, targets, places in train_on(open_shards(root), 2, repeats=2, keys=True):
        assert [os.path.join(*place) for place in places] == [
            f"{root}/train/{CLASSES[n % 4]}/{n:03d}.JPG" for n in numbers([(images, targets)])
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
        open_shards(root / "val", train=train),
        open_shards(root / "val", class_names=CLASSES),
    ):
        found = list(eval_loader(val, number_of, batch_size=4, num_workers=0))
        assert [label for _, labels in found for label in labels.tolist()] == [n % 4 for n in numbers(found)]
    write_folder(root / "val", 1, ["fox"])
    for spec, options in ((root, {}), (root / "val", {"train": train})):
        with pytest.raises(DataError, match="class 'fox' of .*val is not among the 4 classes"):
            open_shards(spec, "val", **options)
    write_folder(root / "val", 1, ["bee"])
    with pytest.raises(DataError, match="class 'bee' of .* or is there twice"):
        open_shards(root / "val", class_names=[*CLASSES, "bee"])
    write_folder(tmp_path / "few", 8, ["cat", "dog"])
    unnamed = write_shards(tmp_path / "shards", [8])  # of five classes without names
    with pytest.raises(DataError, match="few has 2 classes, but the training data have 5, whose names are unknown"):
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
    with pytest.raises(DataError, match=f"^{root}/train has no splits, only classes .*; give val_data, or a folder"):
        open_shards(root / "train", "val", train=train)
    (root / "val").rename(root / "other")
    with pytest.raises(DataError, match="no split 'val'; it has train"):
        open_shards(root / "train" / "..", "val", train=train)


def test_what_is_neither_classes_nor_splits_for_certain_is_refused(root, tmp_path):
    (tmp_path / "none" / "sub").mkdir(parents=True)
    for folder in (tmp_path / "none", tmp_path / "none" / "sub", root / "val" / "cat"):
        with pytest.raises(DataError, match="holds no shards and no class folders with images"):
            open_shards(folder)
    write_folder(root, 3, ["fox"])
    with pytest.raises(DataError, match="has train, val, fox in it, which may be splits or classes"):
        open_shards(root)
    write_folder(tmp_path / "one" / "Data", 4)
    with pytest.raises(DataError, match="one has only one class, 'Data'"):
        open_shards(tmp_path / "one")


def test_classes_may_be_called_as_splits_are(tmp_path):
    write_folder(tmp_path / "vehicles", 9, ["bus", "test", "train"])
    assert open_shards(tmp_path / "vehicles").class_names == ["bus", "test", "train"]
    write_folder(tmp_path / "two", 4, ["test", "train"])  # whether these are classes or splits without labels
    write_folder(tmp_path / "more", 4, ["val", "things/cat"])
    for folder, names in (tmp_path / "two", "test, train"), (tmp_path / "more", "val"):
        with pytest.raises(DataError, match=f"has {names}.* in it, which may be splits or classes"):
            open_shards(folder)
        with pytest.raises(DataError, match=f"has {names}.* in it, which may be splits or classes"):
            maker.main(["imagefolder", str(folder), str(tmp_path / "out")])
    assert open_shards(tmp_path / "two", "val", train=open_shards(tmp_path / "vehicles")).num_samples == 4


@pytest.mark.parametrize(
    "train, val, made",
    [
        ("Train", "Val", {"train", "val"}),
        ("training", "valid", {"training", "valid"}),
        ("TRAIN", "Validation", {"train", "validation"}),
        ("training_set", "Dev Set", {"train", "val"}),
    ],
)
def test_splits_in_any_spelling(tmp_path, train, val, made):
    write_folder(tmp_path / "root" / train, 8)
    write_folder(tmp_path / "root" / val, 4, ["cat", "dog"])  # whose indices are those of training
    maker.main(["imagefolder", str(tmp_path / "root"), str(tmp_path / "out")])
    assert {path.name[:-11] for path in (tmp_path / "out").glob("*.tar")} == made
    for root in tmp_path / "root", tmp_path / "out":
        for split in "val", "validation", "VALID":
            found = open_shards(root, split, train=open_shards(root))
            labels = [int(sample["cls"]) for number in range(len(found.urls)) for sample in found.read(number)]
            assert (found.class_names, sorted(labels)) == (CLASSES, [1, 1, 2, 2])
    write_folder(tmp_path / "root" / "eval", 4)
    with pytest.raises(DataError, match=f"has {min(val, 'eval')}, {max(val, 'eval')}, each of which may be 'val'"):
        open_shards(tmp_path / "root", "val")


def test_folders_beside_the_splits_are_named(root, tmp_path, capsys):
    write_folder(root, 3, ["test"])  # images without labels
    write_folder(root / "holdout", 4)
    (root / "images.tar").write_bytes(b"")
    for split, count in ("train", 50), ("val", 14):
        shards = open_shards(root, split)
        assert (shards.num_samples, shards.left_out) == (count, f"beside {root}/{split}: holdout, test")
    maker.main(["imagefolder", str(root), str(tmp_path / "out")])
    assert f"left out of {root}, as no splits: holdout, test" in capsys.readouterr().err
    (root / "images.tar").unlink()
    for split in "test", "more":
        with pytest.raises(DataError, match=f"no split '{split}'; it has train, val, holdout, test"):
            open_shards(root, split)
    assert open_shards(root, "holdout").num_samples == 4


@pytest.fixture
def untidy(root):
    """`root` with all that is no image of it in its folders, and 3 images more, by links."""
    train = root / "train"
    for place in "cat/.ipynb_checkpoints", "dog/deep/.hidden/more", "dog/@eaDir", "__MACOSX/cat":
        (train / place).mkdir(parents=True)
        (train / place / "a.jpg").write_bytes(numbered(0))
    (train / "cat" / "._a.jpg").write_bytes(b"AppleDouble")
    os.mkfifo(train / "cat" / "z.jpg")
    (train / "cat" / "pipe.jpg").symlink_to("z.jpg")
    (train / "cat" / "here").symlink_to(".")
    (train / "dog" / "deep" / "up").symlink_to("../../..")
    (train / "above").symlink_to("..")
    (train / "dogs").symlink_to("dog")
    (train / "emu" / "other").symlink_to("../dog/deep")
    write_folder(root.parent / "pool", 2, ["fox", "fox/sub"])
    (root.parent / "pool" / "fox" / "round").symlink_to("../fox")
    (train / "fox").symlink_to("../../pool/fox")
    (train / "fox2").symlink_to("../../pool/fox/sub")
    (train / "emu" / "link.jpg").symlink_to("003.JPG")
    return root


def test_one_walk_for_all_tools(untidy, tmp_path, capsys):
    """Nothing hidden, no folder twice, ordinary files only; links to files and to folders are followed."""
    shards = open_shards(untidy)
    assert shards.class_names == [*CLASSES, "fox", "fox2"] and shards.num_samples == 53
    names = {sample["__key__"] for number in range(len(shards.urls)) for sample in shards.read(number)}
    assert len(names) == 53 and {"emu/link.jpg", "fox/000.JPG", "fox2/001.JPG"} < names
    reasons = dict(walk(untidy / "train").others)
    assert reasons == {
        **dict.fromkeys(["cat/z.jpg", "cat/pipe.jpg"], "a pipe, a socket or a device"),
        **dict.fromkeys(
            ["cat/here/", "dog/deep/up/", "above/", "fox/round/", "dogs/", "emu/other/", "fox/sub/"],
            "a folder that is read elsewhere",
        ),
    }
    assert f"in {untidy}/train: 9 (above/: a folder that is read elsewhere, cat/here/: a" in shards.left_out
    assert len(find_images([str(untidy / "train")])) == 53
    assert len(keep_in_memory(shards).kept) == len(shards.urls)
    capsys.readouterr()
    maker.main(["imagefolder", str(untidy / "train"), str(tmp_path / "out")])
    assert f"left out of {untidy}/train: 9 (above/: a folder" in capsys.readouterr().err
    assert open_shards(tmp_path / "out").num_samples == 53
    with pytest.raises(DataError, match="cat holds no shards and no class folders with images"):
        open_shards(untidy / "train" / "cat")


def test_order_is_that_of_torchvision(tmp_path):
    places = ["a", "a-b", "a/c", "a/c-d", "a/c/e", "B", "a.b"]
    write_folder(tmp_path, 20, places)
    listed, classes, _ = list_images(tmp_path)
    theirs = ImageFolder(tmp_path)
    assert listed == [(os.path.relpath(path, tmp_path), label) for path, label in theirs.samples]
    assert classes == theirs.classes


def test_shards_in_folders_of_their_splits(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for folder, count in ("Train", 6), ("test", 4):
        write_shards(root / folder, [count])
        os.rename(root / folder / "train-000000.tar", root / folder / "0.tar")
    assert open_shards(root, "train", 6).num_samples == 6
    assert open_shards(root / "test", "test", 4).num_samples == 4
    for split, count in ("train", 6), ("test", 4):  # each with an index of its own
        maker.main(["index", str(root / {"train": "Train"}.get(split, split))])
        assert open_shards(root, split).samples_per_shard == [count]
    for path in root.glob("*/_info.json"):
        path.unlink()
    maker.main(["index", str(root)])
    maker.main(["verify", str(root)])
    assert open_shards(root).samples_per_shard == [6] and open_shards(root, "test").num_samples == 4
    with pytest.raises(DataError, match="no split 'val'; it has Train, test; name one of these .as val_split in"):
        open_shards(root, "val")
    with pytest.raises(DataError, match="no shards and no class folders with images"):
        open_shards(tmp_path)


def test_what_is_there_is_named_where_a_split_is_missing(tmp_path):
    write_shards(tmp_path, [6], "test")
    write_shards(tmp_path, [6], indexed=True)
    write_folder(tmp_path / "val", 4)
    with pytest.raises(DataError, match="no split 'val'; it has train; name one of these"):
        open_shards(tmp_path, "val")
    (tmp_path / "_info.json").unlink()
    assert open_shards(tmp_path, "val").num_samples == 4


def test_what_is_left_out_of_a_folder_is_told(root):
    for name in ("cat/a.gif", "dog/._003.jpg"):
        (root / "train" / name).write_bytes(b"")
    train, val = open_shards(root), open_shards(root, "val")
    assert train.left_out == f"in {root}/train: 1 (cat/a.gif: none of jpg, jpeg, png, webp, ppm)"
    assert val.left_out == "" and train.num_samples == 50


def test_names_beside_the_splits(root):
    assert open_shards(root).display_names is None
    (root / "names.txt").write_text("emu\tEmu, a bird\ncat\tCat\nbee\tHoney bee\nyak\tYak\ndog\tDog\n")
    wanted = ["Honey bee", "Cat", "Dog", "Emu, a bird"]
    assert open_shards(root).display_names == open_shards(root, "val").display_names == wanted
    (root / "names.txt").write_text("Honey bee\nCat\nDog\n")
    with pytest.raises(DataError, match="names.txt has 3 lines for 4 classes"):
        open_shards(root)
