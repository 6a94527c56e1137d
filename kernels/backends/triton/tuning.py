"""What each kernel is launched with: a table for known GPUs, a short timing on others, and the memory of that timing.

A `Choice` changes how sums over channels are grouped, so results differ in the last bits from one choice to another.
Therefore nothing is timed under `torch.use_deterministic_algorithms(True)`, nor while a CUDA graph is captured, nor
where VISION_LONGHORN_TUNE=0 is set: there, as on every GPU that the table knows, the same shapes take the same choice
in every process. VISION_LONGHORN_TUNE=1 times on known GPUs too.

Timings are kept for a GPU, a kernel, a rule and the sizes that change its code (channels, d_state, bytes of a number),
not for batch and length: in memory, and in a JSON file under VISION_LONGHORN_CACHE (by default
~/.cache/vision_longhorn).
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from ...contract import Scan


class Choice(NamedTuple):
    """How a kernel is built, and how good that is where it fills the GPU."""

    # fmt: off
    channels: int                    # that a lane keeps
    unroll: int                      # tokens that a program takes at a time
    registers: Optional[int] = None  # a lane's limit, where a smaller one lets more programs run at once
    deep: bool = False               # rows of k and q loaded as far ahead as the rest: for programs that run alone
    speed: float = 1.0               # relative to the others of its list, where the GPU is full
    # fmt: on

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor with 65,536 registers runs at once."""
        return min(32, 65536 // (32 * (self.registers or 255)))


# The first of a list is for many programs. Found on an H200, whose multiprocessors an H100 has too;
# `benchmarks/bench_scan.py --choices` times every entry.
_HOPPER: dict[tuple[str, Optional[str]], tuple[Choice, ...]] = {
    ("forward", "diagonal"): (Choice(4, 2, 168), Choice(2, 2, 128, speed=0.8), Choice(1, 4, deep=True, speed=0.4)),
    ("forward", "exact"): (Choice(4, 2, 168), Choice(2, 2, 128, speed=0.75), Choice(1, 4, deep=True, speed=0.4)),
    ("forward", "mamba"): (Choice(2, 2, 128), Choice(1, 4, deep=True, speed=0.5)),
    ("summary", "diagonal"): (Choice(2, 4, 168),),
    ("summary", "mamba"): (Choice(2, 4, 168),),
    ("adjoint", "diagonal"): (Choice(4, 2), Choice(2, 2, 160, speed=0.9)),
    ("adjoint", "mamba"): (Choice(2, 2, 160),),
    ("backward", "diagonal"): (Choice(2, 2), Choice(1, 2, speed=0.6)),
    ("backward", "exact"): (Choice(2, 2), Choice(2, 2, 168, speed=0.95), Choice(1, 4, speed=0.6)),
    ("backward", "mamba"): (Choice(1, 2),),
}
_TABLES = {"NVIDIA H200": _HOPPER, "NVIDIA H100": _HOPPER, "NVIDIA GH200": _HOPPER}


def _table(device: torch.device) -> Optional[dict]:
    if device.type != "cuda":
        return _HOPPER
    name = torch.cuda.get_device_name(device)
    return next((table for known, table in _TABLES.items() if name.startswith(known)), None)


def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 4 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def first_choice(kernel: str, scan: Scan) -> Choice:
    """The choice for as many programs as one likes."""
    return _choices(kernel, scan)[0]


def _choices(kernel: str, scan: Scan) -> tuple[Choice, ...]:
    table = _table(scan.x.device) or _HOPPER
    choices = table.get((kernel, scan.law.name)) or table[kernel, scan.law.tuned_as]
    if torch.version.hip is not None:
        choices = tuple(choice._replace(registers=None) for choice in choices)  # another count of registers
    return choices


def choose(
    kernel: str, scan: Scan, programs: Callable[[Choice], int], run: Optional[Callable[[Choice], object]] = None
) -> Choice:
    """The choice for "forward", "backward" or "adjoint". (Where time is cut into segments, it is so that the first
    choice of the first two fills the GPU.)

    Args:
        programs: how many programs, each of one warp, a choice makes.
        run: runs the kernel with a choice, for the timing; without it nothing is timed.
    """
    device = scan.x.device
    choices = _choices(kernel, scan)
    if run is not None and len(choices) > 1 and _may_time(_table(device) is not None):
        return _timed(kernel, scan, choices, run)

    def rate(choice: Choice) -> float:
        # The part of the GPU that is at work, on average over the waves in which it takes the programs.
        resident = choice.resident * multiprocessors(device)
        waves = -(-programs(choice) // resident)
        return choice.speed * programs(choice) / (waves * resident)

    return max(choices, key=rate)


def _may_time(known: bool) -> bool:
    wanted = os.environ.get("VISION_LONGHORN_TUNE", "")
    return (
        wanted != "0"
        and (wanted == "1" or not known)
        and not torch.are_deterministic_algorithms_enabled()
        and torch.cuda.is_available()
        and not torch.cuda.is_current_stream_capturing()
    )


_known: Optional[dict[str, list]] = None


def _cache_file() -> Path:
    folder = os.environ.get("VISION_LONGHORN_CACHE") or Path.home() / ".cache" / "vision_longhorn"
    return Path(folder) / "scan_choices.json"


def _timed(kernel: str, scan: Scan, choices: tuple[Choice, ...], run: Callable[[Choice], object]) -> Choice:
    global _known
    if _known is None:
        try:
            _known = json.loads(_cache_file().read_text())
        except (OSError, ValueError):
            _known = {}
    _, _, _, D, N = scan.sizes
    parts = (torch.cuda.get_device_name(scan.x.device), torch.__version__, kernel, scan.law.name, D, N,
             scan.x.element_size(), scan.z is not None)  # fmt: skip
    key = "/".join(map(str, parts))
    found = next((choice for choice in choices if list(choice) == _known.get(key)), None)
    if found is None:
        found = min(choices, key=lambda choice: _time(run, choice))
        _known[key] = list(found)
        _write(_known)
    return found


def _time(run: Callable[[Choice], object], choice: Choice) -> float:
    """Milliseconds of the fastest of three runs after one that compiles; infinite for a choice that cannot run."""
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        run(choice)
    except (OutOfResources, PTXASError):  # more than this GPU has, or instructions that it does not know
        return float("inf")
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(choice)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def _write(known: dict[str, list]) -> None:
    # Whole or not at all, for processes that tune side by side; a folder that cannot be written costs a timing, no run.
    path = _cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        pass
