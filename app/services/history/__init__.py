"""The Monitor's history, in bounded memory: recent spans one by one, older ones as sums per bucket."""
