"""Files that strangers made end in an answer or in one line that says why not, in little time and memory."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import CORPUS, MOST_BYTES
from tests.fuzz.readers import READERS

_MINUTES = float(os.environ.get("SWITCHYARD_FUZZ_MINUTES", "30"))
"""For all readers together."""


def test_every_reader_has_a_corpus() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == READERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_what_fuzzers_found(name: str) -> None:
    """Whatever has been a fault once, and what together reaches most of the code, is read or refused."""
    reader = READERS[name]
    for data in [*reader.seeds(), *(file.read_bytes() for file in sorted((CORPUS / name).iterdir()))]:
        tracemalloc.start()
        try:
            reader.fuzz(data)
            assert tracemalloc.get_traced_memory()[1] <= MOST_BYTES + len(data)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
def test_mutations_of_the_seeds(name: str) -> None:
    """The fuzzer runs, for a moment and without atheris."""
    reader = READERS[name]
    random = Random(name)
    for _ in range(10):
        reader.fuzz(reader.mutate(random.choice(reader.seeds()), random))


@pytest.mark.exhaustive
@pytest.mark.timeout(60 * _MINUTES + 600)
@pytest.mark.parametrize("name", READERS)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    """Guided by coverage where atheris can be imported, else at random."""
    seconds = max(1, round(60 * _MINUTES / len(READERS)))
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(seconds), "--folder", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds + 300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CORPUS.parents[2]), *filter(None, sys.path)])},
    )  # fmt: skip
    found = [(file.name, file.read_bytes()[:2000]) for file in (tmp_path / "findings").iterdir()]
    assert not found, f"{found}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, done.stderr[-4000:]
