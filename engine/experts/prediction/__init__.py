"""Predicts which experts the next layers will need, and prefetches them.

Predictors are measured on the live routing: one is used only while it saves more than it costs.
"""
