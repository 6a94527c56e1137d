"""Vision Longhorn: the Longhorn state-space model as a vision backbone. Importing it registers its models with timm."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


class _Checkout:
    """Finds the kernels where a checkout has them, beside this folder. (An installed copy has them inside.)"""

    folder = Path(__file__).resolve().parent.parent / "kernels"

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != f"{__name__}.kernels" or not (cls.folder / "contract.py").is_file():
            return None
        return spec_from_file_location(name, cls.folder / "__init__.py", submodule_search_locations=[str(cls.folder)])


sys.meta_path.append(_Checkout)  # asked last, where the package itself holds no kernels

from vision_longhorn.command_line.start import is_own_command  # noqa: E402

__all__ = ["VisionLonghorn", "__version__"]

# Importing the models takes seconds. This package's own commands do so when they have read their command line.
if not is_own_command():
    from vision_longhorn.models.vlonghorn import VisionLonghorn


def __getattr__(name: str) -> Any:
    """The model, and modules such as `vision_longhorn.hub`, when they are first asked for."""
    if name == "VisionLonghorn":
        from vision_longhorn.models.vlonghorn import VisionLonghorn

        return VisionLonghorn
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
