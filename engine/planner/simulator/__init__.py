"""A deterministic discrete-event simulator: schedules in, the live telemetry's kind of spans out."""
