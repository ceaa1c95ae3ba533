"""What the expert cache hits, with which policy, and what another size would give."""
