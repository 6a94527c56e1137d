"""Tests of what only Numba has: threads, forks, the folder of compiled code, and its absence. `test_scan_backends.py`
compares its scans with float64, as those of every backend."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from scan_cases import make_inputs, outputs_and_gradients
from vision_longhorn.kernels import dispatch, longhorn_scan

from vision_longhorn.models.mixers import BidirectionalMixer

needs_numba = pytest.mark.skipif(not dispatch.has_numba(), reason="numba is not installed")
LOOPS = Path(__file__).parents[1] / "kernels" / "backends" / "numba" / "loops.py"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(rule="exact", **options):
    inputs = make_inputs(rule, 3, 19, 130, 5, direction="both")
    return outputs_and_gradients(rule, inputs, direction="both", combine="mean", backend="numba", **options)


def assert_same(found, wanted):
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@needs_numba
@pytest.mark.parametrize("rule", ["exact", "mamba"])
def test_the_same_bits_on_any_number_of_threads_20_times(rule, two_threads):
    found = run(rule)
    for _ in range(20):
        assert_same(run(rule), found)
    torch.set_num_threads(1)
    assert_same(run(rule), found)


@needs_numba
def test_two_threads_of_a_program_may_scan_at_once(two_threads):
    wanted = run()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: run(), range(8)):
            assert_same(found, wanted)


def forward():
    inputs = make_inputs("exact", 3, 19, 130, 5)
    return longhorn_scan(*(inputs[name] for name in ("x", "step", "k", "q")), rule="exact", backend="numba")


def scan_and_send(end):
    with torch.no_grad():
        end.send(forward().numpy())


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_from_one_with_threads_scans_too(two_threads):
    wanted, (ours, theirs) = forward(), multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=scan_and_send, args=(theirs,))
    child.start()
    assert ours.poll(60), "the forked process hangs"
    assert torch.equal(torch.from_numpy(ours.recv()), wanted)
    child.join()


@needs_numba
@pytest.mark.parametrize("home", ["folder", "file"])
def test_compiled_code_is_kept_elsewhere_or_not_at_all_where_the_package_is_read_only(home, tmp_path):
    shutil.copy(LOOPS, tmp_path)
    (tmp_path / "__pycache__").touch()  # a file of that name keeps out everyone, root too
    elsewhere = tmp_path / "home"
    elsewhere.mkdir() if home == "folder" else elsewhere.touch()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= dict(HOME=str(elsewhere), XDG_CACHE_HOME=str(elsewhere), LOCALAPPDATA=str(elsewhere))
    code = "import numpy, loops; assert abs(loops._sigmoid(numpy.float32(1)) - 0.7310586) < 1e-6"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(elsewhere.rglob("*.nbi")) == (home == "folder")


def test_without_numba_the_torch_path_runs(monkeypatch):
    def forget():
        dispatch.get_backend.cache_clear()
        dispatch.has_numba.cache_clear()

    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("vision_longhorn.kernels.backends.numba")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "numba", None)
        forget()
        assert dispatch.backend_for("auto", torch.zeros(1)).name == "torch"
        with pytest.raises(RuntimeError, match="numba cannot be imported"):
            dispatch.backend_for("numba", torch.zeros(1))
    forget()
    assert dispatch.backend_for("auto", torch.zeros(1, device="meta")).name == "torch"


@needs_numba
@pytest.mark.parametrize("rule", ("exact", "mamba"))
def test_parameters_keep_memory_that_can_be_given_back(rule):
    """FSDP frees the storage of a block's parameters after its use."""
    mixer, h = BidirectionalMixer(8, rule=rule), torch.randn(1, 5, 8, requires_grad=True)
    mixer.scan_backend = "numba"
    mixer(h).sum().backward()
    assert all(value.untyped_storage().resizable() for value in mixer.parameters())
