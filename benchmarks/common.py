"""What the benchmarks share: where and with what a run was made, a table on the terminal, and errors in a line."""

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Optional

import timm
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation

from vision_longhorn.kernels import HAS_TRITON  # noqa: E402

from vision_longhorn.environment import find_commit  # noqa: E402

if HAS_TRITON:
    import triton

RESULTS = ROOT / "benchmarks" / "results"
OF_CONFIGS = dict(save_states=True, residual_in_fp32=False)  # arguments that the configs vlonghorn_* set


def describe(error: Exception) -> str:
    """Describe an error in one line of a table or a file."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _driver() -> Optional[str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (IndexError, OSError, subprocess.SubprocessError):
        return None


def environment() -> dict:
    """Describe the machine, the versions and the commit (`find_commit`) that a benchmark's numbers hold for."""
    commit, dirty = find_commit()
    found = dict(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Only names of files, since the folders of this machine are private.
        command=" ".join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__ if HAS_TRITON else None,
        timm=timm.__version__,
        commit=commit,
        dirty=dirty,
        threads=torch.get_num_threads(),
        cores=os.cpu_count(),
        processor=platform.machine(),
    )
    if torch.cuda.is_available():
        found |= dict(
            gpu=torch.cuda.get_device_name(),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            driver=_driver(),
        )
    return found


def print_environment(found: dict) -> None:
    print("  ".join(f"{name} {value}" for name, value in found.items() if value is not None), flush=True)


def table(title: str, rows: list[dict], **columns: tuple[str, str]) -> None:
    """Print `rows`, aligned; `columns` maps a key to its heading and format."""

    def cell(row: dict, key: str, form: str) -> str:
        value = row.get(key)
        if value is None:
            return "failed" if key in ("ms", "seconds") and "error" in row else ""
        return format(value, form)

    lines = [[heading for heading, _ in columns.values()]]
    lines += [[cell(row, key, form) for key, (_, form) in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    numeric = [form[-1:] in ("f", "d") for _, form in columns.values()]
    print(f"\n{title}")
    for line in lines:
        print(
            "  ".join(
                text.rjust(width) if right else text.ljust(width) for text, width, right in zip(line, widths, numeric)
            ).rstrip()
        )
    sys.stdout.flush()
