"""Telemetry: spans and counters on the engine's clock.  No torch here."""
