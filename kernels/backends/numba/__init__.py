"""The Numba backend: compiled loops for CPUs."""
