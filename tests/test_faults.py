"""What happens to training when data is bad: counted, named, skipped within a budget, then a clear stop.

Evaluation skips nothing, which test_loader.py sees to.
"""

import functools
import http.server
import logging
import os
import signal
import threading
import time

import psutil
import pytest
import torch
from test_loader import members, noisy_number_of, number_of, numbered, numbers, write_index, write_shards, write_tar

from vision_longhorn.data import DataError, device_batches, eval_loader, open_shards, tars, train_loader


def spoiled(folder, spoil, lengths=(16, 16, 16, 16), indexed=False):
    """Shards in which `spoil` maps the number of a sample to the members that are to be otherwise (None: left out)."""
    shards = write_shards(folder, lengths, indexed=indexed)
    for shard, url in enumerate(shards.urls):
        numbers_here = range(sum(lengths[:shard]), sum(lengths[: shard + 1]))
        files = dict(members(numbers_here))
        for number in set(spoil) & set(numbers_here):
            for extension, data in spoil[number].items():
                files[f"s{number:04d}.{extension}"] = data
        write_tar(url, [(name, data) for name, data in files.items() if data is not None])
    return shards


def loader_of(shards, workers=0, **options):
    return train_loader(
        shards,
        options.pop("transform", number_of),
        **{"batch_size": 4, "num_workers": workers, "max_bad_samples": 10, **options},
    )


BAD = {5: {"jpg": numbered(5)[:200]}, 20: {"jpg": b"text"}, 33: {"cls": None}, 34: {"jpg": None}, 50: {"cls": b"cat"}}
MESSAGES = {
    5: "not a readable image",
    20: "not a readable image (none of",
    33: "no label",
    34: "no image",
    50: "label b'cat' is not a number",
}


@pytest.mark.parametrize("workers, repeats", [(0, 1), (2, 1), (2, 3)])
def test_bad_samples_are_skipped_counted_and_named(tmp_path, workers, repeats, caplog):
    shards = spoiled(tmp_path / "s", BAD)
    loader = loader_of(shards, workers, repeats=repeats)
    seen, skipped = [], []
    with caplog.at_level(logging.WARNING):
        for epoch in range(repeats):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert len(batches) == len(loader) == 16 and all(len(targets) == 4 for _, targets in batches)
            seen += numbers(batches)
            skipped += loader.skipped
            assert loader.num_skipped == len(loader.skipped)
    assert not set(seen) & set(BAD)
    if repeats == 1:
        assert len(set(seen)) == 64 - len(BAD), "no good sample may be lost by a bad one"
    for number, message in MESSAGES.items():
        shard = shards.urls[number // 16]
        found = [text for text, count in skipped if f"sample s{number:04d}" in text]
        assert len(found) == 1 or repeats > 1 and found, number  # shares are uneven: it may come in two epochs
        assert found[0].startswith(f"shard {shard}, sample s{number:04d}: {message}")
        assert found[0] in caplog.text
    assert "at most 10 an epoch" in caplog.text


def test_every_rank_has_its_batches_whatever_is_bad(tmp_path):
    shards = spoiled(tmp_path / "s", BAD)
    for rank in range(3):
        loader = loader_of(shards, 0, rank=rank, world_size=3)
        assert len(list(loader)) == len(loader) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_budget_then_a_clear_stop(tmp_path, workers):
    shards = spoiled(tmp_path / "s", BAD)
    assert list(loader_of(shards, workers, max_bad_samples=5))
    loader = loader_of(shards, workers, max_bad_samples=4)
    with pytest.raises(
        DataError,
        match=r"^5 samples cannot be used, and max_bad_samples allows 4 in an epoch; the "
        r"last: shard \S+\.tar, sample s00\d\d: [^\n]+$",
    ):
        list(loader)
    with pytest.raises(DataError, match=r"^shard \S+\.tar, sample s00\d\d: [^\n]+$"):
        list(loader_of(shards, workers, max_bad_samples=0))
    assert list(loader_of(shards, workers, max_bad_samples=0.08)), "0.08 * 64 samples are 5"
    with pytest.raises(DataError, match="max_bad_samples allows 4"):
        list(loader_of(shards, workers, max_bad_samples=0.06))
    with pytest.raises(DataError, match="max_bad_samples=-1; it must be at least 0"):
        loader_of(shards, max_bad_samples=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_bad_samples_ends_soon(tmp_path, workers):
    shards = spoiled(tmp_path / "s", {number: {"jpg": b"text"} for number in range(64)})
    with pytest.raises(DataError, match="11 samples cannot be used"):
        list(loader_of(shards, workers))


def cut(url, share=0.6):
    data = open(url, "rb").read()
    with open(url, "wb") as file:
        file.write(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "workers, fault, message",
    [
        (0, cut, r"cannot be read after sample s00\d\d \(unexpected end of data\)"),
        (2, cut, r"cannot be read after sample s00\d\d \(unexpected end of data\)"),
        (1, os.remove, "cannot be read from its start"),
    ],
)
def test_shard_that_is_cut_or_gone(tmp_path, workers, fault, message):
    for indexed in (True, False):
        shards = write_shards(tmp_path / f"s{indexed}", [16] * 4, indexed=indexed)
        fault(shards.urls[2])
        loader = loader_of(shards, workers, max_bad_samples=40)
        batches = list(loader)
        assert len(batches) == 16 and all(len(targets) == 4 for _, targets in batches)
        seen = set(numbers(batches))
        assert seen >= {number for number in range(64) if number // 16 != 2}
        assert all(text.startswith(f"shard {shards.urls[2]} ") for text, _ in loader.skipped)
        with pytest.raises(DataError, match=message):
            list(loader_of(shards, workers, max_bad_samples=0))
        if indexed and workers < 2:  # every sample that is lost is counted; an epoch may look for it twice
            assert loader.num_skipped >= 64 - len(seen) > 0
        if indexed and fault is os.remove:
            with pytest.raises(DataError, match="samples cannot be used, and max_bad_samples allows 5"):
                list(loader_of(shards, workers, max_bad_samples=5))


def test_lost_samples_are_counted_once_over_all_workers(tmp_path):
    shards = write_shards(tmp_path / "s", [16] * 4, indexed=True)
    os.remove(shards.urls[1])
    lost = 0
    for rank in range(2):
        for worker in range(2):
            stream = loader_of(shards, rank=rank, world_size=2, max_bad_samples=64).stream
            line = 64 << 32
            share = rank * 2 + worker
            assert len(list(stream.samples(range(4), line * share // 4, line * (share + 1) // 4))) < 17
            lost += stream.faults.count
    assert lost == 16


def test_shard_with_another_number_of_samples_than_its_index_says(tmp_path):
    shards = write_shards(tmp_path / "s", [16] * 4, indexed=True)
    write_index(tmp_path / "s", {"train": {f"train-{n:06d}.tar": 16 + 2 * (n == 3) for n in range(4)}})
    shards = open_shards(tmp_path / "s", num_classes=5)
    loader = loader_of(shards)
    assert len(list(loader)) == 66 // 4
    assert any("has 16 samples where the index says 18" in text for text, _ in loader.skipped)


def test_shard_that_a_server_does_not_give(tmp_path):
    write_shards(tmp_path / "s", [16] * 2)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=os.fspath(tmp_path / "s"))
    handler.func.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/train-{{000000..000001}}.tar"
        shards = open_shards(url, num_samples=32, num_classes=5)
        (tmp_path / "s" / "train-000001.tar").unlink()
        loader = loader_of(shards)
        batches = list(loader)
        assert len(batches) == 8 and set(numbers(batches)) == set(range(16))
        assert (
            all(
                "train-000001.tar cannot be read from its start (HTTP Error 404" in text or "404" in text
                for text, _ in loader.skipped
            )
            and loader.skipped
        )
        server.shutdown()
    with pytest.raises(DataError, match=r"allows 10 .* the last: shard http\S+ cannot be read from its start"):
        list(loader_of(shards))  # nobody answers any more


def kill_a_worker(loader, number):
    time.sleep(0.1)  # so that it waits for work, and holds none of the locks that torch's workers share
    os.kill(loader.pipeline[0]._iterator._workers[number].pid, signal.SIGKILL)


def test_worker_that_dies_is_replaced_and_nothing_changes(tmp_path):
    shards = spoiled(tmp_path / "s", {5: {"jpg": b"text"}})
    options = {"transform": noisy_number_of, "seed": 3}
    wanted = [images for images, _ in loader_of(shards, 2, **options)]
    loader = loader_of(shards, 2, **options)
    got = []
    for number, (images, _) in enumerate(loader):
        got.append(images)
        if number == 5:
            kill_a_worker(loader, 1)
    assert len(got) == 16 and all(torch.equal(*pair) for pair in zip(wanted, got, strict=True))
    deaths = [text for text, _ in loader.skipped if "a process that loads data died" in text]
    assert len(deaths) == 1 and "sample s0005" in str(loader.skipped)
    again = [images for images, _ in loader]  # the next pass is a whole one
    assert all(torch.equal(*pair) for pair in zip(wanted, again, strict=True))


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_worker_that_dies_ends_the_run_where_nothing_may_be_skipped(tmp_path, kind):
    shards = write_shards(tmp_path / "s", [16] * 4)
    loader = loader_of(shards, 2, max_bad_samples=0)
    if kind == "evaluation":
        loader = eval_loader(shards, number_of, batch_size=2, num_workers=2)
    with pytest.raises(DataError, match=r"^a process that loads data died, perhaps because memory ran out \([^\n]+\)$"):
        for _ in loader:
            kill_a_worker(loader, 0)


@pytest.mark.parametrize("workers, repeats", [(0, 1), (2, 3)])
def test_going_on_within_an_epoch_gives_the_same_batches_beside_bad_samples(tmp_path, workers, repeats):
    shards = spoiled(tmp_path / "s", BAD)
    cut(shards.urls[3], 0.7)
    loader = loader_of(shards, workers, repeats=repeats, transform=noisy_number_of, max_bad_samples=30)
    whole = [images for images, _ in loader]
    for start in (1, 6, 11, 15):
        loader.set_epoch(0, start)
        rest = [images for images, _ in loader]
        assert all(torch.equal(*pair) for pair in zip(whole[start:], rest, strict=True))


@pytest.mark.parametrize(
    "name", ["/etc/other.tar", "../other.tar", "sub/../../other.tar", "http://127.0.0.1/other.tar", "pipe:touch ran"]
)
def test_index_cannot_point_elsewhere(tmp_path, name):
    write_shards(tmp_path / "s", [4])
    write_index(tmp_path / "s", {"train": {name: 4}})
    for allow_pipe in False, True:
        with pytest.raises(DataError, match="is not an index of shards .*outside of its folder"):
            open_shards(tmp_path / "s", allow_pipe=allow_pipe)


def printed(tmp_path, fault, lengths=(16, 16, 16, 16)):
    """Shards printed by a command that does `fault` for the third of them, in whose place "$1" is its path."""
    write_shards(tmp_path / "s", lengths)
    (tmp_path / "print").write_text(f"case $1 in *2.tar) {fault};; *) cat $1;; esac\n")
    return open_shards(
        f"pipe:sh {tmp_path}/print {tmp_path}/s/train-{{000000..{len(lengths) - 1:06d}}}.tar",
        num_samples=sum(lengths),
        num_classes=5,
        allow_pipe=True,
    )


@pytest.mark.parametrize(
    "fault, message",
    [
        ("cat $1; exit 3", r"after sample s00\d\d \(its command ended with exit code 3\)"),
        ("head -c 9000 $1; exit 3", r"after sample s00\d\d \(its command ended with exit code 3\)"),
        ("head -c 9000 $1", r"after sample s00\d\d \(unexpected end of data\)"),
        ("head -c 9000 $1; kill -9 $$", r"after sample s00\d\d \(its command ended with (signal 9|exit code 137)\)"),
        ("exit 3", r"from its start \(its command ended with exit code 3\)"),
        ("no-such-command 2> /dev/null", r"from its start \(its command ended with exit code 127\)"),
        ("yes", "from its start"),  # no tar, and no end
    ],
)
def test_command_that_fails(tmp_path, fault, message):
    shards, workers = printed(tmp_path, fault), 2 if fault in ("cat $1; exit 3", "yes") else 0
    with pytest.raises(DataError, match=rf"^shard pipe:sh \S+ \S+2\.tar cannot be read {message}"):
        list(loader_of(shards, workers, max_bad_samples=0))
    with pytest.raises(DataError, match=message):
        list(eval_loader(shards, number_of, batch_size=4, num_workers=workers))
    loader = loader_of(shards, workers, max_bad_samples=40)
    batches = list(loader)
    assert len(batches) == 16 and all(len(targets) == 4 for _, targets in batches)
    assert set(numbers(batches)) >= {number for number in range(64) if number // 16 != 2}
    assert loader.skipped and all("2.tar cannot be read" in text for text, _ in loader.skipped)


def sleepers(seconds):
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_command_goes_on_when_reading_stops_early(tmp_path, workers, monkeypatch):
    """One that would write is told by the closed pipe, others have to be ended. A worker may be waiting for it."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # torch gives the worker so long
    seconds = f"600.{os.getpid()}{workers}"  # a name to find it by
    shards = printed(tmp_path, f"head -c 30000 $1; sleep {seconds}; cat $1", (0, 0, 32))
    loader = loader_of(shards, workers, shuffle_buffer=1)
    batches = iter(loader)
    next(batches)
    for _ in range(100):
        if sleepers(seconds):  # what was printed before may be read before the command sleeps
            break
        time.sleep(0.05)
    assert len(sleepers(seconds)) == 1
    batches.close()
    del batches, loader
    gone, alive = psutil.wait_procs(sleepers(seconds), 5)
    assert not alive


def test_a_command_that_goes_on_after_its_output_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "_SECONDS", 0.2)
    seconds = f"600.{os.getpid()}9"
    with (
        pytest.raises(OSError, match="goes on after its output has ended"),
        tars._output_of(f"echo; exec >&-; sleep {seconds}; true") as stream,
    ):
        assert stream.read() == b"\n"
    gone, alive = psutil.wait_procs(sleepers(seconds), 5)
    assert not alive


@pytest.mark.parametrize("workers, repeats", [(0, 1), (0, 3), (2, 3)])
def test_places_of_a_batch_are_those_of_its_samples_also_when_it_is_made_again(tmp_path, workers, repeats):
    """Beside bad samples and a shard that is cut, in a pass that began within its epoch, and for one batch alone."""
    shards = spoiled(tmp_path / "s", BAD)
    cut(shards.urls[3], 0.7)
    for rank in range(2):
        options = {"repeats": repeats, "rank": rank, "world_size": 2, "batch_size": 6, "max_bad_samples": 30}
        loader, again = (loader_of(shards, workers, keys=True, **options) for _ in range(2))
        for epoch, start in (0, 0), (4, 2):
            loader.set_epoch(epoch, start)
            for number, (images, targets, places) in enumerate(device_batches(loader, "cpu"), start):
                delivered = numbers([(images, targets)])
                assert places == [(shards.urls[n // 16], f"s{n:04d}") for n in delivered], (epoch, number)
                if number == 3:
                    again.set_epoch(epoch, number)
                    assert next(iter(again))[2] == places


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_left_does_not_shift_the_next(tmp_path, workers):
    loader = loader_of(write_shards(tmp_path / "s", [16] * 4), workers)
    loader.set_epoch(1)
    wanted = numbers(loader)
    loader.set_epoch(0, 5)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(1)
    batches = iter(loader)  # the other one goes only now
    assert numbers(batches) == wanted
