"""Builds and loads the CUDA kernels of csrc."""
