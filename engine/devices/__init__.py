"""What a compute device is: its memory, its streams and their events, its link to the host.

`opening.open_devices` gives `cpu`, `cuda` or `emulated` devices that look the same to everyone else: nothing outside
this package and `engine.kernels` asks which kind it has.
"""
