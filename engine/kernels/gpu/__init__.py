"""Experts and linear layers on a graphics card from their records, and the test which kernels a card runs.

The kernels themselves are in `engine.kernels.cuda`.
"""
