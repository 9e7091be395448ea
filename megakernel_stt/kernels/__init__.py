"""The kernels of recognition: structs that cross to them, their program, launches.

`megakernel_common.kernels` compiles and loads them.
"""
