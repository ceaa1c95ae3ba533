"""The one scheduler: who is answered alone, who together, and who comes first."""
