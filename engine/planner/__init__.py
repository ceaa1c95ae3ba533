"""Placement, batch policy and predicted speed as pure functions of hardware, model and workload: no torch, no device."""
