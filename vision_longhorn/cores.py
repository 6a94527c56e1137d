"""The processor cores of this machine."""

import os


def cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(most: int) -> int:
    """Counts the cores for each process that a launcher started on this machine: 1 to `most`."""
    return max(1, min(most, cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
