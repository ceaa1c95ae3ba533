"""A checkpoint directory becomes a model that runs: opened, decided on, read, bound."""

from engine.runtime.loading.whole import load_model as load_model
