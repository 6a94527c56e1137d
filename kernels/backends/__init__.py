"""The backends: modules that compute the same, `torch` anywhere and `triton.backend` on a GPU."""

from types import ModuleType as Backend  # noqa: F401  (what annotations call such a module)
