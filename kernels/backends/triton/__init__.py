"""The Triton backend: what runs on a GPU, and in Triton's interpreter."""

from . import conv, norm, scan
from .lanes import INTERPRETED

__all__ = ["INTERPRETED", "conv", "norm", "scan"]
