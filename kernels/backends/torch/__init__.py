"""The torch backend: what runs on a CPU, and wherever Triton is absent. Its docstrings are the contract of both."""

from . import conv, norm, scan

__all__ = ["conv", "norm", "scan"]
