"""A download whose process is killed again and again, over a line on which everything goes wrong."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.parts import MOST_CONNECTIONS
from engine.checkpoint.manifest import damaged_files, read_manifest
from tests.hub_server import Fault, HubServer

CHECKOUT = Path(__file__).resolve().parents[2]
STOPS = (401, 403, 404)
"""Answers of the hub after which only people can help."""
MOST_RAM_KB = 200_000


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(seed=16) as server:
        yield server


def drawn_files(folder: Path, count: int, total: int) -> dict[str, bytes | Path]:
    """Files of drawn sizes, the weights on disk; some smaller than a part, one empty."""
    drawn = random.Random(7)
    shares = [drawn.random() ** 2 for _ in range(count - 3)]
    files: dict[str, bytes | Path] = {"config.json": b"{}", "empty.txt": b"", "tokenizer.json": drawn.randbytes(30_000)}
    for number, share in enumerate(shares):
        left = size = max(1, round(total * share / sum(shares)))
        path = folder / f"model-{number:05}.safetensors"
        with path.open("wb") as file:
            while left:
                left -= file.write(drawn.randbytes(min(left, 2**20)))
        assert path.stat().st_size == size
        files[path.name] = path
    return files


@dataclass
class Story:
    """Runs a download in processes that are killed, until it is there."""

    hub: HubServer
    key: str
    part: int
    kills: int = 0
    most_ram_kb: int = 0

    def life(self, until_sent: int | None, full_after: int = 0) -> dict[str, str] | None:
        """One process, killed once the server has sent so many bytes in all; what it says if it ends before."""
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.download_child", self.key, str(self.part), str(full_after)],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
        )
        try:
            while child.poll() is None:
                if until_sent is not None and self.hub.sent_bytes() >= until_sent:
                    child.send_signal(signal.SIGKILL)
                    self.kills += 1
                    child.wait()
                    return None
                self._look_at_ram(child.pid)
                time.sleep(0.01)
            ended: dict[str, str] = json.loads(child.stdout.read())
            return ended
        finally:
            child.kill()
            child.communicate()

    def _look_at_ram(self, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # gone, or another system
            return
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                self.most_ram_kb = max(self.most_ram_kb, int(line.split()[1]))


def sent_twice(hub: HubServer) -> Counter[str]:
    """Bytes of each file that were sent more than once."""
    again: Counter[str] = Counter()
    spans: dict[str, list[tuple[int, int]]] = {}
    for asked in hub.asked():
        if asked.status in (200, 206) and asked.sent:
            spans.setdefault(asked.path, []).append((asked.start, asked.start + asked.sent))
    for path, found in spans.items():
        reached = 0
        for start, end in sorted(found):
            again[path] += max(0, min(reached, end) - start)
            reached = max(reached, end)
    return again


def assert_story_ends_well(
    hub: HubServer, files: dict[str, bytes | Path], part: int, kills: int, wrong: str, *, stops_too: bool
) -> None:
    total = sum(len(each) if isinstance(each, bytes) else each.stat().st_size for each in files.values())
    repo = hub.add("org/model", files)
    added = queue.add(hub.candidate("org/model"))
    story = Story(hub, added.key, part)
    drawn = random.Random(3)
    hub.order(*every_fault(8 if stops_too else 1, part, wrong))
    if stops_too:
        hub.order(*(Fault("status", host="hub", value=code, skip=40 + 50 * n) for n, code in enumerate(STOPS)))
    moments = sorted(drawn.uniform(0.01, 0.95) * total for _ in range(kills))
    full_after = part * 3 if stops_too else 0
    ended: dict[str, str] | None = None
    stops: Counter[str] = Counter()
    while ended is None or ended["state"] != "done":
        moment = next((each for each in moments if each > hub.sent_bytes()), None)
        if moment is None and story.kills < kills:  # faults and kills have it fetched some of it again
            moment = hub.sent_bytes() + drawn.uniform(0, total / 50)
        ended = story.life(moment if story.kills < kills else None, full_after)
        full_after = 0  # somebody made room
        if ended is not None and ended["state"] == "failed":
            words = {"download_failed": "token", "model_not_found": "no longer on the hub", "disk_full": "is full"}
            assert words[ended["error_code"]] in ended["problem"], ended
            stops[ended["error_code"]] += 1
            queue.resume(added.key)
    target = added.folder
    for path in files:
        with repo.open(path) as file:
            expected = hashlib.file_digest(file, "sha256").hexdigest()
        with (target / path).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == expected, path
    manifest = read_manifest(target)
    assert manifest is not None
    assert damaged_files(target, manifest) == {}
    assert story.kills == kills
    assert 0 < story.most_ram_kb < MOST_RAM_KB or sys.platform != "linux"
    again = sent_twice(hub)
    met = sum(fault.met for fault in hub.faults)
    # Which part of a file is the wrong one nobody can tell but by fetching the parts again.
    searched = sum(again.pop(path, 0) for path in list(again) if path == wrong)
    assert searched <= repo.size(wrong) + part * (met + kills * MOST_CONNECTIONS)
    assert again.total() <= part * (met + sum(stops.values()) * MOST_CONNECTIONS + kills * MOST_CONNECTIONS)
    sys.stdout.write(
        f"{total / 1e6:.0f} MB, {kills} kills, {met} faults, stops {dict(stops)}, {story.most_ram_kb // 1000} MB RAM; "
        f"{again.total() / 1e6:.1f} MB sent twice, {again.total() / part / (kills + met):.2f} parts a kill or fault\n"
    )


def every_fault(times: int, part: int, wrong: str) -> list[Fault]:
    """Everything that can go wrong, at drawn moments."""
    common = {"path": "*.safetensors", "host": "second", "times": times, "chance": 0.03}
    return [
        Fault("drop", after_bytes=part // 3, **common),
        Fault("drop", after_bytes=0, **common),
        Fault("stall", after_bytes=part // 2, **{**common, "times": max(1, times // 4)}),
        Fault("short", value=1000, **common),
        Fault("long", value=1000, **common),
        Fault("etag", **common),
        Fault("wrong_range", value=5, **common),
        Fault("no_range", **common),
        Fault("gzip", **common),
        Fault("refuse", **common),
        Fault("status", value=416, **common),
        Fault("status", value=500, **common),
        Fault("status", value=429, headers={"Retry-After": "0"}, **{**common, "times": 2}),
        Fault("status", value=403, **common),
        Fault("wrong_bytes", path=wrong, host="second", times=1, after_bytes=part // 5),
    ]


def test_a_few_kills_of_a_small_download(hub: HubServer, tmp_path: Path) -> None:
    hub.bytes_per_s = 3_000_000
    files = drawn_files(tmp_path, 6, 2_000_000)
    assert_story_ends_well(hub, files, 64 * 1024, 2, "model-00001.safetensors", stops_too=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_fifty_kills_of_fifty_files(hub: HubServer, tmp_path: Path) -> None:
    hub.bytes_per_s = 60_000_000
    files = drawn_files(tmp_path, 50, 2_000_000_000)
    assert_story_ends_well(hub, files, 2**20, 50, "model-00007.safetensors", stops_too=True)
    for fault in hub.faults:
        assert fault.met, fault
