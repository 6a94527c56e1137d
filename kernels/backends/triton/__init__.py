"""The Triton backend: what runs on a GPU, and in Triton's interpreter."""
