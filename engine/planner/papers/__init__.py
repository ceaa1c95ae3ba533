"""The figures that five papers publish, next to what the simulator predicts."""
