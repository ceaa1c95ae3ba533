"""The machine's and the engine's activity in lanes on one time axis."""
