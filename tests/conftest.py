"""Settings of the test run."""

import os


def pytest_addoption(parser):
    parser.addoption("--image-folder", help="folder of CLASS/IMAGE files to run through shards and transforms as well")


def pytest_configure(config):
    # The kernels read this when they are imported. Only the run that asks for GPU tests compiles them; every other run
    # interprets them on the CPU, on any machine.
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
