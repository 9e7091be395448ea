"""Compiles, loads and launches the CUDA kernels of csrc.

Reading order: structs (what crosses to the kernels), program (what is compiled), module (what is
launched), loader (which of two paths does it), decode (the kernels of talker and code predictor).
"""
