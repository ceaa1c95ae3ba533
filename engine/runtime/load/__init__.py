"""A checkpoint directory becomes a model that runs: opened, decided on, read, bound."""
