"""The scan, the short convolution and the gated norm: one folder for each backend, with the same modules in each."""
