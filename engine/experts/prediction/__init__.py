"""Foretelling which experts the coming layers will want, and bringing them before they do.

Predictors are measured on the live routing, not believed: one is used while what it saves is more than what it costs.
"""
