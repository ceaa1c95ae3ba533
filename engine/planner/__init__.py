"""Placement, batch policy, predicted speed: pure functions of hardware, model and workload; no torch, no device."""
