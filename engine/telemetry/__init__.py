"""Telemetry: spans and counters on the engine's clock.  No torch here.

It is hooked in at four kinds of places, so that what runs through them has its spans without recording anything:

- streams of devices (`engine.devices`): every copy, and all submitted work that has a label;
- kernels: a layer's experts (`engine.experts.executor`) and attention on the CPU;
- tiers: reads from disk, and which experts a step used and found there;
- steps: the sessions and the batch executor, which know requests, forwards and tokens.
"""
