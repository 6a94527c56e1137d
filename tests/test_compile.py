"""The Triton kernels compile for GPUs that this machine does not have, and code that a GPU lacks is kept from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vision_longhorn.kernels import Scan

from vision_longhorn import kernels

if not kernels.HAS_TRITON:
    pytest.skip("triton is not installed on this platform", allow_module_level=True)

from triton.backends import backends
from triton.backends.compiler import GPUTarget

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compile_without_gpu  # noqa: E402


def lacks_amd_linker():
    """Triton 3.3 takes the linker of a ROCm installation; 3.6 has one built in."""
    find = getattr(backends["amd"].compiler, "path_to_rocm_lld", None) if "amd" in backends else None
    try:
        return find is not None and not find()
    except Exception as error:
        return "linker" in str(error)


# Runs the script with each of the command lines. Its processes, which would import the same once more, are forked, and
# not by a second thread: a process that is forked while the first thread prints would wait for that thread's lock for
# ever. The processes keep what they compile in Triton's usual cache, so that the next run of the tests need not compile
# the same code. The tests' own process interprets kernels, and the script's stand-in for a driver would stay in it.
FORKING = """
import concurrent.futures, os, runpy, subprocess, sys, traceback

script, *lines = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
import compile_without_gpu

run = subprocess.run


def fork(command, env=os.environ, **options):
    if command[0] != sys.executable:
        return run(command, env=env, **options)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return subprocess.CompletedProcess(command, code, stderr="")
    try:
        os.environ.update({name: value for name, value in env.items() if name != "TRITON_CACHE_DIR"})
        sys.argv = command[1:]
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


class AtOnce(concurrent.futures.Executor):
    def __init__(self, jobs):
        pass

    def submit(self, call, *args):
        done = concurrent.futures.Future()
        done.set_result(call(*args))
        return done


subprocess.run, concurrent.futures.ThreadPoolExecutor = fork, AtOnce
sys.exit(max(fork([sys.executable, script, *line.split()]).returncode for line in lines))
"""


AMD = pytest.mark.skipif(lacks_amd_linker(), reason="this Triton links for AMD with ROCm's linker, and there is none")
BACKWARD = {
    "cuda:75": "_backward_kernel",  # without tensor cores, whose products of TF32 came with sm_80
    "cuda:90": "_backward_kernel[MATRIX]",
    "hip:gfx942": "_backward_kernel",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What the script found for all targets that can be linked for, and what it printed, with `--list`, too."""
    folder = tmp_path_factory.mktemp("compiled")
    targets = [target for target in BACKWARD if not (target.startswith("hip:") and lacks_amd_linker())]
    lines = [f"--targets {' '.join(targets)} --only exact float16 scalar_step --out {folder}", "--list"]
    run = subprocess.run(
        [sys.executable, "-c", FORKING, str(BENCHMARKS / "compile_without_gpu.py"), *lines],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return json.loads((folder / "compile_without_gpu.json").read_text()), run.stdout


@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=AMD if target.startswith("hip:") else ()) for target in BACKWARD]
)
def test_a_scan_of_16_bits_compiles(target, script):
    compiled = script[0]
    rows = {row["kernel"]: row for row in compiled["kernels"] if row["target"] == target}
    finish = {"_finish_rows_kernel", "_finish_columns_kernel"}
    assert set(rows) == {"_norm_kernel", "_forward_kernel[OUTPUT,SAVE]", BACKWARD[target], *finish}
    limits = compiled["targets"][target]
    for row in rows.values():
        assert 0 < row["registers"] <= limits["registers"] and row["shared"] <= limits["shared_KiB"] * 1024
        assert row["spills"] >= 0


def test_every_kernel_of_the_package_is_among_the_cases(script):
    assert "mamba bfloat16 parallel _adjoint_kernel" in script[1].splitlines()


def test_what_fails_or_takes_too_much_is_named_and_is_the_exit_status(monkeypatch, capsys):
    taken = {"_norm_kernel": (255, 64 * 1024), "_forward_kernel": (256, 0), "_carry_kernel": (40, 64 * 1024 + 1)}

    def compiled(target, cases):
        ((family, dtype, variant),) = cases
        rows = [
            dict(kernel=name, seconds=1.0, registers=registers, spills=0, shared=shared)
            for name, (registers, shared) in taken.items()
        ]
        message = "Internal\nptxas a.ptx, line 9; error   : Feature '.tf32' requires .target sm_80 or higher\nptxas"
        rows.append(dict(kernel="_backward_kernel", error=compile_without_gpu.reason(message)))
        return [dict(target=target, family=family, dtype=dtype, variant=variant, **row) for row in rows]

    monkeypatch.setattr(compile_without_gpu, "compile_apart", compiled)
    assert compile_without_gpu.main(["--targets", "cuda:75", "--only", "mamba", "float16", "parallel"]) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failures == [
        "FAILED cuda:75 mamba float16 parallel _forward_kernel: takes 256 registers of 255",
        "FAILED cuda:75 mamba float16 parallel _carry_kernel: takes 65537 bytes of shared memory of 64 KiB",
        "FAILED cuda:75 mamba float16 parallel _backward_kernel: Feature '.tf32' requires .target sm_80 or higher",
    ]


@pytest.mark.parametrize(
    "target, ptx, matrix, warp",
    [
        (GPUTarget("cuda", 75, 32), True, False, 32),
        (GPUTarget("cuda", 80, 32), True, True, 32),
        (GPUTarget("cuda", 90, 32), True, True, 32),
        (GPUTarget("cuda", 120, 32), True, True, 32),
        (GPUTarget("hip", "gfx942", 64), False, False, 64),
        (GPUTarget("hip", "gfx1100", 32), False, False, 32),
        (None, False, False, 32),
    ],
    ids=lambda value: f"{value.backend}:{value.arch}" if isinstance(value, GPUTarget) else str(value),
)
def test_what_a_gpu_is_given(monkeypatch, target, ptx, matrix, warp):
    from vision_longhorn.kernels.backends.triton import lanes
    from vision_longhorn.kernels.backends.triton import scan as triton_scan

    monkeypatch.setattr(lanes, "target_of", lambda device: target)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, k = torch.zeros(1, 5, 64, dtype=dtype), torch.zeros(1, 5, 16, dtype=dtype)
        launch = triton_scan._Walk(Scan(x, x, k, k, None, None, None, None, None, "exact"))
        assert launch.args["PTX"] == ptx and launch.lanes == warp
        assert launch.matrix == (matrix and dtype != torch.float32)
