"""Times this machine: RAM, processor, device, link and disk, each by itself, in seconds.

`sets.QUICK` and `sets.THOROUGH` say what is measured; `measuring.measure_machine` does it and gives
`engine.hardware.measured.Measurements`.
"""
