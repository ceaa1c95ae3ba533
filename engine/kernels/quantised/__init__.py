"""Weights in int8 and int4: their form, how they are found, and how they are computed without native kernels."""
