import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.checkpoint.importing import discard, put_in_place, staging_folder, sweep

CHECKOUT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from engine.checkpoint.importing import staging_folder
with staging_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("done")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_folder_is_put_in_place_whole_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "models" / "new"
    with staging_folder(target.parent) as staging:
        made = staging / "model"
        made.mkdir()
        (made / "file").write_text("whole")
        put_in_place(made, target)
    assert (target / "file").read_text() == "whole"
    assert [entry.name for entry in target.parent.iterdir()] == ["new"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_folder(tmp_path) as staging:
            (staging / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_old_folder_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("")
    with staging_folder(tmp_path) as staging:
        (staging / "made").mkdir()
        put_in_place(staging / "made", target)
    assert list(target.iterdir()) == []
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "ready\n"
        sweep(tmp_path)
        assert len(list(tmp_path.glob("*/half"))) == 1
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def make(number: int) -> None:
        with staging_folder(tmp_path) as staging:
            made = staging / "made"
            made.mkdir()
            for name in ("a", "b"):
                (made / name).write_text(str(number))
            put_in_place(made, target)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(12)))
    assert (target / "a").read_text() == (target / "b").read_text()
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_discarded_without_what_it_points_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    link = tmp_path / "link"
    link.symlink_to(elsewhere, target_is_directory=True)
    discard(link)
    assert not link.exists()
    assert (elsewhere / "precious").exists()
