"""Display names of policies and predictors."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

translate = QCoreApplication.translate

_LONGEST = 40


def policy_name(policy: str) -> str:
    """`LRU`; an unknown policy is shown by its id."""
    known = {
        "lru": "LRU",
        "lfu": "LFU",
        "lfru": "LFRU",
        "fifo": "FIFO",
        "random": translate("Cache", "random"),
        "static": translate("Cache", "static popularity"),
    }
    return known.get(policy, policy[:_LONGEST])


def policy_tip(policy: str) -> str:
    """Which expert a policy evicts."""
    known = {
        "lru": translate("Cache", "Evicts the least recently used expert."),
        "lfu": translate("Cache", "Evicts the least frequently used expert."),
        "lfru": translate("Cache", "Evicts an expert that is used rarely and not recently."),
        "fifo": translate("Cache", "Evicts the oldest expert."),
        "random": translate("Cache", "Evicts a random expert."),
        "static": translate("Cache", "Keeps the most popular experts."),
    }
    return known.get(policy, "")


def predictor_name(predictor: str) -> str:
    """Its display name; an unknown one is shown by its id."""
    known = {
        "previous": translate("Cache", "previous token"),
        "gate": translate("Cache", "next layer's gate"),
        "correlation": translate("Cache", "correlation table"),
        "mlp": translate("Cache", "trained network"),
    }
    return known.get(predictor, predictor[:_LONGEST])
