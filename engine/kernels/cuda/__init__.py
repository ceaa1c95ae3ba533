"""Kernels in CUDA C, compiled on the user's machine by the compiler in PyTorch's own packages.

`src` has the sources, `nvrtc` compiles them, `compiled` keeps what came out, `driver` starts it; `hip` does both on
AMD's cards. `products`, `unpack`, `attention`, `norm`, `rotary` and `router` are what the engine calls. Nothing here
needs a compiler, a toolkit or a card to be imported.
"""
