"""What telemetry reads of a loaded model: its counters, its experts' uses and places, its caches and its memory."""
