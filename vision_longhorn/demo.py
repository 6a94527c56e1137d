"""The built-in demo set, scikit-learn's handwritten digits, as a place of data."""

from pathlib import Path

DIGITS = "digits"  # what a user gives as --data


def locate_data(spec, accelerator):
    """`spec` itself, or the folder of the built-in digits, which are made in ./data/digits where they are missing."""
    if spec != DIGITS:
        return spec
    from vision_longhorn.data.sharding import make_digits  # which imports torch

    folder = Path("data", DIGITS)
    if accelerator.is_local_main_process:
        make_digits(folder)
    accelerator.wait_for_everyone()
    return str(folder)
