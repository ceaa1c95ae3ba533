"""`kill -9` at random moments of one job, whose rows are all answered exactly once, in the memory of its budget."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.batch_files.job_watcher import JobWatcher
from engine.batch_files.journal import KnownJob, known_jobs, read_answers
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.result_file import harmless
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.engine import Engine
from engine.runtime.kv.pages import PageKind, PagePool
from engine.runtime.schedule import continuous_batch
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import until

_PATIENCE_S = 900.0
_MOST_TOKENS = 20
_COUNTED = ("answer", "finish_reason", "prompt_tokens", "generated_tokens", "problem")


class JobUnderFire:
    """One job that the command line and the window work on in turn, and what is known of its answers.

    Args:
        rows: of the input.
    """

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        self.folder, self.rows = folder, rows
        self.chance = random.Random(seed)
        self.kills = {"command": 0, "worker": 0, "window": 0, "writing": 0}
        self._known: dict[int, str] = {}
        self._window: subprocess.Popen[bytes] | None = None
        tiny_checkpoint("qwen3_moe", folder / "model")
        (folder / "in.jsonl").write_text(
            "".join(json.dumps({"text": f"Row {row}?", "id": row}) + "\n" for row in range(rows))
        )
        (folder / "home" / "config").mkdir(parents=True)
        settings = {"default_model": str(folder / "model")}
        (folder / "home" / "config" / "settings.json").write_text(json.dumps(settings))
        self._environment = {
            **os.environ,
            "SWITCHYARD_HOME": str(folder / "home"),
            "QT_QPA_PLATFORM": "offscreen",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def output(self) -> Path:
        return self.folder / "out.csv"

    # --- who works on it ------------------------------------------------------------------------------

    def command(self) -> subprocess.Popen[bytes]:
        """The command line, which goes on with the job."""
        words = ["-m", "engine.cli", "batch", str(self.folder / "in.jsonl"), "-o", str(self.output), "--resume"]
        words += ["--model", str(self.folder / "model"), "--max-tokens", str(_MOST_TOKENS), "--json"]
        return self._process(words)

    def window(self) -> subprocess.Popen[bytes]:
        """The window, in which somebody clicks Resume; the one that is open, if one is."""
        if self._window is None:
            words = ["-m", "tests.app.batch_window", str(self.folder / "in.jsonl"), str(self.output)]
            self._window = self._process([*words, str(_MOST_TOKENS)])
        return self._window

    def close_window(self) -> None:
        """By force, with its worker."""
        if self._window is not None:
            workers = _workers(self._window)
            self._window.kill()
            self._window.communicate()
            self._window = None
            _gone, alive = psutil.wait_procs(workers, timeout=_PATIENCE_S)
            assert not alive, "a worker outlived its window"

    def _process(self, words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words], env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    # --- who is killed --------------------------------------------------------------------------------

    def kill_command(self) -> None:
        with self.command() as process:
            until(lambda: _is_running() or process.poll() is not None, _PATIENCE_S, 0.02)
            self._a_moment()
            process.kill()
        self._was_killed("command")

    def kill_worker(self) -> None:
        window = self.window()
        until(lambda: _is_running() or window.poll() is not None, _PATIENCE_S, 0.02)
        self._a_moment()
        for worker in _workers(window):
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(_PATIENCE_S)
        self._was_killed("worker")

    def kill_window(self) -> None:
        window = self.window()
        until(lambda: _is_running() or window.poll() is not None, _PATIENCE_S, 0.02)
        self._a_moment()
        self.close_window()
        self._was_killed("window")

    def kill_while_writing(self) -> None:
        """Of a job that is done: the command line writes its result again, and dies in the middle of that."""
        with self.command() as process:
            parts = self.folder.glob
            until(lambda: any(parts(".out.csv.*.part")) or process.poll() is not None, _PATIENCE_S, 0.02)
            time.sleep(self.chance.uniform(0, 0.05))
            process.kill()
        self._was_killed("writing")

    def _a_moment(self) -> None:
        time.sleep(self.chance.uniform(0, 0.8))

    # --- what must be so ------------------------------------------------------------------------------

    def _was_killed(self, what: str) -> None:
        self.kills[what] += 1
        now = answers_of(_job(), self.rows)
        assert self._known.items() <= now.items(), "an answer that was kept is gone, or another"
        self._known = now
        if self.output.exists():
            self._require_whole(set(now))

    def finish(self) -> None:
        """The job is done by the command line, and everything is there once."""
        self.close_window()
        with self.command() as process:
            text, _ = process.communicate()
        assert process.returncode == 0
        assert json.loads(text)["done"] == self.rows
        self._was_killed("command")
        self.kills["command"] -= 1
        assert set(self._known) == set(range(self.rows))
        self._require_whole(set(range(self.rows)))

    def _require_whole(self, may_be_there: set[int]) -> None:
        """The result holds each of its rows once, with the very answer that was kept."""
        with open(self.output, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        ids = [int(row["id"]) for row in rows]
        assert ids == sorted(set(ids)), "a row is in the result twice, or out of its order"
        assert set(ids) <= may_be_there
        assert all(all(row[name] is not None for name in _COUNTED) for row in rows), "a row was cut"
        assert all(row["finish_reason"] in ("stop", "length") for row in rows)
        assert all(row["answer"] == harmless(self._known[int(row["id"])]) for row in rows)


def answers_of(job: KnownJob | None, rows: int) -> dict[int, str]:
    """What the journal holds."""
    answers = [] if job is None else read_answers(job.journal, limit=rows + 1)
    assert len({answer.row for answer in answers}) == len(answers)
    return {answer.row: answer.text for answer in answers}


def _job() -> KnownJob | None:
    jobs = known_jobs()
    assert len(jobs) <= 1
    return jobs[0] if jobs else None


def _is_running() -> bool:
    return any(job.running for job in known_jobs())


def _workers(window: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(window.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "engine.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


@contextlib.contextmanager
def _under_fire(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, seed: int) -> Iterator[JobUnderFire]:
    monkeypatch.setenv("SWITCHYARD_HOME", str(folder / "home"))
    # A window's socket lies in the temporary folder; one that is killed leaves it there.
    with tempfile.TemporaryDirectory(prefix="w-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        job = JobUnderFire(folder, rows, seed)
        try:
            yield job
        finally:
            job.close_window()


@pytest.mark.timeout(600)
def test_a_job_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=120, seed=1) as job:
        job.kill_command()
        assert len(job._known) < job.rows
        job.finish()
        assert list(tmp_path.glob(".*")) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_job_survives_a_kill_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=400, seed=1) as job:
        job.kill_command()
        job.kill_worker()
        job.kill_window()
        job.finish()
        job.kill_while_writing()
        job.finish()
        assert list(tmp_path.glob(".*")) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_kills_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=30_000, seed=2) as job:
        kinds = [job.kill_command] * 30 + [job.kill_worker] * 35 + [job.kill_window] * 25
        job.chance.shuffle(kinds)
        for kill in kinds:
            if kill == job.kill_command:
                job.close_window()
            kill()
            done = len(job._known)
            assert done < job.rows, f"the job was over after {sum(job.kills.values())} kills: give it more rows"
        job.finish()
        for _ in range(10):
            job.kill_while_writing()
        job.finish()
        assert sum(job.kills.values()) == 100
        assert list(tmp_path.glob(".*")) == []


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
            seen.ahead = 0  # of the job itself: a plan reads some before
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
        "import json, sys; from pathlib import Path; from tests.engine.test_batch_kills import measured; "
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


_BYTES = 2 * 10**9

_LOOK_AND_RUN = """
import json, resource, sys, time
from pathlib import Path
from engine.batch_files.opening import InputForm
from engine.common.config import BatchJob
from app.services.batch_input import count_rows, look_at
from tests.engine.shuffled_executor import ShuffledExecutor, Watch, run_job

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

job = BatchJob(sys.argv[1], sys.argv[2])
before, begun = peak(), time.monotonic()
seen = look_at(Path(job.input), InputForm())
counted = count_rows(Path(job.input), InputForm(), lambda: False)
looked_s = time.monotonic() - begun
watch = Watch(cancel_after=int(sys.argv[3]))
begun = time.monotonic()
ending = run_job(job, ShuffledExecutor(room=64), watch)
print(json.dumps({
    "columns": seen.columns, "rows": len(seen.rows), "counted": counted, "looked_s": looked_s,
    "ran_s": time.monotonic() - begun, "finished": ending.finished, "done": ending.pace.done,
    "written": ending.written, "total": ending.pace.total, "grown": peak() - before,
}))
"""


def _big_csv(path: Path, size: int) -> int:
    """Rows with quotes and newlines in them, written in blocks; their number."""
    lines = "".join(f'{{row:}}{row:04},"Row {row} says ""hi"",\nand goes on {"x" * 900}"\n' for row in range(1000))
    blocks = 0
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write("id,text\n")
        while file.tell() < size:
            file.write(lines.replace("{row:}", str(blocks)))
            blocks += 1
    return 1000 * blocks


def _looked_at_and_run(path: Path, rows: int) -> dict[str, object]:
    command = [sys.executable, "-c", _LOOK_AND_RUN, str(path), str(path.with_name("out.csv")), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(120 * 10**6, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(_BYTES, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)]),
    ],
)
def test_a_big_csv_takes_no_more_memory_than_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    path = tmp_path / "big.csv"
    rows = _big_csv(path, size)
    try:
        found = _looked_at_and_run(path, 3000)
    finally:
        path.unlink()
    sys.stdout.write(json.dumps(found) + "\n")
    assert (found["columns"], found["rows"], found["counted"]) == (["id", "text"], 5, None)
    assert (found["finished"], found["written"]) == (False, found["done"])
    assert isinstance(found["total"], int)
    assert abs(found["total"] - rows) < 0.05 * rows, "judged by what has been read"
    assert isinstance(found["grown"], int)
    assert found["grown"] < 100 * 10**6, "what is held grows with the file"
