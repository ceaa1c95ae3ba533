"""The expert cache: which experts are in the slots of a faster tier, and which are evicted to make room.

Pure bookkeeping on (layer, expert) keys that moves no bytes.  The same code serves VRAM over RAM, RAM over disk, the
shadow simulators, and the replay of recorded traces.
"""
