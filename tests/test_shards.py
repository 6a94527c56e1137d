"""Making shards: what is stored, that it can be stopped and run again, and what is said about bad input."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import tarfile

import numpy as np
import pytest
from PIL import Image
from test_images import encode, rotated, swapped_profile
from timm.data.readers.reader_wds import ReaderWds

from vision_longhorn import shards as maker
from vision_longhorn.command_line.parser import run_cli
from vision_longhorn.data import DataError, decode_image, open_shards, sharding
from vision_longhorn.data.index import read_index, write_index
from vision_longhorn.data.samples import image_of
from vision_longhorn.data.sources import GROUND_TRUTH, Sample, ground_truth, ilsvrc_train, image_folder
from vision_longhorn.data.tars import read_shard
from vision_longhorn.errors import UserError
from vision_longhorn.files import write_text
from vision_longhorn.shards import make_digits

WNIDS = ["n00000003", "n00000005", "n00000009", "n00000012"]
ILSVRC_ORDER = ["n00000012", "n00000003", "n00000009", "n00000005"]  # WordNet id of ILSVRC id 1, 2, ...


@functools.cache
def picture(number, size=(12, 10)):
    """Bytes of a JPEG that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_tar(path, members):
    """A tar (.gz by its name) of (name, bytes) pairs."""
    with tarfile.open(path, "w:gz" if str(path).endswith("gz") else "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def folder(tmp_path):
    """40 images of 4 classes."""
    for number in range(40):
        path = tmp_path / "src" / f"class{number % 4}" / f"image.{number:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return tmp_path / "src"


def make(folder, out, split="train", **options):
    samples, class_names, _ = image_folder(folder, (read_index(out) or {}).get("class_names"))
    return maker.make_shards(out, split, samples, class_names, **{"shard_size": 8, **options})


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


def stored(out, split="train"):
    return [sample for url in open_shards(out, split).urls for sample in read_shard(url)]


def test_images_above_max_side_are_stored_smaller(tmp_path):
    for name, size, suffix in (
        ("wide", (60, 20), "JPEG"),
        ("high", (24, 48), "png"),
        ("thin", (1, 90), "JPEG"),
        ("small", (40, 40), "JPEG"),
    ):
        path = tmp_path / "src" / "class0" / f"{name}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (200, 100, 50)).save(path)
    make(tmp_path / "src", tmp_path / "out", max_side=40)
    found = {json.loads(sample["json"])["filename"][7:-4].rstrip("."): sample for sample in stored(tmp_path / "out")}
    assert {name: decode_image(image_of(sample)).size for name, sample in found.items()} == {
        "wide": (40, 13),
        "high": (20, 40),
        "thin": (1, 40),
        "small": (40, 40),
    }
    assert image_of(found["small"]) == (tmp_path / "src" / "class0" / "small.JPEG").read_bytes()
    assert np.abs(np.asarray(decode_image(image_of(found["high"])), int) - (200, 100, 50)).max() <= 3
    assert maker.verify(tmp_path / "out", full=True) == []
    for other in (None, 50):
        with pytest.raises(DataError, match=rf"made with max_side 40 \(now {other}\)"):
            make(tmp_path / "src", tmp_path / "out", max_side=other)
    with pytest.raises(DataError, match="max_side=0; it must be at least 1"):
        make(tmp_path / "src", tmp_path / "new", max_side=0)


def test_with_max_side_images_are_stored_as_people_see_them():
    image, exif = rotated(6)
    palette, profile = image.convert("P", palette=Image.Palette.ADAPTIVE), swapped_profile()
    for data in (
        encode(image, exif=exif),
        encode(image, icc_profile=profile),
        encode(image, "PNG", exif=exif),
        encode(palette, "PNG", icc_profile=profile),
    ):
        sample = Sample("a.jpeg", 0, size=len(data), data=data)
        assert sharding.stored_form(sample, None) == (data, "jpg")
        stored, _ = sharding.stored_form(sample, 48)
        header, seen = Image.open(io.BytesIO(stored)), decode_image(data)
        assert not header.getexif() and "icc_profile" not in header.info and header.size == seen.size
        assert np.abs(np.asarray(header, float) - np.asarray(seen)).mean() < 8


def test_images_are_stored_untouched_and_mixed(folder, tmp_path):
    make(folder, tmp_path / "out")
    shards = open_shards(tmp_path / "out")
    assert (shards.num_samples, shards.num_classes, len(shards.urls)) == (40, 4, 5)
    assert shards.class_names == ["class0", "class1", "class2", "class3"]
    names = set()
    for url in shards.urls:
        samples = list(read_shard(url))
        assert len({sample["cls"] for sample in samples}) > 1, "a training shard must mix the classes"
        for sample in samples:
            about = json.loads(sample["json"])
            assert image_of(sample) == (folder / about["filename"]).read_bytes()
            assert about["class_name"] == f"class{about['label']}" == about["filename"].split("/")[0]
            assert int(sample["cls"]) == about["label"]
            names.add(about["filename"])
    assert len(names) == 40


def test_order_depends_on_the_seed_alone(folder, tmp_path):
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(folder, tmp_path / out, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    order = [[json.loads(s["json"])["filename"] for s in stored(tmp_path / out)] for out in "ac"]
    assert order[0] != order[1] and sorted(order[0]) == sorted(order[1])


@pytest.mark.parametrize("split", ["train", "val"])
def test_timm_reads_the_index(folder, tmp_path, split):
    make(folder, tmp_path / "out", "train")
    make(folder, tmp_path / "out", "val", shard_size=15)
    reader = ReaderWds(str(tmp_path / "out"), split=split)
    assert reader.num_samples == 40
    read = list(reader)
    assert sorted(target for _, target in read) == sorted([0, 1, 2, 3] * 10)
    assert all(image.size == (12, 10) for image, _ in read)


def test_second_split_keeps_the_classes_of_the_first(folder, tmp_path):
    make(folder, tmp_path / "out")
    few = tmp_path / "few"
    (few / "class2").mkdir(parents=True)
    (few / "class2" / "x.png").write_bytes(picture(7))
    make(few, tmp_path / "out", "val")
    assert [sample["cls"] for sample in stored(tmp_path / "out", "val")] == [b"2"]
    (few / "class2").rename(few / "class9")
    with pytest.raises(DataError, match="class 'class9' .* not among the 4 classes"):
        make(few, tmp_path / "out", "test")


def test_same_command_again_changes_nothing(folder, tmp_path):
    make(folder, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    make(folder, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    "options, named", [({"seed": 3}, r"seed 0 \(now 3\)"), ({"shard_size": 9}, r"shard_size 8 \(now 9\)")]
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_parameters_are_refused(folder, tmp_path, options, named, finished, monkeypatch):
    if not finished:
        monkeypatch.setattr(sharding, "write_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(folder, tmp_path / "out")
    else:
        make(folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match=named):
        make(folder, tmp_path / "out", **options)
    (folder / "class0" / "more.jpg").write_bytes(picture(99))
    with pytest.raises(DataError, match=r"samples 40 \(now 41\)"):
        make(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def killed_in_third_shard(folder, out):
    back = sharding.read_shard

    def kill(path):
        if "train-000002" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return back(path)

    sharding.read_shard = kill
    make(folder, out)


def test_killed_and_run_again(folder, tmp_path):
    make(folder, tmp_path / "whole")
    process = multiprocessing.get_context("fork").Process(target=killed_in_third_shard, args=(folder, tmp_path / "out"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names[0] == ".train.plan.json" and names[1:3] == ["train-000000.tar", "train-000001.tar"]
    assert len(names) == 4 and names[3].endswith(".tmp")
    kept = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names[1:3]}
    with pytest.raises(DataError, match="number of samples"):  # nobody takes a part for the whole
        open_shards(tmp_path / "out")

    make(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept


def test_interrupted_leaves_no_partial_file(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "read_shard", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".train.plan.json"]


def test_image_that_cannot_be_decoded(folder, tmp_path):
    bad = folder / "class1" / "image.05.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(DataError, match=r"class1/image\.05\.JPEG: not a readable image .*on_bad skip"):
        make(folder, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert make(folder, tmp_path / "out", on_bad="skip") == ["class1/image.05.JPEG"]
    names = {json.loads(sample["json"])["filename"] for sample in stored(tmp_path / "out")}
    assert len(names) == open_shards(tmp_path / "out").num_samples == 39 and "class1/image.05.JPEG" not in names


def test_shards_of_others_are_not_overwritten(folder, tmp_path):
    (tmp_path / "out").mkdir()
    write_tar(tmp_path / "out" / "train-000000.tar", [("a.jpg", b"x")])
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="made by other means"):
        make(folder, tmp_path / "out")
    assert {name: contents(tmp_path / "out")[name] for name in before} == before


def test_folder_without_classes_or_images(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(DataError, match="no class folders with images"):
        image_folder(tmp_path / "src")
    (tmp_path / "src" / "a").mkdir()
    (tmp_path / "src" / "a" / "notes.txt").write_text("")
    with pytest.raises(DataError, match="no class folders with images"):
        image_folder(tmp_path / "src")
    (tmp_path / "src" / "b").mkdir()
    (tmp_path / "src" / "b" / "x.png").write_bytes(picture(1))
    with pytest.raises(DataError, match="class 'a' .* has no images"):
        image_folder(tmp_path / "src")


@contextlib.contextmanager
def full_disk(room):
    """No file can become longer than `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room, file", [(20, ".train.plan.json"), (1000, "train-000000.tar")])
def test_a_full_disk_is_told_with_the_file_that_it_had_no_room_for(folder, tmp_path, room, file, capsys):
    with full_disk(room), pytest.raises(SystemExit):
        run_cli(lambda: maker.main(["imagefolder", str(folder), str(tmp_path / "out")]))
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {tmp_path}/out/{file}: File too large"
    assert not list((tmp_path / "out").glob("*.tar*"))
    maker.main(["imagefolder", str(folder), str(tmp_path / "out")])
    assert len(stored(tmp_path / "out")) == 40


def test_files_that_cannot_be_written_are_told_by_their_own_names(tmp_path):
    for write in (
        lambda path: write_text(path, "x" * 100),
        lambda path: write_index(path.parent, {"train": {"filenames": ["a" * 100], "shard_lengths": [1]}}),
    ):
        path = tmp_path / "_info.json"
        with full_disk(20), pytest.raises(OSError, match=f"File too large: '{path}'$"):
            write(path)
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"'{tmp_path}/file'"):
        write_text(tmp_path / "file" / "within", "")


@pytest.fixture
def ilsvrc(tmp_path):
    """An imitation of the ILSVRC-2012 downloads: 4 classes, 20 training and 12 validation images."""
    from scipy.io import savemat

    root = tmp_path / "ilsvrc"
    root.mkdir()
    outer = []
    for number, wnid in enumerate(WNIDS):
        members = [(f"{wnid}_{i}.JPEG", picture(10 * number + i)) for i in range(5)]
        write_tar(root / "class.tar", [(f"._{wnid}_0.JPEG", b"AppleDouble"), *members])
        outer += [(f"._{wnid}.tar", b"AppleDouble"), (f"{wnid}.tar", (root / "class.tar").read_bytes())]
    write_tar(root / "train.tar", outer[::-1])
    (root / "class.tar").unlink()
    ids = [1 + (7 * i) % 4 for i in range(12)]
    val = [(f"ILSVRC2012_val_{i:08d}.JPEG", picture(1000 + i)) for i in range(1, 13)]
    write_tar(root / "val.tar", val[5:] + val[:5])

    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
    rows = [(i, wnid, "word", "gloss", 0, 0) for i, wnid in enumerate(ILSVRC_ORDER, 1)]
    rows.append((5, "n00000001", "thing", "all of them", 4, [1, 2, 3, 4]))
    synsets = np.array(rows, dtype=[(name, object) for name in fields])[:, None]
    devkit = root / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    savemat(devkit / "meta.mat", {"synsets": synsets})
    (devkit / GROUND_TRUTH).write_text("".join(f"{i}\n" for i in ids))
    with tarfile.open(root / "devkit.tar.gz", "w:gz") as tar:
        tar.add(devkit.parent, devkit.parent.name)
    (root / "wnids.txt").write_text("".join(f"{ILSVRC_ORDER[i - 1]}\n" for i in ids))
    return root


def test_ilsvrc_tars(ilsvrc, tmp_path, capsys):
    out = tmp_path / "out"
    maker.main(
        ["imagenet", *map(str, (ilsvrc / "train.tar", ilsvrc / "val.tar", ilsvrc / "devkit.tar.gz", out))]
        + ["--shard-size", "7"]
    )
    assert "train, 20 images in 3 shards, 4 classes" in capsys.readouterr().out
    assert open_shards(out, "val").class_names == WNIDS
    for sample in stored(out):
        about = json.loads(sample["json"])
        number = int(about["filename"].split("_")[1].split(".")[0])
        assert about["filename"] == f"{WNIDS[about['label']]}/{WNIDS[about['label']]}_{number}.JPEG"
        assert image_of(sample) == picture(10 * about["label"] + number)
    truth = (ilsvrc / "wnids.txt").read_text().split()
    for sample in stored(out, "val"):
        number = int(json.loads(sample["json"])["filename"][-13:-5])
        assert image_of(sample) == picture(1000 + number)
        assert WNIDS[int(sample["cls"])] == truth[number - 1]
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []


def test_every_form_of_the_ground_truth_tells_the_same(ilsvrc):
    truth = ground_truth(ilsvrc / "wnids.txt")
    assert len(set(truth)) == 4
    assert ground_truth(ilsvrc / "devkit.tar.gz") == truth
    assert ground_truth(ilsvrc / "ILSVRC2012_devkit_t12") == truth


def test_ground_truth_that_cannot_be_told_is_refused(ilsvrc, tmp_path):
    data = ilsvrc / "ILSVRC2012_devkit_t12" / "data"
    with pytest.raises(DataError, match="does not hold one WordNet id per line .*; give ILSVRC2012_devkit_t12.tar.gz"):
        ground_truth(data / GROUND_TRUTH)
    with pytest.raises(DataError, match="cannot be read"):
        ground_truth(tmp_path / "none.txt")
    (data / GROUND_TRUTH).write_text("0\n1\n2\n")
    with pytest.raises(DataError, match=r"'0' in \S+ is no ILSVRC id \(1 to 4\)"):
        ground_truth(ilsvrc / "ILSVRC2012_devkit_t12")
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as tar:
        tar.add(data)
    whole = (tmp_path / "kit.tar.gz").read_bytes()
    for length in len(whole) // 2, len(whole) - 30:
        (tmp_path / "kit.tar.gz").write_bytes(whole[:length])
        with pytest.raises(DataError, match="is no tar, or is damaged or cut short"):
            ground_truth(tmp_path / "kit.tar.gz")
    (data / "meta.mat").write_bytes((data / "meta.mat").read_bytes()[:100])
    with pytest.raises(UserError, match="meta.mat of .* is not accepted"):
        ground_truth(ilsvrc / "ILSVRC2012_devkit_t12")
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match="holds no .* and meta.mat"):
        ground_truth(ilsvrc / "ILSVRC2012_devkit_t12")


def test_val_tar_and_ground_truth_must_match(ilsvrc, tmp_path):
    (ilsvrc / "short.txt").write_text("n00000003\n" * 11)
    args = ["imagenet", str(ilsvrc / "train.tar"), str(ilsvrc / "val.tar")]
    with pytest.raises(DataError, match="12 images, but the ground truth has 11 labels"):
        maker.main([*args, str(ilsvrc / "short.txt"), str(tmp_path / "out")])
    (ilsvrc / "other.txt").write_text("n00000099\n" * 12)
    with pytest.raises(DataError, match="class n00000099 of the ground truth is not among the 4"):
        maker.main([*args, str(ilsvrc / "other.txt"), str(tmp_path / "out")])


def test_train_tar_that_is_cut_short_or_not_there(ilsvrc, tmp_path):
    data = (ilsvrc / "train.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match="damaged or cut short"):
        ilsvrc_train(tmp_path / "cut.tar")
    with pytest.raises(DataError, match="not one tar per class"):
        ilsvrc_train(ilsvrc / "val.tar")
    with pytest.raises(DataError, match="there is no file .*none.tar; check the path"):
        ilsvrc_train(tmp_path / "none.tar")


def test_two_processes_make_the_digits_at_once_and_they_are_those_of_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    out = tmp_path / "new" / "digits"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=make_digits, args=(out,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0] and len(list(out.iterdir())) == 7
    data = load_digits()
    seen = []
    for split, count, num_shards in (("train", 1437, 4), ("val", 360, 2)):
        shards = open_shards(out, split)
        assert (shards.num_samples, shards.num_classes, len(shards.urls)) == (count, 10, num_shards)
        labels = []
        for sample in stored(out, split):
            number = int(json.loads(sample["json"])["filename"][6:10])
            assert int(sample["cls"]) == data.target[number]
            pixels = np.asarray(decode_image(image_of(sample)))
            assert (pixels == (data.images[number] * 255 / 16).round()[..., None]).all()
            seen.append(number)
            labels.append(int(sample["cls"]))
        assert np.abs(np.bincount(labels) / count - np.bincount(data.target) / 1797).max() < 0.002, "not stratified"
    assert sorted(seen) == list(range(1797))

    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    make_digits(out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "val-000001.tar").unlink()
    make_digits(out)
    assert maker.verify(out, full=True) == []
    (out / "_info.json").unlink()  # as after a stop in the middle
    (out / "train-000002.tar").unlink()
    (out / "notes.txt").write_text("mine")
    make_digits(f"{out}/")
    assert maker.verify(out, full=True) == [] and len(list(out.iterdir())) == 8


def test_digits_do_not_overwrite_other_data(folder, tmp_path):
    make(folder, tmp_path / "out")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "val-000000.tar").write_bytes(b"mine")
    for name in ("out", "more"):
        before = contents(tmp_path / name)
        with pytest.raises(DataError, match="holds other data than the digits"):
            make_digits(tmp_path / name)
        assert contents(tmp_path / name) == before


def damage(out, what):
    path = out / "train-000001.tar"
    data = path.read_bytes()
    if what == "missing":
        path.unlink()
    elif what == "cut":
        path.write_bytes(data[: len(data) // 2 + 100])
    elif what == "image":
        sample = list(read_shard(str(path)))[3]
        path.write_bytes(data.replace(image_of(sample), bytes(len(image_of(sample)))))
    elif what == "count":
        write_tar(path, [("a.jpg", picture(1)), ("a.cls", b"1")])


@pytest.mark.parametrize(
    "what, message",
    [
        ("missing", "train-000001.tar cannot be read"),
        ("cut", r"train-000001.tar cannot be read after sample 00000\d\d_image"),
        ("image", r"train-000001.tar, sample 0000011_\S+: not a readable image"),
        ("count", "train-000001.tar has 1 samples, the index says 8"),
    ],
)
def test_verify_names_what_is_wrong(folder, tmp_path, what, message, capsys):
    make(folder, tmp_path / "out")
    assert maker.verify(tmp_path / "out", full=True) == []
    damage(tmp_path / "out", what)
    with pytest.raises(SystemExit) as raised:
        run_cli(lambda: maker.main(["verify", str(tmp_path / "out")]))
    assert raised.value.code == 1
    assert len(maker.verify(tmp_path / "out")) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def splits(folder):
    """40 images of 4 classes to train on, and 5 of two of the classes to evaluate."""
    root = folder.parent / "root"
    root.mkdir()
    folder.rename(root / "train")
    for number in range(5):
        path = root / "val" / f"class{1 + number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(100 + number))
    return root


def test_a_folder_of_splits_becomes_shards_of_each_with_the_same_classes(splits, tmp_path, capsys):
    args = ["imagefolder", str(splits), str(tmp_path / "out"), "--shard-size", "16"]
    maker.main(args)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in said] == [
        "train, 40 images in 3 shards, 4 classes",
        "val, 5 images in 1 shards, 4 classes",
    ]
    train, val = open_shards(tmp_path / "out"), open_shards(tmp_path / "out", "val")
    assert train.class_names == val.class_names == [f"class{n}" for n in range(4)]
    assert sorted(int(sample["cls"]) for sample in stored(tmp_path / "out", "val")) == [1, 1, 1, 2, 2]
    before = contents(tmp_path / "out")
    maker.main(args)
    assert contents(tmp_path / "out") == before


def test_mistakes_in_a_folder_of_splits_are_told_before_anything_is_written(splits, tmp_path):
    args = ["imagefolder", str(splits), str(tmp_path / "out")]
    with pytest.raises(DataError, match=f"has splits .train, val., which all .* give {splits}/val$"):
        maker.main([*args, "--split", "val"])
    (splits / "names.txt").write_text("class0\tNought\n")
    with pytest.raises(DataError, match="names.txt lacks a name for class 'class1'; give each"):
        maker.main(args)
    (splits / "val" / "class9").mkdir()
    (splits / "val" / "class9" / "x.png").write_bytes(picture(1))
    with pytest.raises(DataError, match="class 'class9' of .*val is not among the 4 classes"):
        maker.main(args)
    assert not (tmp_path / "out").exists()


def test_names_that_people_use_are_kept_in_the_index(splits, tmp_path):
    out = tmp_path / "out"
    maker.main(["imagefolder", str(splits), str(out)])
    assert open_shards(out).display_names is None
    (splits / "names.txt").write_text("Nought\nOne\nTwo\nThree\n")
    maker.main(["imagefolder", str(splits), str(out)])  # nothing else is left to do
    assert open_shards(out, "val").display_names == ["Nought", "One", "Two", "Three"]
    names = splits / "names.txt"
    names.write_text("class3\tdrei\nclass0\tnull\nclass1\teins\nclass2\tzwei, zwo\n", encoding="utf-8-sig")
    maker.main(["imagefolder", str(splits), str(out)])
    shards = open_shards(out)
    assert shards.display_names == ["null", "eins", "zwei, zwo", "drei"] and shards.class_names[0] == "class0"
    for text, message in (
        ("class0\ta\nb\nc\nd\n", "4 lines for 4 classes; give the name of each class"),
        ("a\nb\n", "2 lines for 4 classes"),
        ("", "0 lines for 4 classes"),
    ):
        names.write_text(text)
        with pytest.raises(DataError, match=message):
            maker.main(["imagefolder", str(splits), str(out)])
    assert open_shards(out).display_names == shards.display_names


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_link_that_leads_nowhere(folder, tmp_path, on_bad, capsys):
    link = folder / "class1" / "image.05.JPEG"
    link.unlink()
    link.symlink_to("nowhere")
    args = ["imagefolder", str(folder), str(tmp_path / "out"), "--on-bad", on_bad]
    if on_bad == "skip":
        maker.main(args)
        assert "skipped, as it cannot be read: class1/image.05.JPEG" in capsys.readouterr().err
        assert len(stored(tmp_path / "out")) == 39
    else:
        with pytest.raises(DataError, match=r"^class1/image\.05\.JPEG cannot be read .*No such file.*--on-bad skip"):
            maker.main(args)


@pytest.mark.parametrize("option", ["--shard-size", "--max-side"])
def test_numbers_that_options_cannot_be(folder, tmp_path, option):
    for value in "0", "-2", "1.5", "many":
        with pytest.raises(UserError, match=f"^argument {option}: [^\n]*{value}[^\n]*1 or more[^\n]*$"):
            maker.main(["imagefolder", str(folder), str(tmp_path / "out"), option, value])
    assert not (tmp_path / "out").exists()


def test_index_of_shards_made_by_others(tmp_path, capsys):
    for shard in range(3):
        members = [(f"{shard}{i}.{ext}", data) for i in range(4) for ext, data in (("jpg", b"x"), ("cls", b"%d" % i))]
        write_tar(tmp_path / f"set-train-{shard}.tar.gz", members)
    write_tar(tmp_path / "set-validation-0.tar", [("a.jpg", b"x"), ("a.cls", b"6")])
    maker.main(["index", str(tmp_path)])
    assert "train, 12 images in 3 shards, 7 classes" in capsys.readouterr().out
    assert open_shards(tmp_path, "val").samples_per_shard == [1]
    assert ReaderWds(str(tmp_path), split="train").num_samples == 12
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match="label 6, but only 2 classes"):
        maker.main(["index", str(tmp_path), "--classes", str(tmp_path / "classes.txt")])
    for file in "classes", "names":
        (tmp_path / f"{file}.txt").write_text("".join(f"{file} {n}\n" for n in range(8)))
    maker.main(["index", str(tmp_path), "--classes", str(tmp_path / "classes.txt")])
    shards = open_shards(tmp_path)
    assert (shards.num_classes, shards.class_names[7], shards.display_names[7]) == (8, "classes 7", "names 7")


GOOD = {
    "splits": {"train": {"filenames": ["train-0.tar", "train-1.tar"], "shard_lengths": [2, 1], "num_samples": 3}},
    "num_classes": 2,
    "class_names": ["cat", "dog"],
    "display_names": ["Cat", "Cat"],
}


def index_with(changed):
    """GOOD with other values at paths such as "splits.train.num_samples"; `...` takes the field out."""
    index = json.loads(json.dumps(GOOD))
    for path, value in changed.items():
        *above, field = path.split(".")
        place = functools.reduce(dict.__getitem__, above, index)
        place.pop(field, None)
        if value is not ...:
            place[field] = value
    return index


@pytest.fixture
def indexed(tmp_path):
    """A folder of two shards, and a function that writes its index: an object, or the bytes of the file."""
    for shard, keys in enumerate(("ab", "c")):
        write_tar(tmp_path / f"train-{shard}.tar", [(f"{k}.{e}", d) for k in keys for e, d in SAMPLE.items()])

    def write(index):
        data = index if isinstance(index, bytes) else json.dumps(index).encode()
        (tmp_path / "_info.json").write_bytes(data)
        return tmp_path

    return write


SAMPLE = {"jpg": picture(0), "cls": b"1"}
FILES, LENGTHS, SUM = "splits.train.filenames", "splits.train.shard_lengths", "splits.train.num_samples"


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"class_names": ["cat", ["dog"]]}, r"class_names\[1\] is \['dog'\]; it must be a name"),
        ({"class_names": ["cat", None]}, r"class_names\[1\] is missing; it must be a name"),
        ({"class_names": {"cat": 0}}, r"class_names is {'cat': 0}; it must be a list"),
        ({"class_names": "ab"}, "class_names is 'ab'; it must be a list"),
        ({"class_names": ["cat"]}, "class_names has 1 names for 2 classes"),
        ({"class_names": ["cat", "dog", "emu"]}, "class_names has 3 names for 2 classes"),
        ({"display_names": "CD"}, "display_names is 'CD'; it must be a list"),
        ({"display_names": ["Cat"]}, "display_names has 1 names for 2 classes"),
        ({"class_names": ..., "num_classes": ..., "display_names": [3, 4]}, r"display_names\[0\] is 3"),
        ({"num_classes": -1}, "num_classes is -1; it must be a whole number from 1"),
        ({"num_classes": 2.0}, "num_classes is 2.0; it must be a whole number"),
        ({"num_classes": True, "class_names": ["cat"], "display_names": ["Cat"]}, "num_classes is True; .* number"),
        ({"num_classes": 10**15}, "num_classes is 1000000000000000; it must be .* to 10,000,000"),
        ({LENGTHS: [4, -1]}, rf"{LENGTHS}\[1\] is -1; it must be a whole number from 0"),
        ({LENGTHS: [1.5, 1.5]}, rf"{LENGTHS}\[0\] is 1.5; it must be a whole number"),
        ({LENGTHS: [2, True]}, rf"{LENGTHS}\[1\] is True; it must be a whole number"),
        ({LENGTHS: [2, 10**30], SUM: 2 + 10**30}, rf"{LENGTHS}\[1\] .* from 0 to 1,000,000,000,000"),
        ({LENGTHS: 3}, f"{LENGTHS} is 3; it must be a list"),
        ({LENGTHS: [3]}, "splits.train has 2 filenames and 1 shard_lengths"),
        ({SUM: 4}, f"{SUM} is 4; it must be 3"),
        ({SUM: 3.0}, f"{SUM} is 3.0; it must be 3"),
        ({FILES: ["train-0.tar", 1]}, rf"{FILES}\[1\] is 1; it must be a name"),
        ({FILES: ["train-0.tar"] * 2}, f"{FILES} has 'train-0.tar' twice; name"),
        ({FILES: ...}, f"{FILES} is missing; it must be a list"),
        ({"splits.train.skipped": 3}, "splits.train.skipped is 3; it must be a list"),
        ({"splits.val": ["train-0.tar"]}, r"splits.val is \['train-0.tar'\]; it must be an object"),
        ({"splits": [1]}, r"splits is \[1\]; it must be an object"),
        ({"splits": ...}, "splits is missing; it must be an object"),
        ({"class_names": ["cat", ["x" * 10000] * 100]}, r"class_names\[1\] is .{,80}; it must be"),
        (b"[]", r"it is \[\]; it must be an object with splits"),
        (b'{"splits": {"train": {}, "val": {}, "train": {}}}', "an object has 'train' twice"),
        (b"", "it is not JSON in UTF-8: Expecting value"),
        (json.dumps(GOOD).encode()[:-30], "it is not JSON in UTF-8: "),
        (b"[" * 100000, "it is not JSON in UTF-8: maximum recursion"),
        (json.dumps(GOOD).replace("cat", "\xe9" * 5000).encode("latin-1"), "it is not JSON in UTF-8: .* byte 0xe9"),
    ],
)
def test_an_index_that_is_wrong_is_told_by_its_field_and_by_verify_as_well(indexed, changed, words):
    folder = indexed(changed if isinstance(changed, bytes) else index_with(changed))
    with pytest.raises(DataError, match=rf"_info\.json is not an index of shards \({words}") as raised:
        open_shards(folder)
    assert len(str(raised.value)) < 400 + len(str(folder)) * 2 and "\n" not in str(raised.value)
    with pytest.raises(DataError, match=re.escape(str(raised.value))):
        maker.main(["verify", str(folder)])


@pytest.mark.parametrize(
    "changed, classes",
    [
        ({}, 2),
        ({"num_classes": ..., "class_names": ..., "display_names": ...}, None),
        ({"num_classes": None, "class_names": None, "display_names": None}, None),
        ({"num_classes": ...}, 2),
        ({"num_classes": ..., "class_names": ...}, 2),
        ({SUM: ...}, 2),
        ({"splits.train.alt_label": "cls", "license": ["any"]}, 2),
        ({"class_names": ["crane", "crane"]}, 2),  # readable ones, as of ImageNet
    ],
)
def test_an_index_of_others_may_say_less_or_more(indexed, changed, classes):
    folder = indexed(b"\xef\xbb\xbf" + json.dumps(index_with(changed)).encode())  # as some editors begin a file
    shards = open_shards(folder)
    assert (shards.num_samples, shards.num_classes, shards.samples_per_shard) == (3, classes, [2, 1])
    assert maker.verify(folder) == []


def test_no_index_is_written_that_could_not_be_read(indexed):
    folder = indexed(GOOD)
    before = (folder / "_info.json").read_bytes()
    with pytest.raises(DataError, match="display_names has 3 names for 2 classes"):
        write_index(folder, {}, display_names=["a", "b", "c"])
    assert (folder / "_info.json").read_bytes() == before


def test_folders_without_an_index_or_samples(tmp_path):
    (tmp_path / "empty").mkdir()
    for command, words in ("verify", "has no index"), ("index", "holds no shards"):
        with pytest.raises(DataError, match="none is not a folder; check the path"):
            maker.main([command, str(tmp_path / "none")])
        with pytest.raises(DataError, match=f"empty {words}"):
            maker.main([command, str(tmp_path / "empty")])
    write_tar(tmp_path / "train-0.tar", [("no-ending", b"x")])
    with pytest.raises(DataError, match="has no index; `vision-longhorn shards index .*` writes it"):
        maker.main(["verify", str(tmp_path)])
    with pytest.raises(DataError, match="holds no shards with samples"):
        maker.main(["index", str(tmp_path)])
    (tmp_path / "_info.json").write_text('{"splits": {}}')
    assert maker.verify(tmp_path) == [f"the index of {tmp_path} names no shards"]


def test_names_alone_tell_the_number_of_classes(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("a.jpg", b"x"), ("a.cls", b"1")])
    (tmp_path / "names.txt").write_text("cat\tCat\ndog\tDog\n")
    with pytest.raises(DataError, match="if the data name their classes, a class, a tab"):
        maker.main(["index", str(tmp_path)])
    for names, message in (("Cat\n", "label 1, but only 1 classes"), ("Cat\nDog\nEmu\n", None)):
        (tmp_path / "names.txt").write_text(names)
        with pytest.raises(DataError, match=message) if message else contextlib.nullcontext():
            maker.main(["index", str(tmp_path)])
    shards = open_shards(tmp_path)
    assert (shards.num_classes, shards.class_names, shards.display_names) == (3, None, ["Cat", "Dog", "Emu"])
    (tmp_path / "names.txt").unlink()
    maker.main(["index", str(tmp_path)])  # counts anew, and forgets no names
    assert open_shards(tmp_path).display_names == ["Cat", "Dog", "Emu"]
    (tmp_path / "classes.txt").write_text("a\nb\n")
    maker.main(["index", str(tmp_path), "--classes", str(tmp_path / "classes.txt")])  # other classes: not theirs
    assert (open_shards(tmp_path).num_classes, open_shards(tmp_path).display_names) == (2, None)


@pytest.mark.parametrize("beside", ["a", "t/a", "./t/a"])
def test_what_systems_put_into_tars_is_no_sample(tmp_path, beside):
    folder, name = os.path.split(beside)
    names = [f"{name}.jpg", f"._{name}.jpg", ".DS_Store", f"{name}.cls", f"._{name}.cls", f".ck/{name}.jpg"]
    names += [f"__MACOSX/._{name}.jpg", f"PaxHeaders.12/{name}.jpg", "Thumbs.db"]
    write_tar(tmp_path / "0.tar", [(os.path.join(folder, name), name.encode()) for name in names])
    assert [
        {key: sample[key] for key in sample if key != "__url__"} for sample in read_shard(str(tmp_path / "0.tar"))
    ] == [{"__key__": beside, "jpg": b"a.jpg", "cls": b"a.cls"}]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_members_that_are_links_are_not_lost_in_silence(tmp_path, kind):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for name, linked in ("a.jpg", ""), ("a.cls", ""), ("b.jpg", "a.jpg"), ("b.cls", "a.cls"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = (kind, linked) if linked else (tarfile.REGTYPE, "")
            tar.addfile(info)
    with pytest.raises(DataError, match=f"shard {path} cannot be read .*b.jpg is a link, or no regular file; pack"):
        list(read_shard(str(path)))


def test_a_pipe_is_no_shard(tmp_path):
    os.mkfifo(tmp_path / "train-0.tar")
    with pytest.raises(DataError, match="train-0.tar cannot be read .*it is a pipe"):
        maker.main(["index", str(tmp_path)])


@pytest.mark.parametrize(
    "args",
    [
        ["index", "none"],
        ["verify", "none"],
        ["imagefolder", "none", "out"],
        ["frobnicate"],
        ["imagefolder", "src", "out", "--split", "my/split"],
    ],
)
def test_bad_command_ends_with_one_line(folder, tmp_path, args, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        run_cli(lambda: maker.main(args))
    message = capsys.readouterr().err
    assert raised.value.code == 1 and message.startswith("error: ") and message.count("\n") == 1
