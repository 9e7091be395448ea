"""The kernels of synthesis: structs that cross to them, their programs, launches.

Reading order: structs (what crosses to the kernels), decode (the kernels of talker and code
predictor). `megakernel_common.kernels` compiles and launches them.
"""
