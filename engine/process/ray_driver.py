"""Speaks to a Ray cluster for a job: `python -m engine.process.ray_driver ADDRESS`, `NodeCommand`s in, `ClusterEvent`s
out.

Ray is a program in the program: it has signals, threads and an end of its own (a driver whose cluster is gone is ended
by it after a minute).  So it runs in this process, which decides nothing: `engine.remote.ray_rows` does.  When its
commands end, so does this process, and Ray ends the actors with it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine.common.channel import ANY_LENGTH, Channel
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import passed_over
from engine.common.installed import bundle, version
from engine.process.ray_node import NodeActor
from engine.process.streams import claimed_pipes
from engine.protocol import ClusterNode, ClusterNodes, Failed, NodeGone, StartNode, decode, encode, node_of

RAY = "2.60"
"""The series of versions that works with ours; a cluster has one version on all its nodes."""
INSTALL = f'pip install "ray=={RAY}.*" in Switchyard\'s environment'
"""By Ray's own name: the index has another project called `switchyard`."""
_NODES_S = 2.0
_TAKE_S = 1.0
_PROXY = "ray://"
_PORTS = 2**16
_REACH_S = 10.0
_SIDES = 2
_END_S = 5.0


@dataclass(eq=False)
class _Actor:
    """The engine on a node; what comes from it after its end is left."""

    node: str
    life: int
    handle: Any
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a call came to: Ray puts it into the inbox, so that nobody asks for it again and again."""

    actor: _Actor
    kind: str
    found: Future[Any]


Inbox = queue.SimpleQueue["bytes | _Reply | None"]


class RayDriver:
    """One cluster, as long as there are commands.

    Args:
        ray: the module.
        emit: takes events.
        inbox: commands, None being their end; and what calls came to.
    """

    def __init__(self, ray: Any, emit: Callable[[bytes], None], inbox: Inbox) -> None:
        self._ray, self._emit, self._inbox = ray, emit, inbox
        self._actors: dict[str, _Actor] = {}

    def connect(self, address: str) -> str:
        """Why the cluster at this address cannot be used, as a sentence; empty if it can."""
        installed = str(self._ray.__version__)
        if not installed.startswith(f"{RAY}."):
            return f"Ray {installed} is installed here, and Switchyard works with Ray {RAY}: run {INSTALL}."
        if why := _nobody_at(address):
            return why
        try:
            self._ray.init(
                address=address,
                namespace=f"switchyard-{uuid.uuid4().hex}",
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:
            return _refusal(address, error)
        return ""

    def run(self) -> None:
        tells_at_s = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                if (came := self._inbox.get(timeout=max(0.0, tells_at_s - time.monotonic()))) is None:
                    return
                if isinstance(came, _Reply):
                    self._take(came)
                else:
                    self._do(came)
            if time.monotonic() >= tells_at_s:
                tells_at_s = time.monotonic() + _NODES_S
                self._emit(encode(ClusterNodes(tuple(self._nodes()))))

    def _nodes(self) -> Iterator[ClusterNode]:
        for node in self._ray.nodes():
            if node["Alive"]:
                has, name = node["Resources"], node["NodeName"] or node["NodeManagerAddress"]
                parts = has.get("CPU", 0.0), has.get("GPU", 0.0), int(has.get("memory", 0))
                yield ClusterNode(node["NodeID"], name, node["NodeManagerHostname"], *parts)

    def _do(self, line: bytes) -> None:
        node, life = node_of(line)
        actor = self._actors.get(node)
        if actor is not None and actor.life == life:
            self._call(actor, "tell", line)
        elif isinstance(command := decode(line), StartNode):
            self._start(command, line)

    def _start(self, command: StartNode, line: bytes) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(command.node, soft=False)
        options: dict[str, Any] = {"num_cpus": command.cpus, "num_gpus": command.gpus}
        maker = self._ray.remote(NodeActor).options(
            scheduling_strategy=there, max_concurrency=4, max_restarts=0, max_task_retries=0, **options
        )
        actor = _Actor(command.node, command.life, maker.remote())
        self._actors[actor.node] = actor
        self._call(actor, "begin", actor.node, actor.life, version(), line)
        self._call(actor, "events", _TAKE_S)

    def _call(self, actor: _Actor, kind: str, *values: Any) -> None:
        found = getattr(actor.handle, kind).remote(*values).future()
        found.add_done_callback(lambda done: self._inbox.put(_Reply(actor, kind, done)))

    def _take(self, reply: _Reply) -> None:
        actor = reply.actor
        if actor.has_ended:
            return
        try:
            found = reply.found.result()
        except Exception as error:
            self._end(actor)
            is_other = _has_other_methods(error, reply.kind)
            why = (
                f"it has another Switchyard than the one that asks, which is {version()}"
                if is_other
                else _end_of(error)
            )
            self._emit(encode(NodeGone(actor.node, actor.life, why, refuses=is_other)))
            return
        if reply.kind == "events":
            lines, is_over = found
            for line in lines:
                self._emit(line)
            if is_over:
                self._end(actor)
            else:
                self._call(actor, "events", _TAKE_S)

    def _end(self, actor: _Actor) -> None:
        actor.has_ended = True
        if self._actors.get(actor.node) is actor:
            del self._actors[actor.node]
        with passed_over("An actor had ended by itself"):
            self._ray.kill(actor.handle)


def _nobody_at(address: str) -> str:
    """Why nothing can be reached there, as a sentence: Ray would try for long.  Empty for addresses of other forms."""
    host, _colon, port = address.removeprefix(_PROXY).rpartition(":")
    if not host or not port.isdigit() or int(port) >= _PORTS:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        return _refusal(address, error)
    return ""


def _refusal(address: str, error: Exception) -> str:
    """Why there is no connection, as a sentence for the user."""
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        versions = re.findall(r"Ray: (\S+) Python: (\S+)", text)
        ours = f"Ray {RAY} on all of its computers and on this one, with the same Python"
        if len(versions) != _SIDES:
            return (
                f"The Ray cluster at {address} has another version of Ray or of Python ({text[:200]}): install {ours}."
            )
        (theirs, python), (here, python_here) = versions
        return (
            f"The Ray cluster at {address} runs Ray {theirs} with Python {python}, and this computer Ray {here} with "
            f"Python {python_here}: install {ours}."
        )
    if address.startswith(_PROXY) and ("grpc" in text or "ray[client]" in text):
        return f"An address with {_PROXY} needs Ray's client: run pip install 'ray[client]', or use HOST:PORT."
    return (
        f"No Ray cluster answers at {address} ({type(error).__name__}: {text[:200]}): check the address, and run "
        f"`ray start --address={address}` on this computer, which has to be one of the cluster's nodes."
    )


def _has_other_methods(error: Exception, kind: str) -> bool:
    """Whether the method of that name is missing there, or takes something else."""
    said = getattr(error, "cause", error)  # without the node's traceback
    return isinstance(error, AttributeError | TypeError) and kind in str(said)


def _end_of(error: Exception) -> str:
    """Why an actor is gone, as the end of a sentence."""
    text = " ".join(str(error).split())
    if "No module named 'engine" in text:
        return "Switchyard is not installed there for Ray's Python: install both into one environment on that node"
    kind = type(error).__name__
    if kind == "ActorUnschedulableError":
        return "the node left the cluster"
    if kind in ("ActorDiedError", "ActorUnavailableError", "NodeDiedError", "WorkerCrashedError"):
        return "its process ended"
    return f"{kind}: {text[:200]}"


def main() -> int:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    inbox = Inbox()

    def lost() -> None:
        inbox.put(None)
        time.sleep(_END_S)
        os._exit(1)  # Ray waits for something

    channel = Channel(claimed_pipes(ANY_LENGTH), inbox.put, lost)
    channel.start()
    try:
        _drive(sys.argv[1], channel.send, inbox)
    except EngineError as error:
        channel.send(encode(Failed.of(error)))
        return 1
    finally:
        channel.flush()
    return 0


def _drive(address: str, emit: Callable[[bytes], None], inbox: Inbox) -> None:
    try:
        import ray
    except ImportError:
        lacking = f"is not installed: run {INSTALL}"
        if bundle() is not None:
            lacking = "packages to double-click do not have: use Switchyard's wheels, or a checkout"
        what = f"Jobs on a cluster need Ray, which {lacking}."
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, what) from None
    driver = RayDriver(ray, emit, inbox)
    if why := driver.connect(address):
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, why)
    try:
        driver.run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
