"""Words in and out: terminals and files in other encodings, the docs, and what a wheel says of itself."""

import ast
import functools
import importlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import tomllib

from tests.fuzz.case import MODULES, PYTHON, TOOLS, Case, Expect, Place, require
from tests.fuzz.kinds.common import train
from tests.fuzz.material import EVAL, draw_folder
from tests.fuzz.process import Result
from vision_longhorn.command_line import commands

Words = Sequence[str | Path]
ROOT = Path(__file__).parents[3]
ENCODINGS = ("cp1252", "ascii", "latin-1", "cp932", "utf-16")
NAMES = ("日本", "café", "Ωmega", "a b", "emoji😀", "\udcff\udcfe", "new\nline")


def cases() -> Iterator[Case]:
    yield from _terminals()
    yield from _docs()
    yield from _wheel()


def _terminals() -> Iterator[Case]:
    """Every tool with a path that the terminal's encoding lacks: it does its work, and what it prints is readable."""

    def named(place: Place) -> str:
        name = place.rng.choice(NAMES[:5])
        place.notes["name"] = name
        return name

    def of_eval(place: Place) -> Words:
        name = named(place)
        shutil.copytree(place.material / "run", place / name)
        shutil.copytree(place.material / "shards", place / f"{name}-data")
        return [name, *EVAL, "--data", f"{name}-data", "--out", f"{name}.json"]

    def of_predict(place: Place) -> Words:
        name = named(place)
        shutil.copytree(place.material / "photos", place / name)
        return [place.material / "run", name, "--workers", "0"]

    def of_train(place: Place) -> Words:
        name = named(place)
        draw_folder(place / "trees" / "train", 3, (name, "ash", "oak"))
        draw_folder(place / "trees" / "val", 2, (name, "ash", "oak"), seed=1)
        return train(place, data="trees", run=f"{name}-run")

    def of_shards(place: Place) -> Words:
        name = named(place)
        draw_folder(place / name, 2, (name, "ash"))
        (place / name / "ash" / f"{name}.gif").write_bytes(b"x")
        return ["imagefolder", name, f"{name}-out", "--split", "val"]

    def of_maps(place: Place) -> Words:
        name = named(place)
        shutil.copyfile(place.material / "photos/photo0.jpg", place / f"{name}.jpg")
        return [place.material / "run", f"{name}.jpg", "--out", f"{name}.png"]

    def of_curves(place: Place) -> Words:
        name = named(place)
        shutil.copytree(place.material / "run", place / name)
        return [name, "--out", f"{name}.png"]

    def of_hub(place: Place) -> Words:
        name = named(place)
        shutil.copytree(place.material / "run", place / name)
        return [name, f"{name}-folder"]

    def of_export(place: Place) -> Words:
        return [place.material / "run", f"{named(place)}-folder/"]

    def of_lab(place: Place) -> Words:
        return ["mixers", "--list", "--out", named(place)]

    def done(place: Place, result: Result) -> None:
        name = place.notes["name"]
        made = {
            "eval": f"{name}.json", "train": f"{name}-run/last.pt", "shards": f"{name}-out/_info.json",
            "maps": f"{name}.png", "curves": f"{name}.png", "hub": f"{name}-folder/config.json",
            "export": f"{name}-folder/config.json",
        }  # fmt: skip
        tool = place.notes.get("tool")
        require(result.out.strip() or result.err.strip(), "it says nothing")
        if tool in made:
            require((place / made[tool]).is_file(), f"there is no {made[tool]}")
        if tool == "predict":
            require(result.out.count("%") >= 5, "it does not tell all photos")

    makes = {
        "eval": of_eval, "predict": of_predict, "train": of_train, "shards": of_shards, "maps": of_maps,
        "curves": of_curves, "hub": of_hub, "export": of_export, "lab": of_lab,
    }  # fmt: skip

    def encoded(place: Place, word: str, encoding: str) -> Words:
        place.encoding = encoding
        place.notes["tool"] = word
        return makes[word](place)

    for word in makes:
        for encoding in ENCODINGS[:4]:
            make = functools.partial(encoded, word=word, encoding=encoding)
            yield Case(f"terminals/{word}-{encoding}", word, make, Expect(0, check=done))

    def wrong(place: Place, word: str, encoding: str) -> Words:
        """A path that is not there: the error names it, as far as the terminal can."""
        place.encoding = encoding
        name = place.rng.choice(NAMES)
        return {
            "eval": [name, *EVAL],
            "predict": [place.material / "run", name],
            "train": ["--data", name, "--device", "cpu"],
            "shards": ["verify", name],
            "maps": [place.material / "run", name],
            "curves": [name],
            "hub": [name, "x"],
            "export": [name, "x/"],
            "lab": [name],
        }[word]

    for word in makes:
        for number, encoding in enumerate(("ascii", "cp1252", "utf-8")):
            make = functools.partial(wrong, word=word, encoding=encoding)
            yield Case(f"terminals/{word}-missing-{number}", word, make, Expect(1))

    def from_stdin(place: Place, data: bytes, encoding: str) -> Words:
        shutil.copytree(place.material / "photos", place / "photos")
        shutil.copyfile(place / "photos" / "photo0.jpg", os.fsencode(place.folder) + b"/caf\xe9.jpg")
        shutil.copyfile(place / "photos" / "photo0.jpg", place / "café.jpg")
        place.stdin, place.encoding = data, encoding
        return [place.material / "run", "-", "--workers", "0", "--format", place.rng.choice(("text", "csv", "json"))]

    inputs: dict[str, tuple[bytes, int | None]] = {
        "latin": (b"photos/photo0.jpg\ncaf\xe9.jpg\n", 0),
        "utf-8": ("photos/photo0.jpg\ncafé.jpg\n".encode(), 0),
        "bom": (b"\xef\xbb\xbfphotos/photo0.jpg\n", None),
        "windows": (b"photos/photo0.jpg\r\nphotos/photo1.jpg\r\n", 0),
        "utf-16": ("photos/photo0.jpg\n".encode("utf-16"), 1),
        "zeros": (b"photos/photo0.jpg\0photos/photo1.jpg\0", None),
        "noise": (bytes(range(128, 256)) + b"\n", 1),
        "empty": (b"", 1),
        "blank": (b"\n\n  \n", 1),
        "picture": (b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\xff\xdb\n", 1),
    }
    for name, (data, code) in inputs.items():
        for encoding in ("utf-8", "ascii", "cp1252"):
            if name != "utf-8" or encoding == "utf-8":
                make = functools.partial(from_stdin, data=data, encoding=encoding)
                yield Case(
                    f"terminals/stdin-{name}-{encoding}", "predict", make, Expect(code if encoding == "utf-8" else None)
                )


# ------------------------------------------------------------------------------------------------------------- the docs


def _docs() -> Iterator[Case]:
    """Cases of the docs: blocks of Python are Python, and what they import and call is there."""

    def functions_of(path: str) -> Iterator[tuple[int, str]]:
        text = (ROOT / path).read_text(encoding="utf-8")
        yield from enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.S))

    def check(block: str) -> None:
        tree = ast.parse(block)
        known: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                try:
                    exec(compile(ast.Module([node], []), "docs", "exec"), known)
                except ImportError as error:
                    name = str(error.name or "").partition(".")[0]
                    require(name != "vision_longhorn", f"{ast.unparse(node)!r} does not work: {error}")
        for node in ast.walk(tree):
            words = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"vision_longhorn(\.\w+)+", words):
                # As a user has it, who has imported nothing but what the block says.
                code = f"import vision_longhorn; {words}"
                found = __import__("subprocess").run(
                    [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
                )
                require(
                    found.returncode == 0,
                    f"{words} does not work after `import vision_longhorn`: {found.stderr[-300:]}",
                )

    for path in ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for number, block in functions_of(path):
            yield Case(
                f"docs/{Path(path).stem}-{number}",
                PYTHON,
                lambda place, block=block: functools.partial(check, block),
                Expect(0),
            )

    def commands_of(path: str) -> None:
        """Options that the docs' command lines have are options of the tools."""
        from tests.fuzz.lines import parser_of, subcommands_of

        text = (ROOT / path).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(
            r"^\s*(?:\$ )?(?:vision-longhorn|python -m vision_longhorn\.?|python -m (?=lab)) ?(\w+[^\n#|]*)",
            text,
            flags=re.M,
        ):
            word = line.split()[0]
            if word not in TOOLS:
                continue
            parser = parser_of(word)
            known = {
                name
                for one in (parser, *subcommands_of(parser).values())
                for action in one._actions
                for name in action.option_strings
            }
            for option in re.findall(r"(?<=\s)--[\w-]+", line):
                name = option.replace("_", "-")
                require(name in known or name == "--version", f"{path}: {word} has no {option}")

    for path in ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        yield Case(
            f"docs/commands-{Path(path).stem}",
            PYTHON,
            lambda place, path=path: functools.partial(commands_of, path),
            Expect(0),
        )


# ------------------------------------------------------------------------------------------------------------ the wheel


def _wheel() -> Iterator[Case]:
    """Cases of the index page and of an installed package."""

    def project() -> dict[str, Any]:
        return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def version_of_command() -> None:
        sys.argv = ["vision-longhorn", "--version"]
        commands.main()

    def typed() -> None:
        require((ROOT / "vision_longhorn" / "py.typed").is_file(), "there is no py.typed")

    def typed_is_packed() -> None:
        text = (ROOT / "pyproject.toml").read_text()
        require("py.typed" in text, "pyproject.toml does not put py.typed into the wheel")

    def page() -> str:
        """The text of the index page: the README, or what setup.py makes of it."""
        found = {"long_description": (ROOT / "README.md").read_text(encoding="utf-8")}
        if (ROOT / "setup.py").is_file():
            with mock.patch("setuptools.setup", lambda **given: found.update(given)):
                runpy.run_path(str(ROOT / "setup.py"))
        return found["long_description"]

    def links() -> None:
        text = page()
        relative = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not re.match(r"https?://|#|mailto:", link)]
        require(not relative, f"links of the README that lead nowhere on an index page: {', '.join(relative[:4])}")

    def pictures() -> None:
        text = page()
        relative = [
            link
            for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img[^>]+src=\"([^\"]+)", text)
            if not any(map(lambda one: one.startswith("http"), link))
        ]
        require(not relative, f"pictures of the README that an index page has not: {relative[:3]}")

    def urls() -> None:
        require(project().get("urls"), "the metadata have no addresses")

    def python_versions() -> None:
        require(any("3.1" in one for one in project()["classifiers"]), "no classifier names versions of Python")

    def authors() -> None:
        require(project().get("authors") or project().get("maintainers"), "nobody is named as the author")

    def sdist() -> None:
        manifest = ROOT / "MANIFEST.in"
        require(manifest.is_file(), "there is no MANIFEST.in, so the sdist lacks docs and examples")
        text = manifest.read_text()
        require("docs" in text and "examples" in text, "MANIFEST.in names no docs or no examples")

    def packages() -> None:
        listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
        for above in ("vision_longhorn", "kernels"):
            for path in (ROOT / above).rglob("__init__.py"):
                name = ".".join(path.parent.relative_to(ROOT).parts)
                name = f"vision_longhorn.{name}" if above == "kernels" else name
                require(name in listed, f"{name} is not packed")

    def entry_points() -> None:
        found = [one for one in metadata.entry_points(group="console_scripts") if one.name == "vision-longhorn"]
        require(found and callable(found[0].load()), "there is no command vision-longhorn")

    def same_version() -> None:
        import vision_longhorn

        wanted = project().get("version") or metadata.version("vision-longhorn")
        require(getattr(vision_longhorn, "__version__", wanted) == wanted, "__version__ is another than the package's")

    checks: tuple[Callable[[], None], ...] = (
        typed, typed_is_packed, links, pictures, urls, python_versions, authors, sdist, packages, entry_points,
        same_version,
    )  # fmt: skip
    for check in checks:
        yield Case(f"wheel/{check.__name__.replace('_', '-')}", PYTHON, lambda place, check=check: check, Expect(0))
    yield Case("wheel/version", PYTHON, lambda place: version_of_command, Expect(0, says=(r"\d+\.\d+",)))
    for word in TOOLS:
        yield Case(
            f"wheel/{word}-module",
            PYTHON,
            lambda place, word=word: lambda: importlib.import_module(MODULES[word]),
            Expect(0),
        )
