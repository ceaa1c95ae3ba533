"""Every figure that the five papers publish, beside what the simulator says."""
