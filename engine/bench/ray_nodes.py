"""`python -m engine.bench.ray_nodes`: a Ray cluster on the loopback, for `engine.bench.local_ray`.

Commands on stdin: `add CPUS MEMORY CORE`, CORE being the only one that the node may use, or -1 for all; each is
answered by a JSON line with the node's id and its raylet's process.  When they end, the cluster does.
"""

from __future__ import annotations

import json
import os
import sys
import time
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


def main() -> None:
    """Runs the process."""
    said, sys.stdout = sys.stdout, sys.stderr

    def say(**about: Any) -> None:
        print(json.dumps(about), file=said, flush=True)

    # The head has no processors: no engine is started there.
    cluster = Cluster(True, False, head_node_args={**_HERE, "num_cpus": 0, "memory": 10**9, "include_dashboard": False})
    say(address=cluster.address)
    for line in sys.stdin:
        _add, cpus, memory, core = line.split()
        if int(core) >= 0:
            mine = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {int(core)})  # what it starts meanwhile keeps to it
        node = _added(cluster, num_cpus=int(cpus), memory=int(memory))
        if int(core) >= 0:
            os.sched_setaffinity(0, mine)
        for _ in range(_LOOKS):  # Ray's own wait counts the time in which all of this is stopped
            if any(each["NodeID"] == node.node_id and each["Alive"] for each in cluster.global_state.node_table()):
                break
            time.sleep(0.1)
        (raylet,) = node.all_processes[PROCESS_TYPE_RAYLET]
        say(node=node.node_id, raylet=raylet.process.pid)
    cluster.shutdown()


if __name__ == "__main__":
    main()
