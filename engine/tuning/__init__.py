"""Tuning: measure the machine, plan, time the best plans with real tokens, and save the winner."""
