"""How far from its data sheet a machine stays: the only numbers in the model that were fitted, and all there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Factors that hold for every machine, model, schedule and paper alike.

    Attributes:
        arithmetic: share of the peak 16-bit rate that matrix products reach, on a card as on a processor.
        card_memory: share of a card's memory bandwidth that weights are read with.
        host_memory: share of the RAM's theoretical bandwidth that weights and cached keys and values are read with,
            where the machine's profile holds no measurement of it.
        operator_s: seconds that a framework needs to launch one operator.
    """

    arithmetic: float = 0.16
    card_memory: float = 0.55
    host_memory: float = 0.5
    operator_s: float = 20e-6


EFFICIENCY = Efficiency()
"""The factors in use."""

MEANINGS = {
    "arithmetic": "share of the peak 16-bit rate that matrix products reach",
    "card_memory": "share of a card's memory bandwidth at which weights are read",
    "host_memory": "share of the RAM's theoretical bandwidth at which weights and KV are read, where never measured",
    "operator_s": "seconds to launch one operator",
}
