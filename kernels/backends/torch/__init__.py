"""The torch backend: for CPUs, and wherever Triton is absent. Its docstrings are the contract of both backends."""
