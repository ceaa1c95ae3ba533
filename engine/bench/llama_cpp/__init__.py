"""llama.cpp as a peer of the benches: built for this machine, run in a separate process."""

from engine.bench.llama_cpp.peer import HOW_TO_BUILD, LlamaCppPeer, PeerError, peer_python

__all__ = ["HOW_TO_BUILD", "LlamaCppPeer", "PeerError", "peer_python"]
