"""A csv of two gigabytes is looked at, begun and stopped like a small one, in no more memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
