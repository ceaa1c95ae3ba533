"""The engine's part of an installed package: which wheels it is, how they come, and how they are put in place."""
