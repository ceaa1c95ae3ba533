"""Triton kernels that compute experts on a graphics card from their records, and the test whether a card runs them.

Only `kernels_*` import Triton, so the rest of this package can be imported on any machine.
"""
