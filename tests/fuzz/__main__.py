"""The command line of the fuzz: `python -m tests.fuzz --help`."""

import argparse
import collections
import contextlib
import fnmatch
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

# Read when torch is imported: cases run side by side, one to a core.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0")

import torch

from tests.fuzz.case import Case, run_case, snapshot
from tests.fuzz.kinds import KINDS, all_cases
from tests.fuzz.material import make_material

# What the tools import when they need it, once for all cases
EAGER = (
    "accelerate", "matplotlib.figure", "matplotlib.backends.backend_agg", "onnx", "onnxruntime", "onnxscript", "pandas",
    "scipy.stats", "sklearn.datasets", "tensorboard.backend.event_processing.event_accumulator", "timm",
    "torch.utils.tensorboard", "tqdm", "webdataset", "vision_longhorn.curves", "vision_longhorn.eval",
    "vision_longhorn.export", "vision_longhorn.hub", "vision_longhorn.maps", "vision_longhorn.predict",
    "vision_longhorn.shards", "lab.__main__", "vision_longhorn.training.trainer",
)  # fmt: skip


def main() -> int:
    """Runs the cases that the command line asks for, and returns the exit code: 1 where one has failed."""
    args = parse()
    random.seed(args.seed)
    cases = [case for case in all_cases(args.seed) if any(fnmatch.fnmatch(case.name, only) for only in args.only)]
    if not cases:
        print(f"no case is called like {' '.join(args.only)}: --list has them all", file=sys.stderr)
        return 1
    if args.list:
        for case in cases:
            print(f"{case.tool:8} {case.name}")
        print_table(cases, {})
        return 0
    torch.set_num_threads(1)
    for name in EAGER:
        with contextlib.suppress(ImportError):
            __import__(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(args.keep or temporary).resolve()
        return run_cases(cases, args, folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes the tools.")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn [0]")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="cases of these names, such as damage/*"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side [2]")
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    parser.add_argument("--keep", metavar="FOLDER", help="a new folder for the cases, where those that fail stay")
    parser.add_argument("--verbose", action="store_true", help="show what cases printed that passed, too")
    parser.add_argument("--patience", type=float, default=2.0, help="factor of each case's time, for slow machines [2]")
    return parser.parse_args()


def run_cases(cases: list[Case], args: argparse.Namespace, folder: Path) -> int:
    start = time.monotonic()
    with multiprocessing.get_context("fork").Pool(1) as pool:  # this process stays one that has computed nothing
        material = pool.apply(make_material, (folder / "material",))
    shared = snapshot(material)
    faults: dict[str, list[str]] = {}
    jobs = [(case.name, args.seed, material, folder, args.patience) for case in cases]
    # Those that take longest come first, so that none of them is left over for one process at the end.
    order = sorted(range(len(cases)), key=lambda number: -cases[number].limit)
    _CASES.update({case.name: case for case in cases})
    with multiprocessing.get_context("fork").Pool(args.jobs, initializer=_ignore_interrupt) as pool:
        try:
            for count, (name, found, line, printed) in enumerate(
                pool.imap_unordered(_job, [jobs[i] for i in order]), 1
            ):
                if sys.stderr.isatty():
                    print(f"\r{count} of {len(cases)}, {len(faults)} failed", end="", file=sys.stderr, flush=True)
                if found:
                    faults[name] = found
                if found or args.verbose:
                    print(f"\n{'FAILED' if found else 'passed'} {name}\n    {line}")
                    print(*(f"    - {fault}" for fault in (*found, printed)), sep="\n")
                    print(f"    again: python -m tests.fuzz --seed {args.seed} --only {name}", flush=True)
        except KeyboardInterrupt:
            pool.terminate()
            return 130
    if snapshot(material) != shared:
        changed = sorted({path for path, _ in shared.items() ^ snapshot(material).items()})
        faults["material"] = [f"a case has changed {', '.join(changed)}, which all share"]
        print(f"\nFAILED: {faults['material'][0]}")
    print_table(cases, faults)
    print(f"{len(cases)} cases, {len(faults)} failed, {time.monotonic() - start:.0f} s, seed {args.seed}")
    return 1 if faults else 0


_CASES: dict[str, Case] = {}  # by name: cases hold functions, which go to no other process but by a fork


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _job(job: tuple[str, int, Path, Path, float]) -> tuple[str, list[str], str, str]:
    name, seed, material, folder, patience = job
    place = folder / name.replace("/", "--")
    shutil.rmtree(place, ignore_errors=True)
    return name, *run_case(_CASES[name], seed, material, place, patience)


def print_table(cases: Iterable[Case], faults: dict[str, list[str]]) -> None:
    """Prints how many cases there are of each kind and for each tool, and how many of them failed."""
    for title, key in (("kind", lambda case: case.kind), ("tool", lambda case: case.tool)):
        total = collections.Counter(map(key, cases))
        failed = collections.Counter(key(case) for case in cases if case.name in faults)
        print(f"\n{title:14} cases  passed  failed")
        for name in KINDS if title == "kind" else sorted(total):
            if total[name]:
                about = f"  {KINDS[name]}" if title == "kind" else ""
                print(f"{name:14} {total[name]:5}  {total[name] - failed[name]:6}  {failed[name]:6}{about}")


if __name__ == "__main__":
    sys.exit(main())
