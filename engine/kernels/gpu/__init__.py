"""Experts on a graphics card, computed from the records: Triton kernels, and whether a card runs them.

Nothing in this package but `kernels_*` needs Triton to be imported, so that it can be asked for on any machine.
"""
