"""Ways to start the tools, several processes, threads, and what happens to a run's checkpoints."""

import functools
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.fuzz.case import MODULES, PYTHON, Case, Expect, Place, require, snapshot, words_of
from tests.fuzz.kinds.common import evaluate, is_png, link, predict, same_evaluation, same_predictions, train
from tests.fuzz.material import EVAL, digest_of
from tests.fuzz.process import Result
from vision_longhorn.command_line import commands

Words = Sequence[str | Path]
ROOT = Path(__file__).parents[3]


def cases() -> Iterator[Case]:
    yield from _modules()
    yield from _launchers()
    yield from _clocks()
    yield from _second_mains()
    yield from _ranks()


def _modules() -> Iterator[Case]:
    """`python -m vision_longhorn.TOOL` is the tool. Most are run as modules in the forked process, a few as a user
    starts them."""

    def as_module(module: str, words: Callable[[Place], Words]) -> Callable[[Place], Callable[[], None]]:
        def made(place: Place) -> Callable[[], None]:
            line = words_of(words(place))

            def function() -> None:
                sys.argv = ["-m", *line]
                sys.orig_argv = [sys.executable, "-m", module, *line]
                loaded = sys.modules.pop(module, None)  # which runpy warns of
                try:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
                finally:
                    if loaded is not None:
                        sys.modules[module] = loaded

            return function

        return made

    def as_script(name: str, words: Callable[[Place], Words]) -> Callable[[Place], Callable[[], None]]:
        def made(place: Place) -> Callable[[], None]:
            sys_argv = [str(ROOT / name), *words_of(words(place))]

            def function() -> None:
                sys.argv = sys_argv
                runpy.run_path(sys_argv[0], run_name="__main__")

            return function

        return made

    modules = {**MODULES, "lab": "lab"}
    for word, module in modules.items():
        expect = Expect(0, says=(rf"usage: \S*(python -m {module}|vision-longhorn {word}|{word})",))
        yield Case(f"modules/{word}-help", word, as_module(module, lambda place: ["--help"]), expect)
        expect = Expect(1, fails=("--nosuch-option|required|nosuch|invalid choice",))
        yield Case(f"modules/{word}-wrong", word, as_module(module, lambda place: ["--nosuch-option", "x"]), expect)
    for word in commands.COMMANDS:
        make = as_module("vision_longhorn", lambda place, word=word: [word, "--help"])
        yield Case(f"modules/package-{word}-help", word, make, Expect(0, says=("usage: ",)))
    real: dict[str, tuple[Callable[[Place], Words], Any]] = {
        "train": (train, lambda place, result: require((place / "new/last.pt").is_file(), "nothing was trained")),
        "eval": (lambda place: evaluate(place, place.material / "run"), same_evaluation),
        "predict": (lambda place: predict(place, place.material / "run"), same_predictions),
        "shards": (
            lambda place: ["imagefolder", place.material / "pictures", "out"],
            lambda place, result: place.json("out/_info.json"),
        ),
        "curves": (
            lambda place: [place.material / "run", "--out", "c.png"],
            lambda place, result: require(is_png(place / "c.png"), "no picture"),
        ),
        "hub": (
            lambda place: [place.material / "run", "folder"],
            lambda place, result: place.json("folder/config.json"),
        ),
        "export": (
            lambda place: [place.material / "run", "folder/"],
            lambda place, result: place.json("folder/config.json"),
        ),
        "maps": (
            lambda place: [place.material / "run", place.material / "photos/photo0.jpg", "--out", "m.png"],
            lambda place, result: require(is_png(place / "m.png"), "no picture"),
        ),
        "lab": (
            lambda place: ["--list"],
            lambda place, result: require("mixers" in result.out, "no study is listed"),
        ),
    }
    for word, (words, check) in real.items():
        yield Case(f"modules/{word}-works", word, as_module(modules[word], words), Expect(0, check=check))
    for script, word in (("train_imagenet.py", "train"), ("eval.py", "eval")):
        words, check = real[word]
        yield Case(f"modules/script-{word}", word, as_script(script, words), Expect(0, check=check))
    for module in ("lab.recall", "lab.hits"):
        make = as_module(module, lambda place: ["--help"])
        yield Case(f"modules/{module.rpartition('.')[2]}-help", "lab", make, Expect(0, says=("usage: ",)))

    def started(*command: str, words: Callable[[Place], Words]) -> Callable[[Place], Callable[[], None]]:
        def made(place: Place) -> Callable[[], None]:
            line = [*command, *words_of(words(place))]
            return lambda: sys.exit(
                subprocess.run([sys.executable, *line], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
            )

        return made

    launch = (
        "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--cpu",
    )  # fmt: skip
    for name, command, word in (
        ("python-train", ("-m", "vision_longhorn.train"), "train"),
        ("python-eval", ("-m", "vision_longhorn.eval"), "eval"),
        ("accelerate-train", (*launch, "-m", "vision_longhorn.train"), "train"),
        ("accelerate-package-train", (*launch, "-m", "vision_longhorn", "train"), "train"),
    ):
        words, check = real[word]
        yield Case(f"modules/{name}", word, started(*command, words=words), Expect(0, check=check), limit=150)


# --------------------------------------------------------------------------------------------------- several processes


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def launched(
    word: str, words: Words, count: int = 2, kill: int | None = None, agent: bool = True
) -> Callable[[], None]:
    """Acts as a launcher: starts the processes, and ends the others where one has failed.

    Args:
        kill: A process that is killed after a second.
        agent: Whether the launcher holds the processes' common store, as torchrun and accelerate do. With srun and
            mpirun the first process does, and takes it away with it.
    """
    line = words_of(words)

    def function() -> None:
        port = _free_port()
        os.environ.update(
            WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE=str(agent),
        )  # fmt: skip
        children = {}
        for rank in range(count):
            pid = os.fork()
            if not pid:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                code = 0
                try:
                    commands.run(word, line)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                sys.stdout.flush()
                os._exit(code)
            children[pid] = rank
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
        if kill is not None:
            time.sleep(1)
            os.kill(next(pid for pid, rank in children.items() if rank == kill), signal.SIGKILL)
        worst = 0
        while children:
            pid, status = os.wait()
            children.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if code and not worst:
                worst = 1
                time.sleep(0.5)  # as long as a launcher may take to see it
                for other in children:
                    os.kill(other, signal.SIGTERM)
        del store
        sys.exit(worst)

    return function


def _ranks() -> Iterator[Case]:
    """Where one of two processes fails, the error is told once, and not a page of the others'."""

    def bad_label(place: Place) -> None:
        import io
        import tarfile

        path = place.copy("shards") / "train-000002.tar"
        with tarfile.open(path) as tar:
            members = [(member.name, tar.extractfile(member).read()) for member in tar]
        with tarfile.open(path, "w") as tar:
            for number, (name, data) in enumerate(members):
                data = b"77" if name.endswith(".cls") and number < 5 else data
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    def cut_shard(place: Place) -> None:
        path = place.copy("shards") / f"train-00000{place.rng.randrange(3)}.tar"
        path.write_bytes(path.read_bytes()[: place.rng.randrange(600, 6000)])

    def cut_val(place: Place) -> None:
        path = place.copy("shards") / "val-000001.tar"
        path.write_bytes(path.read_bytes()[:1200])

    faults: dict[str, tuple[Callable[[Place], Any], Words]] = {
        "no-data": (lambda place: None, ["--data", "nosuch"]),
        "bad-label": (bad_label, []),
        "cut-shard": (cut_shard, []),
        "cut-shard-again": (cut_shard, []),
        "cut-val": (cut_val, []),
        "wrong-model": (lambda place: None, ["--model", "nosuch"]),
        "wrong-opt": (lambda place: None, ["--opt", "nosuch"]),
        "no-init": (lambda place: None, ["--init", "nosuch.pt"]),
        "large-batch": (lambda place: None, ["--batch-size", "64"]),
        "unreadable-folder": (lambda place: (place / "new").write_text("x"), []),
        "classes": (lambda place: None, ["--num-classes", "2"]),
        "cuda": (lambda place: None, ["--device", "cuda"]),
    }

    def made(place: Place, prepare: Callable[[Place], Any], more: Words, agent: bool = True) -> Callable[[], None]:
        prepare(place)
        return launched("train", train(place, *more), agent=agent)

    def one_error(place: Place, result: Result) -> None:
        errors = {line for line in result.err.splitlines() if line.startswith("error: ")}
        require(errors, "no error is told")

    for name, (prepare, more) in faults.items():
        # Both may have found it, each with its own line.
        expect = Expect(
            1, never=("(?i)gloo", "terminate called", "Connection (closed|reset)"), after=one_error, leaves=("new/*",)
        )
        make = functools.partial(made, prepare=prepare, more=more)
        yield Case(f"ranks/train-{name}", "train", _judged_as_one(make), expect, limit=60)
        if name in ("bad-label", "wrong-model"):
            make = functools.partial(made, prepare=prepare, more=more, agent=False)
            yield Case(f"ranks/train-{name}-without-agent", "train", _judged_as_one(make), expect, limit=60)

    def killed(place: Place, rank: int) -> Callable[[], None]:
        return launched("train", train(place, "--epochs", "400"), kill=rank)

    for rank in (0, 1):
        expect = Expect(1, never=("Traceback", "terminate called"), leaves=("new/*",), lines=8)
        yield Case(
            f"ranks/train-killed-{rank}", "train", _judged_as_one(functools.partial(killed, rank=rank), True), expect
        )

    def evaluated(place: Place) -> Callable[[], None]:
        return launched("eval", evaluate(place, place.material / "run", "--data", "nosuch"))

    yield Case("ranks/eval-no-data", "eval", _judged_as_one(evaluated), Expect(1, never=("(?i)gloo",)))


def _judged_as_one(
    make: Callable[[Place], Callable[[], None]], killed: bool = False
) -> Callable[[Place], Callable[[], None]]:
    """The same, where what several processes say alike is told once. A run whose process was killed says nothing of
    that itself."""

    def made(place: Place) -> Callable[[], None]:
        function = make(place)

        def merged() -> None:
            pid = os.fork()
            if not pid:
                os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
                code = 0
                try:
                    function()
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            lines = Path("stderr.txt").read_text().splitlines()
            os.unlink("stderr.txt")
            for line in dict.fromkeys(line for line in lines if not line.startswith("error: ")):
                print(line, file=sys.stderr)
            errors = list(dict.fromkeys(line for line in lines if line.startswith("error: ")))
            for line in errors[:1] or ["error: a process was killed"] * killed:
                print(line, file=sys.stderr)
            sys.exit(code)

        return merged

    return made


def _launchers() -> Iterator[Case]:
    """Settings of accelerate's environment and launcher: the same weights as without them, or a word about it."""
    settings: dict[str, dict[str, str]] = {
        "accumulation": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
        "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
        "fp8": {"ACCELERATE_MIXED_PRECISION": "fp8"},
        "no-precision": {"ACCELERATE_MIXED_PRECISION": "no"},
        "dynamo": {"ACCELERATE_DYNAMO_BACKEND": "EAGER"},
        "fsdp": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
        "deepspeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
        "megatron": {"ACCELERATE_USE_MEGATRON_LM": "true"},
        "parallelism": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
        "cpu": {"ACCELERATE_USE_CPU": "true"},
        "debug": {"ACCELERATE_DEBUG_MODE": "true"},
        "device": {"ACCELERATE_TORCH_DEVICE": "cpu"},
        "project": {"ACCELERATE_PROJECT_DIR": "elsewhere"},
        "nonsense": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"},
        "accumulation-one": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
    }
    quiet = {"no-precision", "cpu", "debug", "project", "accumulation-one"}

    def made(place: Place, environment: dict[str, str], several: bool) -> Words | Callable[[], None]:
        place.environment.update(environment)
        place.notes["several"] = several
        words = train(place, "--init", place.copy("run/best.pt", "run/best.pt").relative_to(place.folder))
        return launched("train", words) if several else words

    def same_or_said(place: Place, result: Result, names: Sequence[str]) -> None:
        words = r"(?i)note.*(accumulat|precision|dynamo|compile|fsdp|deepspeed|megatron|launcher|accelerate|parallel)"
        import re

        said = bool(re.search(words, result.said))
        if place.notes["several"]:
            reference = place.notes.get("reference") or _two_processes(place)
            same = digest_of(place / "new" / "last.pt") == reference
        else:
            same = digest_of(place / "new" / "last.pt") == place.json("/starts-from.json")
        require(same or said, "the weights are others than without the setting, and nothing says why")

    for name, environment in settings.items():
        expect = Expect(
            0 if name in quiet else None,
            check=functools.partial(same_or_said, names=list(environment)),
            leaves=("new/*",),
        )
        make = functools.partial(made, environment=environment, several=False)
        yield Case(f"launcher/train-{name}", "train", make, expect)
        if name in ("accumulation", "bf16", "fsdp", "dynamo"):
            make = functools.partial(made, environment=environment, several=True)
            expect = Expect(
                None, check=functools.partial(same_or_said, names=list(environment)), leaves=("new/*",), lines=12
            )
            yield Case(f"launcher/train-{name}-two", "train", _judged_as_one(make), expect, limit=90)
    for name in ("bf16", "accumulation", "dynamo", "fp8", "cpu"):

        def evaluated(place: Place, name: str = name) -> Words:
            place.environment.update(settings[name])
            return evaluate(place, place.material / "run")

        def same_or_noted(place: Place, result: Result) -> None:
            if "ote" not in result.said:
                same_evaluation(place, result)

        yield Case(f"launcher/eval-{name}", "eval", evaluated, Expect(check=same_or_noted))


def _two_processes(place: Place) -> str:
    """A digest of the weights that two processes train without any setting."""
    from tests.fuzz.process import forked

    for stray in ("new",):
        (place / stray).rename(place / f"{stray}-with")
    words = train(place, "--init", "run/best.pt")
    result = forked(launched("train", words), place.folder, 120)
    require(result.code == 0, f"two processes fail without any setting:\n{result.said}")
    found = digest_of(place / "new" / "last.pt")
    shutil.rmtree(place / "new")
    (place / "new-with").rename(place / "new")
    return found


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _clocks() -> Iterator[Case]:
    """Checkpoints are kept by their updates, whatever the clock says; those beyond where a run goes back to stay."""

    def scattered(run: Path, rng: random.Random) -> None:
        """Times of files as a clock that jumps would have left them."""
        now = time.time()
        for path in sorted(run.glob("*.pt")):
            moment = now + rng.choice((-1e8, -1e4, 0, 1e4, 1e8, 3e8)) * rng.random()
            os.utime(path, (moment, moment))

    def goes_on(place: Place, keep: int) -> Words:
        link(place, "shards")
        run = place.copy("begun")
        scattered(run, place.rng)
        place.notes["keep"] = keep
        return ["--resume", "begun", "--keep-checkpoints", str(keep)]

    def kept(place: Place, result: Result) -> None:
        run = place / "begun"
        left = sorted(run.glob("update-*.pt"))
        require(left and left[-1].name == "update-0000006.pt", f"the newest checkpoint is {left and left[-1].name}")
        require(len(left) <= max(place.notes["keep"], 1), f"{len(left)} checkpoints are left of {place.notes['keep']}")
        require(digest_of(run / "last.pt") == digest_of(left[-1]), "last.pt is not the newest checkpoint")
        require(digest_of(run / "last.pt") == place.json("/goes-on.json"), "it went on to something else")

    for number in range(8):
        make = functools.partial(goes_on, keep=1 + number % 4)
        yield Case(f"clock/goes-on-{number}", "train", make, Expect(0, own=("begun/*",), check=kept))

    def goes_back(place: Place, keep: int) -> Words:
        link(place, "shards")
        run = place.copy("run")
        if place.rng.random() < 0.7:
            scattered(run, place.rng)
        earlier = place.rng.choice((2, 3, 4))
        place.notes.update(before=snapshot(run), earlier=earlier, keep=keep)
        return ["--resume", f"run/update-000000{earlier}.pt", "--keep-checkpoints", str(keep)]

    def nothing_lost(place: Place, result: Result) -> None:
        run, before = place / "run", place.notes["before"]
        now = set(snapshot(run).values())
        for path, digest in before.items():
            if path.startswith("update-") and int(path[7:14]) > place.notes["earlier"]:
                # A run that goes on to the same bits may write the same file anew.
                require(digest in now, f"{path}, which lies after the update that the run went back to, is gone")
        left = sorted(run.glob("update-*.pt"))
        require(left[-1].name == "update-0000006.pt", f"the newest checkpoint is {left[-1].name}")
        require(digest_of(run / "last.pt") == digest_of(left[-1]), "last.pt is not the newest checkpoint")

    for number in range(10):
        make = functools.partial(goes_back, keep=1 + number % 3)
        yield Case(f"clock/goes-back-{number}", "train", make, Expect(0, own=("run/*",), check=nothing_lost))

    def stopped_back(place: Place) -> Callable[[], None]:
        """Goes back, and is stopped at once: what lay after it is there still."""
        link(place, "shards")
        run = place.copy("run")
        scattered(run, place.rng)
        place.notes.update(before=snapshot(run), earlier=2, keep=1)

        def function() -> None:
            timer = threading.Timer(place.rng.uniform(0.3, 1.5), lambda: os.kill(os.getpid(), signal.SIGTERM))
            timer.daemon = True
            timer.start()
            commands.run("train", ["--resume", "run/update-0000002.pt", "--keep-checkpoints", "1"])

        return function

    def still_there(place: Place, result: Result) -> None:
        now = set(snapshot(place / "run").values())
        for path, digest in place.notes["before"].items():
            if path.startswith("update-") and int(path[7:14]) > 2:
                require(digest in now, f"{path} is gone")

    for number in range(3):
        # It may have come to its end before the signal, or be ended by it before it can take it.
        yield Case(
            f"clock/stopped-{number}",
            PYTHON,
            _codes(stopped_back, (0, 143, -15)),
            Expect(None, own=("run/*",), after=still_there),
        )


def _codes(make: Callable[[Place], Callable[[], None]], fine: Sequence[int]) -> Callable[[Place], Callable[[], None]]:
    """The same, with an exit code of 0 where it ends with one of `fine`."""

    def made(place: Place) -> Callable[[], None]:
        function = make(place)

        def mild() -> None:
            pid = os.fork()
            if not pid:
                code = 0
                try:
                    function()
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            sys.exit(0 if code in fine else code)

        return mild

    return made


# ---------------------------------------------------------------------------------------------------------- one process


def _second_mains() -> Iterator[Case]:
    """Several calls of the tools' main() in one process, with other precisions, and in threads."""

    def lines(place: Place) -> dict[str, list[str]]:
        run = place.material / "run"
        return {
            "train": words_of(train(place)),
            "train-bf16": words_of([*train(place, run="bf16"), "--precision", "bf16"]),
            "train-again": words_of(train(place, run="again")),
            "eval": words_of(evaluate(place, run)),
            "eval-bf16": words_of(
                [run, *EVAL, "--data", place.material / "shards", "--precision", "bf16", "--out", "bf16.json"]
            ),
            "predict": words_of([run, place.material / "photos", "--workers", "0", "--out", "p.csv"]),
            "predict-bf16": words_of(
                [run, place.material / "photos", "--workers", "0", "--precision", "bf16", "--out", "q.csv"]
            ),
            "shards": words_of(["imagefolder", place.material / "pictures", "out"]),
            "maps": words_of([run, place.material / "photos/photo0.jpg", "--out", "m.png"]),
            "curves": words_of([run, "--out", "c.png"]),
            "hub": words_of([run, "folder"]),
            "lab": ["--list"],
        }

    def call(word: str, line: list[str]) -> None:
        import_module(MODULES[word.partition("-")[0]]).main(line)

    def one_after_the_other(place: Place, words: Sequence[str]) -> Callable[[], None]:
        known = lines(place)

        def function() -> None:
            for word in words:
                call(word, known[word])

        return function

    def in_thread(place: Place, words: Sequence[str]) -> Callable[[], None]:
        known = lines(place)

        def function() -> None:
            faults: list[BaseException] = []

            def work() -> None:
                try:
                    for word in words:
                        call(word, known[word])
                except BaseException as error:
                    faults.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            if faults:
                raise faults[0]

        return function

    made_by = {
        "train": "new/last.pt", "train-bf16": "bf16/last.pt", "train-again": "again/last.pt", "eval": "eval.json",
        "eval-bf16": "bf16.json", "predict": "p.csv", "predict-bf16": "q.csv", "shards": "out/_info.json",
        "maps": "m.png", "curves": "c.png", "hub": "folder/config.json",
    }  # fmt: skip

    def check(place: Place, result: Result, words: Sequence[str]) -> None:
        for word in words:
            if word in made_by:
                require((place / made_by[word]).exists(), f"{word} has left no {made_by[word]}")
        if "train-again" in words and "train" in words:
            same = digest_of(place / "new/last.pt") == digest_of(place / "again/last.pt")
            require(same, "the same run in the same process has other weights")
        if {"train-bf16", "train"} <= set(words):
            same = digest_of(place / "new/last.pt") == digest_of(place / "bf16/last.pt")
            require(not same, "bf16 has the weights of fp32")
        if "eval" in words:
            same_evaluation(place, result)

    pairs = (
        ("train", "train-bf16"), ("train-bf16", "train"), ("train", "train-again"), ("train", "eval"),
        ("eval", "eval-bf16"), ("eval-bf16", "eval"), ("predict", "predict-bf16"), ("predict-bf16", "eval"),
        ("train-bf16", "eval"), ("eval-bf16", "train"), ("shards", "maps", "curves", "hub"),
        ("predict-bf16", "train", "train-again"),
    )  # fmt: skip
    for pair in pairs:
        make = functools.partial(one_after_the_other, words=pair)
        expect = Expect(0, check=functools.partial(check, words=pair))
        yield Case(f"second-main/{'+'.join(pair)}", pair[0].partition("-")[0], make, expect)
    for words in (
        ("train",),
        ("train", "train-bf16"),
        ("eval",),
        ("predict",),
        ("shards",),
        ("maps",),
        ("curves",),
        ("hub",),
        ("lab",),
        ("train", "eval"),
    ):
        make = functools.partial(in_thread, words=words)
        expect = Expect(0, check=functools.partial(check, words=words))
        yield Case(f"second-main/thread-{'+'.join(words)}", words[0], make, expect)
