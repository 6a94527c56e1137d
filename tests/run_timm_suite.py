"""Run timm's own model tests on the models of this package.

    python tests/run_timm_suite.py [--timm PATH] [pytest arguments ...]

timm tests every model that it lists with one file, tests/test_models.py. This script takes that file as it stands,
puts it into a temporary folder beside a conftest.py that imports vision_longhorn, so that our models are listed, and
runs pytest on the tests of our models. Two lines are added to the copy, each right behind the list that it extends,
because the lists are read while the file is imported:

    FEAT_INTER_FILTERS += ['vlonghorn']
    NON_STD_FILTERS += ['vlonghorn*', 'vim_*']

The first has our module's forward_intermediates() tested. The second says that our features are tokens, as it does for
timm's vision transformers: their configurations are checked by test_model_default_cfgs_non_std.

The script needs pytest, and the network unless --timm is given. Arguments that it does not know go to pytest; another
-k takes the place of the script's, which leaves out the tests that download pretrained weights. So

    python tests/run_timm_suite.py -k "vlonghorn_tiny and not fx" -x
    python tests/run_timm_suite.py -k "load_pretrained and vim_ and not efficientvim"

run some tests of one model, and load all weights that there are.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import timm

ADDED = {
    "FEAT_INTER_FILTERS": "FEAT_INTER_FILTERS += ['vlonghorn']",
    "NON_STD_FILTERS": "NON_STD_FILTERS += ['vlonghorn*', 'vim_*']",
}
OURS = "(vlonghorn or (vim_ and not efficientvim_)) and not pretrained"  # pytest takes any part of a name
SUITE = "tests/test_models.py"
ARCHIVE = "https://github.com/huggingface/pytorch-image-models/archive/refs/tags/v{version}.tar.gz"

CONFTEST = '''\
"""Lists our models among timm's, and declares the suite's markers as timm's pyproject.toml does."""

import vision_longhorn  # noqa: F401


def pytest_configure(config):
    for marker in ("base", "cfg", "torchscript", "features", "fxforward", "fxbackward"):
        config.addinivalue_line("markers", marker)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): without effect, pytest-timeout is not installed")
'''


def read_suite(path: str | None) -> tuple[str, str]:
    """Text of timm's test file, and where it was found.

    Args:
        path: a checkout or a (bare) clone of timm's repository; None downloads the installed version's source.

    Raises:
        SystemExit: there is no such file.
    """
    tag = f"v{timm.__version__}"
    if path is None:
        url = ARCHIVE.format(version=timm.__version__)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                archive = io.BytesIO(response.read())
        except OSError as error:
            raise SystemExit(f"{url}: {error}; give a checkout of timm's repository with --timm") from None
        with tarfile.open(fileobj=archive) as files:
            name = next(name for name in files.getnames() if name.split("/", 1)[-1] == SUITE)
            return files.extractfile(name).read().decode(), url
    file = Path(path) / SUITE
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    for revision in (tag, "HEAD"):
        found = subprocess.run(["git", "-C", path, "show", f"{revision}:{SUITE}"], capture_output=True, check=False)
        if found.returncode == 0:
            return found.stdout.decode(), f"{path} at {revision}"
    raise SystemExit(f"{path} holds no {SUITE}; give a checkout or a clone of timm's repository with --timm")


def add_lines(source: str) -> str:
    """`source` with the lines of ADDED behind the first assignment of each list.

    Raises:
        SystemExit: a list is not there; timm has changed its suite.
    """
    ends = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            ends.setdefault(node.targets[0].id, node.end_lineno)
    missing = [name for name in ADDED if name not in ends]
    if missing:
        raise SystemExit(f"timm's {SUITE} has no {' and no '.join(missing)} any more")
    lines = source.splitlines()
    for name in sorted(ADDED, key=ends.get, reverse=True):
        lines.insert(ends[name], ADDED[name])
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Further arguments go to pytest.")
    parser.add_argument("--timm", metavar="PATH", help="checkout or clone of timm's repository (default: download)")
    options, arguments = parser.parse_known_args()
    source, origin = read_suite(options.timm)
    print(f"timm {timm.__version__}, suite from {origin}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_models.py").write_text(add_lines(source), encoding="utf-8")
        Path(folder, "conftest.py").write_text(CONFTEST, encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        return subprocess.run([sys.executable, "-m", "pytest", "-ra", "-k", OURS, *arguments,
                               "-p", "no:cacheprovider", "--rootdir", folder, "-c", f"{folder}/pytest.ini",
                               f"{folder}/test_models.py"], check=False).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
