"""Sweeps on a device: each layer's experts cross the link once for all micro-batches, while the CPU runs attention."""
