"""The package as it is installed, and as a checkout has it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_in_a_checkout(code):
    """Runs `code` at the top of the repository, with no finder of an installed copy."""
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
    return subprocess.run([sys.executable, "-c", alone + code], cwd=ROOT, capture_output=True, text=True)


def test_every_folder_of_the_package_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"vision_longhorn.configs"}
    for top, name in ("vision_longhorn", "vision_longhorn"), ("kernels", "vision_longhorn.kernels"):
        for file in (ROOT / top).rglob("__init__.py"):
            found.add(".".join((name, *file.parent.relative_to(ROOT / top).parts)))
    assert sorted(named) == sorted(found)


def test_a_checkout_has_its_kernels_and_nothing_else_inside():
    done = run_in_a_checkout("import vision_longhorn.kernels.rules as rules; print(rules.__file__, sys.argv)")
    assert done.stdout.startswith(str(ROOT / "kernels" / "rules" / "__init__.py")), done.stderr
    for folder in ("tests", "benchmarks", "docs"):
        done = run_in_a_checkout(f"import vision_longhorn.{folder}")
        assert done.returncode and "No module named" in done.stderr.splitlines()[-1]
