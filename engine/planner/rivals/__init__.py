"""Decode speeds that other programs published, next to what this model of a step's time predicts."""
