"""Vision Longhorn: the Longhorn state-space model as a vision backbone. Importing it registers its models with timm."""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

__all__ = ["VisionLonghorn", "__version__"]
__version__ = "0.2.0"


class _Checkout:
    """Finds the kernels of a checkout, which stand beside this folder. An installed package holds them inside."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = Path(__file__).resolve().parent.parent / "kernels" / "__init__.py"
        is_ours = name == f"{__name__}.kernels" and file.with_name("contract.py").is_file()
        return spec_from_file_location(name, file) if is_ours else None


sys.meta_path.append(_Checkout)  # the last finder: an installed package's own kernels come first


def _is_own_command() -> bool:
    """Tells whether `vision-longhorn`, `python -m vision_longhorn...` or a script with OWN_COMMAND is running."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        words = sys.orig_argv
        return "-m" in words[:-1] and words[words.index("-m") + 1].partition(".")[0] == __name__
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name in ("vision-longhorn", "vision-longhorn.exe") or hasattr(sys.modules["__main__"], "OWN_COMMAND")


if _is_own_command():
    # OpenMP's idle threads would spin, which takes the cores from all other threads: those of the scans on a CPU, and
    # other programs. OpenMP reads this when torch is imported. The models take seconds to import: a command imports
    # them once it has read its command line.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
else:
    from vision_longhorn.models.vlonghorn import VisionLonghorn


def __getattr__(name: str) -> Any:
    """Imports the model, or a module such as `vision_longhorn.hub`, at its first use."""
    if name == "VisionLonghorn":
        return import_module(f"{__name__}.models.vlonghorn").VisionLonghorn
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
