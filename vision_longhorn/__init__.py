"""Vision Longhorn: the Longhorn state-space model as a vision backbone. Importing it registers its models with timm."""

from pathlib import Path

__version__ = "0.1.0"

# An installed copy has its kernels inside; in a checkout they stand beside this folder, at the top of the repository,
# and a script started there imports this folder whether or not the package is installed.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels" / "contract.py").is_file():
    __path__.append(str(_here.parent))

from .start import is_own_command  # noqa: E402

__all__ = ["VisionLonghorn", "__version__"]

# Importing the models takes seconds. This package's own commands do so when they have read their command line.
if not is_own_command():
    from .vlonghorn import VisionLonghorn  # noqa: E402


def __getattr__(name):
    if name == "VisionLonghorn":
        from .vlonghorn import VisionLonghorn

        return VisionLonghorn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
