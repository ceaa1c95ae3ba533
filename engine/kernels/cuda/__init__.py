"""Kernels in CUDA C, compiled on the user's machine by the compiler in PyTorch's own packages.

`src` has the sources, `compiled` keeps what the compiler makes of them, and `driver` starts it; the others say what is
started with what. Nothing here needs a compiler, a toolkit or a card to be imported.
"""
