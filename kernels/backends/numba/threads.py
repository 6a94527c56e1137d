"""Runs compiled loops on as many threads as torch has.

Numba's own threads are not for this: those of its "workqueue" crash where two threads of Python call at once, and those
of OpenMP do not live through a fork.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def run(loop: Callable[..., None], programs: int, *args: Any) -> None:
    """Call `loop(first, last, *args)` for `programs` programs in all, cut among the threads."""
    threads = max(1, min(torch.get_num_threads(), programs))
    edges = [programs * i // threads for i in range(threads + 1)]
    others = []
    if threads > 1:
        key = os.getpid(), threads - 1  # threads do not survive a fork
        pool = _pools.get(key) or _pools.setdefault(key, ThreadPoolExecutor(threads - 1, "vision_longhorn"))
        others = [pool.submit(loop, *edge, *args) for edge in zip(edges[1:], edges[2:])]
    loop(0, edges[1], *args)
    for other in others:
        other.result()
