"""The package as it is installed, and as a checkout has it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_in_a_checkout(code, *args):
    """Runs `code` at the top of the repository, with no finder of an installed copy."""
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
    return subprocess.run([sys.executable, "-c", alone + code, *args], cwd=ROOT, capture_output=True, text=True)


def test_every_folder_of_the_package_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"vision_longhorn.configs"}
    for top, name in ("vision_longhorn", "vision_longhorn"), ("kernels", "vision_longhorn.kernels"):
        for file in (ROOT / top).rglob("__init__.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / top).parts)))
    assert sorted(named) == sorted(found)


CHECKOUT = """
import importlib, sys
import vision_longhorn.kernels.rules as rules
print(rules.__file__)
for folder in sys.argv[1:]:
    try:
        importlib.import_module(f"vision_longhorn.{folder}")
    except ModuleNotFoundError as error:
        print(error)
"""


def test_a_checkout_has_its_kernels_and_nothing_else_inside():
    folders = "tests", "benchmarks", "docs"
    done = run_in_a_checkout(CHECKOUT, *folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(ROOT / "kernels" / "rules" / "__init__.py"),
        *(f"No module named 'vision_longhorn.{folder}'" for folder in folders),
    ]
