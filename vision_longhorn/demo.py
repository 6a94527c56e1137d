"""The built-in demo set, scikit-learn's handwritten digits, as a place of data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator

DIGITS = "digits"  # what a user gives as --data


def locate_data(spec: str, accelerator: Accelerator) -> str:
    """`spec` itself, or the folder ./data/digits for the built-in digits, which are made there if they are missing."""
    if spec != DIGITS:
        return spec
    from vision_longhorn.data.sharding import make_digits  # which imports torch

    folder = Path("data", DIGITS)
    if accelerator.is_local_main_process:
        make_digits(folder)
    accelerator.wait_for_everyone()
    return str(folder)
