"""The package as it is installed, and as a checkout has it."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import vision_longhorn

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


# A stand-in for the models, which take seconds to import
CHECKOUT = """
import importlib, sys, types
sys.modules["vision_longhorn.models.vlonghorn"] = types.SimpleNamespace(VisionLonghorn=None)
import vision_longhorn.kernels.rules as rules
print(rules.__file__)
for folder in sys.argv[1:]:
    try:
        importlib.import_module(f"vision_longhorn.{folder}")
    except ModuleNotFoundError as error:
        print(error)
"""


def test_a_checkout_has_its_kernels_and_nothing_else_inside():
    folders = "tests", "benchmarks", "docs", "lab"
    done = run_in_a_checkout(CHECKOUT, *folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(ROOT / "kernels" / "rules" / "__init__.py"),
        *(f"No module named 'vision_longhorn.{folder}'" for folder in folders),
    ]


BUILD = """
import sys
from setuptools import build_meta
_, out, *kinds = sys.argv
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(out)
"""


def build(source, out, *kinds):
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out), *kinds], cwd=source, capture_output=True, check=True)
    return out


TOPS = ("benchmarks", "configs", "docs", "examples", "kernels", "lab", "tests", "vision_longhorn",
        "*.md", "*.py", "LICENSE", "MANIFEST.in", "pyproject.toml")  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folders with a wheel and a source distribution of this checkout, and with a wheel of the latter; and the latter
    unpacked."""
    folder = tmp_path_factory.mktemp("built")
    for found in (found for top in TOPS for found in ROOT.glob(top)):
        copy = shutil.copytree if found.is_dir() else shutil.copy2
        (folder / "tree").mkdir(exist_ok=True)
        copy(found, folder / "tree" / found.name)
    from_tree = build(folder / "tree", folder / "from_tree", "sdist", "wheel")
    with tarfile.open(next(from_tree.glob("*.tar.gz"))) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = next(folder.glob("vision_longhorn-*"))
    return from_tree, build(unpacked, folder / "from_sdist", "wheel"), unpacked


def wheel_of(folder):
    """Dict of name to content of all files of the folder's wheel."""
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def test_a_wheel_of_the_source_distribution_is_that_of_the_checkout(built):
    from_tree, from_sdist, _ = built
    files = wheel_of(from_tree)
    assert files == wheel_of(from_sdist)
    assert {"vision_longhorn/py.typed", "vision_longhorn/configs/own_data.yaml"} <= files.keys()
    assert not any(name.startswith(("tests", "benchmarks", "kernels", "lab", "setup")) for name in files)


def test_the_source_distribution_has_what_the_documents_name(built):
    unpacked = built[2]
    held = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    here = {path.relative_to(ROOT) for top in TOPS for found in ROOT.glob(top) for path in (found, *found.rglob("*"))}
    assert {path for path in here if (ROOT / path).is_file() and "__pycache__" not in path.parts} <= held
    assert not [path for path in held if path.suffix == ".pyc" or path.parts[0] in (".ci", ".git")]


def test_an_index_page_links_to_nothing_that_it_lacks(built):
    files = wheel_of(built[0])
    about = email.message_from_bytes(next(text for name, text in files.items() if name.endswith("METADATA")))
    page, readme = about.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page) > 0.8 * len(readme) and "(https://arxiv.org/abs/2407.14207)" in page
    assert not re.findall(r"\]\((?!https?:)", page) and "![" not in page
    assert about["Author"] and about["License-Expression"] == "Apache-2.0"
    assert {url.rpartition(" ")[2].partition(":")[0] for url in about.get_all("Project-URL")} == {"https"}


def test_the_version_is_said_without_importing_torch(built):
    words = [sys.executable, "-X", "importtime", "-m", "vision_longhorn", "--version"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"vision-longhorn {vision_longhorn.__version__}\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "timm"}
    about = next(name for name in wheel_of(built[0]) if name.endswith("METADATA"))
    assert about.startswith(f"vision_longhorn-{vision_longhorn.__version__}.")


def test_a_command_lets_idle_threads_of_openmp_sleep():
    """Those that spin make training on a busy CPU many times slower."""
    code = "OWN_COMMAND = True\nimport os, sys, vision_longhorn\nassert 'torch' not in sys.modules\n"
    for given, found in ({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        said = subprocess.check_output([sys.executable, "-c", code + "print(os.environ['OMP_WAIT_POLICY'])"], env=env)
        assert said.decode().strip() == found
