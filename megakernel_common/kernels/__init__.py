"""Compiles, loads and launches the CUDA kernels of csrc.

Reading order: declarations (how structs that cross to the kernels are declared and checked),
program (what is compiled), module (what is launched), loader (which of two paths does it).
"""
