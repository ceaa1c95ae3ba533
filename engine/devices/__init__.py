"""Compute devices: memory, streams and events, and the link to the host.

`opening.open_devices` returns `cpu`, `cuda` or `emulated` devices with the same interface: nothing outside this package
and `engine.kernels` depends on the kind.
"""
