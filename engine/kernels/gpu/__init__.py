"""Experts and linear layers on a graphics card from their records, and the test which kernels a card runs.

The products themselves are Triton's (`products` and `kernels_*`, which alone import it) or those in CUDA C
(`engine.kernels.cuda`), so the rest of this package can be imported on any machine.
"""
