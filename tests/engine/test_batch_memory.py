"""The memory of a job is that of its budget, however many rows are queued: rows stream from the input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.job_watcher import JobWatcher
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.engine import Engine
from engine.runtime.kv.pages import PageKind, PagePool
from engine.runtime.schedule import continuous_batch
from tests.engine.tiny_families import tiny_checkpoint

_MIB = 2**20
_RAM = 384 * _MIB
_OTHER = 64 * _MIB
"""The journal's cache, code that is first run then, and what the allocator keeps."""
_WIDE = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
"""Keys and values of a page take a megabyte: memory for them, not the number of rows, says how many are under way."""


class _Seen:
    """What a job takes, as it goes: rows read ahead of the answers, pages held, the budget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered = self.ahead = self.most_pages = 0
        self.pools = list[PagePool]()
        self.policies = list[BatchPolicy]()
        asked, take, made, seen = PreparedJob.asked, PagePool.take, continuous_batch.ContinuousBatch.__init__, self

        def counting(job: PreparedJob) -> Iterator[tuple[float, RowRequest | Answer]]:
            for number, row in enumerate(asked(job), 1):
                seen.ahead = max(seen.ahead, number - seen.answered)
                yield row

        def taking(pool: PagePool, kind: PageKind) -> int:
            page = take(pool, kind)
            seen.most_pages = max(seen.most_pages, pool.held)
            return page

        def making(batch: continuous_batch.ContinuousBatch, model: Any, policy: BatchPolicy, **options: Any) -> None:
            made(batch, model, policy, **options)
            seen.pools.append(batch.pool)
            seen.policies.append(policy)

        monkeypatch.setattr(PreparedJob, "asked", counting)
        monkeypatch.setattr(PagePool, "take", taking)
        monkeypatch.setattr(continuous_batch.ContinuousBatch, "__init__", making)

    def run(self, engine: Engine, rows: Path, output: Path) -> int:
        """Rows that one job answers."""
        self.answered = self.ahead = self.most_pages = 0

        def on_answer(_answer: Answer, _question: str) -> None:
            self.answered += 1

        watcher = JobWatcher(lambda *_: None, on_answer, lambda: False, lambda: None, lambda: False)
        job = prepare(BatchJob(str(rows), str(output), sampling=SamplingParams(max_tokens=3)))
        return engine.run_batch(job, watcher).pace.done


def _loaded(folder: Path) -> Engine:
    engine = Engine()
    config = EngineConfig(str(folder), device="cpu", precision="fp32", threads=1, ram_bytes=_RAM)
    engine.load_exactly(config, on_progress=lambda *_: None, cancelled=lambda: False)
    return engine


def _rows(path: Path, count: int) -> Path:
    path.write_text("text\n" + "".join(f"row {row}\n" for row in range(count)))
    return path


def test_rows_are_read_as_there_is_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _loaded(tiny_checkpoint("mixtral", tmp_path / "model", **_WIDE))
    seen = _Seen(monkeypatch)
    try:
        assert seen.run(engine, _rows(tmp_path / "rows.csv", 600), tmp_path / "out.jsonl") == 600
        budget = policy_for(engine._ready()).kv_bytes
    finally:
        engine.unload()
    (pool,), (policy,) = seen.pools, seen.policies
    assert policy.kv_bytes <= budget <= _RAM
    assert 1 < seen.most_pages <= pool.capacity < 600, "all rows had room at once: nothing was shown"
    assert pool.held == 0
    # Those that hold pages, one more that waits for them, and those whose answers await the sweep's end.
    assert seen.ahead <= min(policy.rows, pool.capacity) + 1


def measured(folder: Path, few: Path, many: Path) -> dict[str, int]:
    """In a process of its own, whose high-water mark of memory [bytes] is taken behind each of two jobs.

    It is that of the address space: what `getrusage` says a child process takes over from its parent.
    """

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

    with pytest.MonkeyPatch.context() as patches:
        before, engine, seen = peak(), _loaded(folder), _Seen(patches)
        seen.run(engine, few, few.with_suffix(".jsonl"))
        after_few = peak()
        done = seen.run(engine, many, many.with_suffix(".jsonl"))
        engine.unload()
    pool, policy = seen.pools[-1], seen.policies[-1]
    return {
        "before": before,
        "few": after_few,
        "peak": peak(),
        "done": done,
        "ahead": seen.ahead,
        "most": seen.most_pages,
        "left": pool.held,
        "capacity": pool.capacity,
        "kv": policy.kv_bytes,
    }


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [600, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark of a process is read as Linux tells it")
def test_thousands_of_queued_rows_take_no_more_than_the_budget(rows: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "model", **_WIDE)
    few, many = _rows(tmp_path / "few.csv", 300), _rows(tmp_path / "many.csv", rows)
    command = (
        "import json, sys; from pathlib import Path; from tests.engine.test_batch_memory import measured; "
        "print(json.dumps(measured(*map(Path, sys.argv[1:]))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", command, str(folder), str(few), str(many)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    told = json.loads(found.stdout.splitlines()[-1])
    sys.stdout.write(json.dumps(told) + "\n")
    assert told["done"] == rows
    assert told["most"] <= told["capacity"]
    assert told["left"] == 0
    assert told["ahead"] <= told["capacity"] + 1
    assert told["kv"] < _RAM
    assert told["peak"] - told["before"] < _RAM
    # As many rows as fit are under way in the first job already: thousands more are read as places come free.
    assert told["peak"] - told["few"] < _OTHER
