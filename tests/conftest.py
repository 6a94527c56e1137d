"""Settings of the test run."""

import gc
import os
import signal

import pytest
from quick_interpreter import quicken


def pytest_addoption(parser):
    parser.addoption("--image-folder", help="folder of CLASS/IMAGE files to run through shards and transforms as well")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores, which would rest while tests wait for processes, signals and locks."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


def pytest_configure(config):
    # Tests run side by side, one to a core (pytest-xdist), and threads of their own would only wait for each other.
    # Read when torch is imported, here and in the processes that tests start.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The kernels read this when they are imported. Only the run that asks for GPU tests compiles them; every other run
    # interprets them on the CPU, on any machine.
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
    # What a shell starts in the background ignores Ctrl-C, and so would the runs that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python keeps frames in pieces of 16 KiB, and a loop of calls over the edge of one maps and unmaps memory at each
    # call, a quarter of all time. A frame that asks for a large stack gets a piece with room for all below it.
    run = pytest.Function.runtest

    def runtest(self):
        return run(self)

    runtest.__code__ = runtest.__code__.replace(co_stacksize=2**16 + 2**10)
    pytest.Function.runtest = runtest


def pytest_collection_finish():
    gc.freeze()  # what the modules hold is there to the end, and need not be looked through again and again
    gc.set_threshold(200_000, 50, 100)  # tests seldom leave cycles that are worth a search


@pytest.fixture(autouse=True)
def operators_decide_anew(request):
    """Let no test on a GPU repeat what an operator decided in another one, for which it may have been patched."""
    if request.node.get_closest_marker("gpu"):
        from vision_longhorn.kernels import replaying

        replaying.forget()


@pytest.fixture
def notes_kernels(monkeypatch):
    """Returns a function that lets layers of a module believe that their numbers are on a GPU, and returns a list to
    which each call adds whether it took the layers' kernel."""

    def note(module):
        import torch

        calls, takes = [], module._takes_kernel
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(module, "_takes_kernel", lambda *given: calls.append(takes(*given)) or calls[-1])
        return calls

    return note


@pytest.fixture(scope="session", autouse=True)
def triton_interprets_quickly():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield
