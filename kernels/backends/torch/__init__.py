"""The torch backend: for float64, and wherever Triton and Numba are absent. Its docstrings are the contract of all."""
