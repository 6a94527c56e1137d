"""Settings of the test run."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--image-folder", help="folder of CLASS/IMAGE files to run through shards and transforms as well")


def pytest_configure(config):
    # Tests run side by side, one to a core (pytest-xdist), and threads of their own would only wait for each other.
    # Read when torch is imported, here and in the processes that tests start.
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The kernels read this when they are imported. Only the run that asks for GPU tests compiles them; every other run
    # interprets them on the CPU, on any machine.
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def language_made_interpreted_once_a_launch():
    """Triton's interpreter puts its own functions into `triton.language` anew for every call of a function within a
    kernel, and that is half of what an interpreted kernel takes. Once in each launch, for each module whose functions
    it runs, leaves the same. Half of the rest are checks that no sum of integers overflows; sizes here are small, and a
    GPU makes none."""
    interpreter = None
    if os.environ.get("TRITON_INTERPRET") == "1":
        try:
            from triton.runtime import interpreter
        except ImportError:
            pass
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "GridExecutor"):
        yield  # no Triton, or one that does it in another way
        return
    put, launch, modules = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def put_once(function):
        if id(function.__globals__) not in modules:
            modules.add(id(function.__globals__))
            return put(function)  # what undoes it after the launch, of which only the first in a launch is asked for

    def launch_anew(self, *args, **kwargs):
        modules.clear()
        return launch(self, *args, **kwargs)

    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow"):
        object.__setattr__(options, "sanitize_overflow", False)  # they are frozen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", put_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield
