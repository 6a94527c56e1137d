"""A case: what it makes, what it runs, and what has to come of it."""

import fnmatch
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.fuzz.process import Result, forked
from vision_longhorn.command_line import commands
from vision_longhorn.command_line.parser import run_cli

MODULES = {
    **{word: f"vision_longhorn.{word}" for word in commands.COMMANDS},
    "lab": "lab.__main__",
}
TOOLS = tuple(MODULES)
PYTHON = "python"  # the tool of cases that call the package from Python
MOST_LINES = 6  # on stderr, of a command that fails
BUGS = r"Traceback|Error: |Exception ignored|terminate called|core dumped|Segmentation"


class Fault(AssertionError):
    """Raised where a case did not end as it has to."""


def require(right: Any, text: str) -> None:
    """Raises Fault(text) where `right` is false."""
    if not right:
        raise Fault(text)


class Place:
    """The folder of a case, and what it may use.

    Attributes:
        folder: Where the tool runs. It is empty at first.
        material: Folder of what all cases share, which none may change.
        rng: Generator that follows from the seed and the case's name.
        notes: Whatever `make` wants to hand to `check`.
        stdin, encoding, environment: As `process.forked` takes them.
    """

    def __init__(self, folder: Path, material: Path, rng: random.Random) -> None:
        self.folder, self.material, self.rng = folder, material, rng
        self.notes: dict[str, Any] = {}
        self.stdin, self.encoding, self.environment = b"", "utf-8", dict[str, str | None]()
        folder.mkdir(parents=True)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def copy(self, name: str, to: str | None = None) -> Path:
        """A copy of a file or folder of the material, under its own name or another. Hard links are parted."""
        source, target = self.material / name, self.folder / (to or name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copyfile(source, target)
        return target

    def json(self, name: str) -> Any:
        """Reads a JSON file of the folder, or of the material where its name begins with a slash."""
        return json.loads((self.material / name[1:] if name[:1] == "/" else self.folder / name).read_text())

    def run(self, function: Callable[[], Any], limit: float) -> Result:
        """Calls a function in a process of its own in the folder, and returns its result."""
        return forked(function, self.folder, limit, self.stdin, self.encoding, self.environment)


Check = Callable[[Place, Result], Any]


@dataclass(frozen=True)
class Expect:
    """How a case has to end, beside what holds for all.

    Attributes:
        code: 0 or 1; None where both are right: then `check` holds where it is 0.
        says: Patterns that what was printed matches, each of them, whatever the exit code.
        fails: Patterns that an error's text matches, each of them, where the exit code is 1.
        never: Patterns that nothing matches that was printed.
        own: Patterns of paths, relative to the folder, of files that were there and that the tool may write anew.
        leaves: Those of files that it may leave where it fails.
        check: Raises `Fault` where the result is not as it should be; called where the exit code is 0.
        after: The same, but called whatever the exit code is.
        lines: Lines on stderr at most where it fails.
    """

    code: int | None = None
    says: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    check: Check | None = None
    after: Check | None = None
    lines: int = MOST_LINES


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        name: KIND/WHAT-NUMBER, one of its own.
        tool: Word of a command, or `PYTHON`.
        make: Makes what the case needs in the folder, and returns the words of the tool's command line, or a function
            to be called in the tool's place.
        expect: What has to come of it.
        limit: Seconds that it may take.
    """

    name: str
    tool: str
    make: Callable[[Place], Sequence[str | Path] | Callable[[], Any]]
    expect: Expect = field(default_factory=Expect)
    limit: float = 60

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def words_of(action: Sequence[str | Path]) -> list[str]:
    return [os.fspath(word) for word in action]


def run_case(case: Case, seed: int, material: Path, folder: Path, patience: float = 1.0) -> tuple[list[str], str, str]:
    """Runs a case in a new folder, which is removed if nothing was wrong.

    Args:
        patience: Factor of its time.

    Returns:
        What was wrong, a text each; what was run, and the end of what it printed, for people.
    """
    place = Place(folder, material, random.Random(f"{seed} {case.name}"))
    line, printed = case.tool, ""
    try:
        action = case.make(place)
        if callable(action):
            function = action
        else:
            words = words_of(action)
            line = shlex.join([case.tool, *words])
            function = lambda: run_cli(lambda: import_module(MODULES[case.tool]).main(words))  # noqa: E731
        before = snapshot(folder)
        result = place.run(function, case.limit * patience)
        printed = f"exit code {result.code} after {result.seconds:.1f} s; it printed\n{_end_of(result.said)}"
        faults = list(judge(case, place, before, result))
    except Exception:
        return ["the case itself is wrong:\n" + traceback.format_exc()], line, printed
    if not faults:
        shutil.rmtree(folder, ignore_errors=True)
        for stream in folder.parent.glob(f"{folder.name}.std*"):
            stream.unlink()
    return faults, line, printed


def _end_of(text: str, lines: int = 14) -> str:
    kept = text.strip().replace("\r", "\n").split("\n")[-lines:]
    return "\n".join(f"      | {line[:400]}" for line in kept)


def snapshot(folder: Path) -> dict[str, str]:
    """A digest of each file in a folder, by its path in there; of a link, where it leads."""
    found = {}
    for above, folders, files in os.walk(folder):
        for name in [*files, *folders]:
            path = Path(above, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink():
                found[relative] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif not path.is_dir():
                found[relative] = "neither file nor folder"
    return found


def _is_one_of(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def judge(case: Case, place: Place, before: Mapping[str, str], result: Result) -> Iterator[str]:
    """The faults of a result, a text each."""
    expect = case.expect
    if result.code is None:
        yield f"it hangs: it had not ended after {result.seconds:.0f} s"
        return
    bug = re.search(BUGS, result.said)
    if bug and not result.err.startswith("error: "):
        yield f"a traceback, or the like of it: {bug[0]!r}"
    if result.code not in (0, 1):
        yield f"exit code {result.code} is neither 0 nor 1"
    elif expect.code not in (None, result.code):
        yield f"exit code {result.code} is not {expect.code}"
    if result.left:
        yield "processes of it are still there"
    if result.code == 1:
        yield from _faults_of_error(result, expect)
    for pattern in expect.says:
        if not re.search(pattern, result.said):
            yield f"nothing that it printed matches {pattern!r}"
    for pattern in expect.never:
        if found := re.search(pattern, result.said):
            yield f"it printed {found[0]!r}, which nothing should"
    yield from _faults_of_files(before, snapshot(place.folder), result, expect)
    for check in (expect.check if result.code == 0 else None, expect.after):
        try:
            if check:
                check(place, result)
        except Fault as fault:
            yield str(fault)
        except Exception:
            yield "its result cannot be checked:\n" + traceback.format_exc()


def _faults_of_error(result: Result, expect: Expect) -> Iterator[str]:
    lines = [
        line for line in re.split(r"[\r\n]", result.err) if line.strip() and not re.search(r"\d%\|", line)
    ]  # no bars
    errors = [line for line in lines if line.startswith("error: ")]
    if not lines or not lines[-1].startswith("error: "):
        yield "the last line on stderr is no 'error: ...'"
    if len(errors) > 1:
        yield f"{len(errors)} lines begin with 'error: '"
    if len(lines) > expect.lines:
        yield f"it fails with {len(lines)} lines"
    if errors and len(errors[-1]) > 1500:
        yield f"its error has {len(errors[-1])} characters"
    for pattern in expect.fails:
        if not re.search(pattern, " ".join(errors)):
            yield f"its error does not match {pattern!r}"


def _faults_of_files(
    before: Mapping[str, str], now: Mapping[str, str], result: Result, expect: Expect
) -> Iterator[str]:
    for path, digest in before.items():
        if now.get(path) != digest and not _is_one_of(path, expect.own):
            yield f"{path} is {'changed' if path in now else 'gone'}, and it is not the tool's own"
    for path in now:
        if path not in before:
            if re.search(r"\.\d+\.tmp\b", path):
                yield f"{path} is left behind"
            elif result.code == 1 and not _is_one_of(path, expect.leaves):
                yield f"{path} is left behind by a command that failed"
