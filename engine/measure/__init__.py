"""Benchmarks this machine: RAM, CPU, device, link and disk, each on its own.

`measuring.QUICK` and `measuring.THOROUGH` define what is measured; `measuring.measure_machine` measures and returns
`engine.hardware.measured.Measurements`.
"""
