"""Fuzzes one reader: `python -m tests.fuzz READER --seconds 600 --folder FOLDER`.

Coverage-guided by atheris where that can be imported (`pip install --target FOLDER atheris`, and FOLDER in PYTHONPATH);
else by random mutations of the seeds and the corpus. Inputs that reach something new are put into
FOLDER/corpus, and one that is a fault, which ends the run, into FOLDER/findings.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.readers import Reader

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 256 * 2**20
"""Of memory, beyond the size of the input and what was in use before."""
LONGEST_INPUT = 2**14
_SLOWEST_S = 10
_FAULT = 77
"""Exit code, as atheris has it."""


def main() -> int:
    """Runs until the time is over or something is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("reader")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    arguments = parser.parse_args()
    found, findings = arguments.folder / "corpus", arguments.folder / "findings"
    for folder in (found, findings):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RUST_BACKTRACE"] = "false", "0"
    with contextlib.suppress(ImportError):
        if not arguments.plain:
            return _guided(arguments.reader, arguments.seconds, found, findings)
    return _plain(arguments.reader, arguments.seconds, findings)


def _start(name: str) -> tuple[Reader, list[bytes]]:
    """A reader after its first inputs, and those; from now on memory is limited."""
    from tests.fuzz.readers import READERS

    reader = READERS[name]
    inputs = [*reader.seeds(), *(file.read_bytes() for file in sorted((CORPUS / name).glob("*")))]
    for data in inputs:
        reader.fuzz(data)
    if sys.platform == "linux":
        import resource

        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES + LONGEST_INPUT, -1))
    return reader, inputs


def _guided(name: str, seconds: int, folder: Path, findings: Path) -> int:
    import atheris

    with atheris.instrument_imports(include=["engine", "jinja2"]):
        import tests.fuzz.readers  # noqa: F401
    reader, inputs = _start(name)
    for data in inputs:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        return reader.mutate(data, random)[:most]

    options = [
        f"-max_total_time={seconds}",
        f"-timeout={_SLOWEST_S}",
        f"-max_len={LONGEST_INPUT}",
        f"-artifact_prefix={findings}/",
        "-rss_limit_mb=2048",  # the limit above comes first
        "-len_control=0",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], reader.fuzz, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


def _plain(name: str, seconds: int, findings: Path) -> int:
    reader, inputs = _start(name)
    random = Random(int.from_bytes(os.urandom(8), "big"))
    until = time.monotonic() + seconds
    current = findings / "current"
    runs = 0
    while time.monotonic() < until:
        data = random.choice(inputs)
        for _ in range(random.choice((1, 2, 4))):
            data = reader.mutate(data, random)[:LONGEST_INPUT]
        current.write_bytes(data)  # there is nobody left to do so if it ends the process
        runs += 1
        try:
            reader.fuzz(data)
        except BaseException:
            current.rename(findings / f"crash-{hashlib.sha1(data).hexdigest()}")
            traceback.print_exc()
            return _FAULT
    current.unlink(missing_ok=True)
    sys.stderr.write(f"{runs:,} inputs without a fault\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
