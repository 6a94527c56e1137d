"""The torch backend: what runs on a CPU, and wherever Triton is absent. Its docstrings are the contract of both."""
