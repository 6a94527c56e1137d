"""How each kernel of the scans is launched: a table of choices, among which the sizes of a scan decide.

A `Choice` groups the sums over channels, so it changes the last bits of results. Equal sizes take the same choice in
every process.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch

from ...contract import Scan, ceil_div
from ...rules import rule_of


class Choice(NamedTuple):
    """How a kernel is built, and how fast it is then."""

    # fmt: off
    channels: int                    # of a lane
    unroll: int                      # tokens that a program takes at a time
    registers: Optional[int] = None  # a lane's limit, where a smaller one lets more programs run at once
    deep: bool = False               # rows of k and q loaded as far ahead as the rest: for programs that run alone
    speed: float = 1.0               # relative to the others of its list, where programs fill the GPU
    # fmt: on

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor with 65,536 registers runs at once."""
        return min(32, 65536 // (32 * (self.registers or 255)))


# The first of a list is for many programs. Timed on an H200; they suit an H100, which has the same multiprocessors, and
# were timed on no other GPU. `benchmarks/bench_scan.py --choices` times every entry.
TABLE: dict[tuple[str, Optional[str]], tuple[Choice, ...]] = {
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


def multiprocessors(device: torch.device) -> int:
    """Count the GPU's multiprocessors; 4 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def choices(kernel: str, scan: Scan) -> tuple[Choice, ...]:
    rule = rule_of(scan)
    found = TABLE.get((kernel, rule.name)) or TABLE[kernel, rule.tuned_as]
    if torch.version.hip is not None:
        found = tuple(choice._replace(registers=None) for choice in found)  # AMD's lanes have another number
    return found


def first_choice(kernel: str, scan: Scan) -> Choice:
    """Return the choice for programs that fill the GPU."""
    return choices(kernel, scan)[0]


def choose(kernel: str, scan: Scan, programs: Callable[[Choice], int]) -> Choice:
    """Find the choice that keeps most of the GPU at work. `programs` counts a choice's programs, each of one warp."""

    def rate(choice: Choice) -> float:
        resident = choice.resident * multiprocessors(scan.x.device)
        waves = ceil_div(programs(choice), resident)
        return choice.speed * programs(choice) / (waves * resident)

    return max(choices(kernel, scan), key=rate)
