"""A real Ray cluster on the loopback whose nodes can be killed."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil

from benchmarks.local_ray import LocalNode, LocalRay

CHECKOUT = Path(__file__).resolve().parents[1]


class LoopbackRay(LocalRay):
    """Close it, whatever happens.

    Args:
        home: `SWITCHYARD_HOME` of the engines on all nodes.
        nodes: to begin with.
        python: runs the cluster.
    """

    def __init__(self, home: Path, nodes: int, python: str = sys.executable) -> None:
        super().__init__(nodes, python, SWITCHYARD_HOME=str(home), PYTHONPATH=str(CHECKOUT))

    def kill(self, node: LocalNode) -> None:
        """A machine that loses its power: the raylet and all that it began die at once."""
        raylet = psutil.Process(node.raylet)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.remove(node)

    def kill_raylet(self, node: LocalNode) -> None:
        """Only the raylet dies; its children see to themselves."""
        os.kill(node.raylet, signal.SIGKILL)
        self.nodes.remove(node)
