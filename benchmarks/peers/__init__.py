"""The peers of the benches: the library itself, and two programs built for this machine."""
