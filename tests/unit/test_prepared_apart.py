"""What benches prepare of models goes with them, however they end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.opened import prepared_apart
from engine.checkpoint.library import converted_dir, converted_path
from engine.common.paths import PREPARED_VARIABLE, data_dir

_BENCH = """
import time
from engine.bench.opened import prepared_apart
with prepared_apart() as folder:
    (folder / "a.gguf").write_bytes(b"prepared")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_is_prepared_meanwhile_is_gone_afterwards(tmp_path: Path) -> None:
    usual = converted_path(tmp_path, "int4")
    assert usual.parent == converted_dir() == data_dir() / "converted"
    with prepared_apart() as folder:
        meanwhile = converted_path(tmp_path, "int4")
        assert meanwhile == folder / usual.name
        meanwhile.write_bytes(b"prepared")
        with prepared_apart() as inner:
            assert inner != folder
            assert converted_path(tmp_path, "int4").parent == inner
        assert converted_path(tmp_path, "int4") == meanwhile
        assert meanwhile.exists()
    assert converted_path(tmp_path, "int4") == usual
    assert PREPARED_VARIABLE not in os.environ
    assert list(usual.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_stopped_leaves_nothing_for_long(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BENCH], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as bench:
        assert bench.stdout is not None
        folder = Path(bench.stdout.readline().strip())
        assert folder.parent == converted_dir()
        assert (folder / "a.gguf").exists()
        bench.send_signal(how)
        bench.wait()
    assert folder.exists() is (how == signal.SIGKILL)
    with prepared_apart():
        assert not folder.exists()
    assert list(converted_dir().iterdir()) == []
