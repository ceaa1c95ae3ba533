"""What the engine did and when: spans and counters of its own clocks, told to whoever watches.  No torch in here."""
