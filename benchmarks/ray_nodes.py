"""`python -m benchmarks.ray_nodes`: a Ray cluster on the loopback, for `benchmarks.local_ray`.

Commands on stdin: `add CPUS MEMORY CORE NAME=VALUE...`, CORE being the only one that the node may use, or -1 for all,
and the rest variables of its environment; each is answered by a JSON line with the node's id and its raylet's process.
When they end, the cluster does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

_HERE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
_LOOKS = 600
_TRIES = 4


def _added(cluster: Cluster, **options: int) -> Any:
    """A node; Ray gives up one that starts while the machine is busy with something else."""
    for tries in range(_TRIES):
        try:
            return cluster.add_node(wait=False, **_HERE, **options)
        except Exception:
            if tries == _TRIES - 1:
                raise
    return None


@contextlib.contextmanager
def _handing_down(core: int, variables: dict[str, str]) -> Iterator[None]:
    """What is started meanwhile keeps to this core, and has these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    cores = os.sched_getaffinity(0) if core >= 0 else None
    if cores is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    said, sys.stdout = sys.stdout, sys.stderr

    def say(**about: Any) -> None:
        print(json.dumps(about), file=said, flush=True)

    # The head has no processors: no engine is started there.
    cluster = Cluster(True, False, head_node_args={**_HERE, "num_cpus": 0, "memory": 10**9, "include_dashboard": False})
    say(address=cluster.address)
    for line in sys.stdin:
        _add, cpus, memory, core, *variables = line.split()
        with _handing_down(int(core), dict(each.split("=", 1) for each in variables)):
            node = _added(cluster, num_cpus=int(cpus), memory=int(memory))
        for _ in range(_LOOKS):  # Ray's own wait counts the time in which all of this is stopped
            if any(each["NodeID"] == node.node_id and each["Alive"] for each in cluster.global_state.node_table()):
                break
            time.sleep(0.1)
        (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
        say(node=node.node_id, raylet=raylet.process.pid)
    cluster.shutdown()


if __name__ == "__main__":
    main()
