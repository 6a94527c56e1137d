"""Settings of the test run."""

import os


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
