"""Lanes of what the machine and the engine did, on one time axis."""
