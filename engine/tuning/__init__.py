"""Tuning: the machine is measured, plans are made, the best are timed with real tokens, and who won is kept."""
