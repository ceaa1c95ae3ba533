"""The expert cache: which experts lie in the slots of a faster tier, and which leave when others come.

Pure bookkeeping on (layer, expert) keys: it moves no byte, so the same code serves VRAM over RAM and RAM over disk,
the shadow simulators, and the replay of recorded traces.
"""
