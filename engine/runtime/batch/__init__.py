"""Batches: many rows through the model together, layer after layer, each layer's weights read once for all of them."""
