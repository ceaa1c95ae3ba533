"""Downloads against a hub on this machine: what arrives is what is there, whatever happens on the way."""

import errno
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from engine.checkpoint.downloads import parts, queue, records, source, transfer
from engine.checkpoint.downloads.parts import FIRST_CONNECTIONS
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.downloads.records import Progress
from engine.checkpoint.hub import http as tokens
from engine.checkpoint.manifest import damaged_files, read_manifest
from engine.cli import main
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import data_dir, models_dir
from engine.verbs.models import hub as pull
from engine.verbs.models.library import ProgressLine
from tests.hub_server import Fault, HubServer, Repo
from tests.quick_downloads import make_quick
from tests.refusals import refused

PART = 64 * 1024
FILES = {
    "config.json": b'{"model_type": "none"}',
    "empty.txt": b"",
    "model-00001-of-00002.safetensors": random.Random(1).randbytes(5 * PART + 17),
    "model-00002-of-00002.safetensors": random.Random(2).randbytes(3 * PART),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TOTAL = sum(map(len, FILES.values()))


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch, PART)


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    return hub.add("org/model", FILES)


def fetched(hub: HubServer) -> Download:
    return queue.run(queue.add(hub.candidate("org/model")).key)


def assert_whole(download: Download, files: dict[str, bytes] | None = None) -> None:
    assert (download.state, download.problem) == (DownloadState.DONE, "")
    assert download.done_bytes == download.total_bytes
    for path, content in (files or FILES).items():
        assert (download.folder / path).read_bytes() == content, path
    manifest = read_manifest(download.folder)
    assert {record.path for record in manifest.files} == set(files or FILES)
    assert damaged_files(download.folder, manifest) == {}
    assert not list(download.folder.parent.glob(".download-*"))


def test_every_byte_once(hub: HubServer, repo: Repo) -> None:
    done = fetched(hub)
    assert_whole(done)
    assert hub.sent_bytes() == TOTAL
    assert {each.host for each in hub.asked(FIRST)} == {"hub", "second"}
    assert [each.state for each in queue.downloads()] == [DownloadState.DONE]
    assert queue.add(hub.candidate("org/model")).state is DownloadState.DONE
    queue.cancel(done.key)
    assert queue.downloads() == []
    assert done.folder.is_dir()
    with pytest.raises(EngineError, match="on this PC already"):
        queue.add(hub.candidate("org/model"))


def test_the_commit_and_the_etag_are_pinned(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FIRST_CONNECTIONS", 1)
    assert_whole(fetched(hub))
    first, *others = hub.asked(FIRST, "second")
    assert first.if_range == ""
    assert {each.if_range for each in others} == {f'"second-{repo.digests(FIRST)[0][:32]}"'}
    assert len(hub.asked(FIRST, "hub")) == 1
    assert {each.range for each in hub.asked("*")} >= {f"bytes={n * PART}-{n * PART + PART - 1}" for n in range(5)}


FAULTS = {
    "drop": Fault("drop", FIRST, "second", times=3, after_bytes=10_000),
    "drop at once": Fault("drop", "*", times=3),
    "stall": Fault("stall", FIRST, "second", times=1, after_bytes=20_000),
    "short": Fault("short", FIRST, "second", times=2, value=100),
    "long": Fault("long", FIRST, "second", times=2, value=5000),
    "endless": Fault("endless", FIRST, "second", times=2),
    "status 500": Fault("status", FIRST, times=4, value=500),
    "status 503": Fault("status", FIRST, times=2, value=503, headers={"Retry-After": "0"}),
    "status 429": Fault("status", FIRST, times=2, value=429, headers={"Retry-After": "0"}),
    "status 416": Fault("status", FIRST, "second", times=2, value=416),
    "address used up": Fault("status", FIRST, "second", times=3, value=403),
    "address gone": Fault("status", FIRST, "second", times=2, value=404),
    "etag": Fault("etag", FIRST, "second", times=2),
    "etag of a small file": Fault("etag", "config.json", times=1),
    "commit": Fault("commit", FIRST, "hub", times=2),
    "linked": Fault("linked", FIRST, "hub", times=1),
    "wrong range": Fault("wrong_range", FIRST, "second", times=3, value=7),
    "no range": Fault("no_range", FIRST, "second", times=2),
    "gzip": Fault("gzip", FIRST, times=2),
    "refuse": Fault("refuse", "*", times=4),
    "nonsense address": Fault("status", FIRST, "hub", times=2, value=302, headers={"Location": "http://[::/x"}),
    "no address": Fault("status", FIRST, "hub", times=2, value=302),
    "other kind of address": Fault("status", FIRST, "hub", times=1, value=302, headers={"Location": "file:///etc/x"}),
    "address of nobody": Fault(
        "status", FIRST, "hub", times=1, value=302, headers={"Location": "http://localhost:1/x"}
    ),
    "circle": Fault("status", FIRST, "hub", times=6, value=302, headers={"Location": "?again"}),
    "wrong bytes": Fault("wrong_bytes", FIRST, "second", times=1, after_bytes=1000),
    "wrong bytes of a small file": Fault("wrong_bytes", "config.json", times=1, after_bytes=3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way_costs_a_part(hub: HubServer, repo: Repo, name: str) -> None:
    fault = FAULTS[name]
    hub.order(Fault(**{field: getattr(fault, field) for field in Fault.__dataclass_fields__ if field != "met"}))
    assert_whole(fetched(hub))
    met = hub.faults[0].met
    assert met == fault.times
    most = met * (PART + 128 * 1024)
    if fault.kind == "wrong_bytes":  # nobody can tell which part of a file with a wrong checksum is the wrong one
        most = len(FILES[FIRST])
    if fault.kind == "etag":  # the server answers with whole files, of which each of the lines takes the beginning
        most = 4 * len(FILES[FIRST])
    assert hub.sent_bytes() <= TOTAL + most


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault("status", FIRST, "hub", times=-1, value=404), ErrorCode.MODEL_NOT_FOUND, "no longer on the hub"),
        (Fault("status", "*", "hub", times=-1, value=401), ErrorCode.DOWNLOAD_FAILED, "token"),
        (
            Fault("status", "*", "hub", times=-1, value=403, headers={"X-Error-Code": "GatedRepo"}),
            ErrorCode.DOWNLOAD_FAILED,
            "licence",
        ),
        (Fault("wrong_range", FIRST, times=-1, value=7), ErrorCode.DOWNLOAD_FAILED, "another part"),
        (Fault("gzip", FIRST, times=-1), ErrorCode.DOWNLOAD_FAILED, "packed"),
        (Fault("commit", FIRST, times=-1), ErrorCode.DOWNLOAD_FAILED, "another version"),
        (Fault("wrong_bytes", FIRST, "second", times=-1, after_bytes=9), ErrorCode.DOWNLOAD_FAILED, "checksum twice"),
        (Fault("status", FIRST, "second", times=-1, value=403), ErrorCode.DOWNLOAD_FAILED, "403"),
    ],
)
def test_what_will_not_help_stops_with_a_sentence_and_goes_on_when_put_right(
    hub: HubServer, repo: Repo, fault: Fault, code: ErrorCode, words: str
) -> None:
    hub.order(fault)
    failed = fetched(hub)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, str(code))
    assert words in failed.problem
    assert not failed.folder.exists()
    fault.times = 0
    queue.resume(failed.key)
    assert [each.state for each in queue.downloads()] == [DownloadState.WAITING]
    assert_whole(queue.run(failed.key))


def test_a_second_host_may_name_a_third(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.has_third_host = True
    repo.token = "hf_secret"
    monkeypatch.setattr(tokens, "_this_run", {})
    tokens.save_token("127.0.0.1", "hf_secret")
    assert_whole(fetched(hub))
    asked = hub.asked(FIRST, "second")
    assert {each.status for each in asked} == {302, 206}
    assert {each.authorization for each in asked} == {""}


def test_a_second_host_that_leads_in_circles_is_given_up(hub: HubServer, repo: Repo) -> None:
    hub.order(Fault("status", FIRST, "second", times=-1, value=302, headers={"Location": "?again"}))
    failed = fetched(hub)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, "download_failed")


@pytest.mark.parametrize("number", ["²", "٣", "9" * 5000, "-1", "1e3"])
def test_numbers_that_are_none_are_no_numbers(hub: HubServer, repo: Repo, number: str) -> None:
    assert source._number(number) is None
    assert source._retry_after(number) == 0.0
    busy = {"Retry-After": number.encode("utf-8", "replace").decode("latin-1")}
    hub.order(Fault("status", FIRST, "second", value=503, headers=busy))
    assert_whole(fetched(hub))


def test_no_ranges_at_all(hub: HubServer, repo: Repo) -> None:
    hub.order(Fault("ignore_range", "*", times=-1))
    assert_whole(fetched(hub))


def test_a_pause_loses_nothing(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "STALL_S", 600.0)
    hub.per_connection_bytes_per_s = PART // 8  # far from over when it pauses, on busy machines too
    key = queue.add(hub.candidate("org/model")).key

    def rest(now: Download) -> None:
        if now.done_bytes > PART // 2:
            queue.pause(key)

    paused = queue.run(key, on_progress=rest)
    assert paused.state is DownloadState.PAUSED
    assert PART // 2 < paused.done_bytes < TOTAL
    assert queue.run(key).state is DownloadState.PAUSED
    hub.cut()  # or what was sent to nobody would count
    hub.per_connection_bytes_per_s = 0
    before = hub.sent_bytes()
    queue.resume(key)
    assert_whole(queue.run(key))
    assert hub.sent_bytes() - before == TOTAL - paused.done_bytes


def test_a_pause_in_the_middle_of_the_first_parts_keeps_them(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "STALL_S", 600.0)
    hub.order(Fault("stall", "*.safetensors", "second", times=-1, after_bytes=40_000))
    key = queue.add(hub.candidate("org/model")).key
    seen: list[int] = []

    def rest(now: Download) -> None:
        seen.append(now.done_bytes)
        if now.done_bytes > 40_000:
            queue.pause(key)

    paused = queue.run(key, on_progress=rest)
    assert paused.state is DownloadState.PAUSED
    assert paused.done_bytes >= seen[-1] > 0
    hub.faults.clear()
    before = len(hub.asked("*.safetensors", "second"))
    queue.resume(key)
    assert_whole(queue.run(key))
    again = hub.asked("*.safetensors", "second")[before:]
    assert sum(each.sent for each in again) <= TOTAL - paused.done_bytes
    assert any(each.start % PART for each in again)


def test_a_lowered_limit_ends_lines_in_the_middle_of_their_parts(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 2**20
    monkeypatch.setattr(parts, "PART_BYTES", part)
    monkeypatch.setattr(source, "STALL_S", 600.0)
    weights = random.Random(3).randbytes(FIRST_CONNECTIONS * part)
    hub.add("org/wide", {"model.safetensors": weights})
    hub.per_connection_bytes_per_s = part // 8
    key = queue.add(hub.candidate("org/wide")).key
    lines: list[int] = []
    limited: list[int] = []

    def lower(now: Download) -> None:
        running = {each.name for each in threading.enumerate() if each.name.startswith("download-")}
        lines.append(len(running - {"download-hash", "download-sync"}))
        if lines[-1] == FIRST_CONNECTIONS and not now.limit_bytes_per_s:
            queue.set_limit(key, part // 2)
        if now.limit_bytes_per_s and lines[-1] <= 4 and not limited:
            limited.append(now.done_bytes)
            hub.per_connection_bytes_per_s = 0
            queue.set_limit(key, 0)

    assert_whole(queue.run(key, on_progress=lower), {"model.safetensors": weights})
    assert max(lines) == FIRST_CONNECTIONS
    assert limited
    assert limited[0] < len(weights) // 2


def test_a_cancelled_one_is_gone(hub: HubServer, repo: Repo) -> None:
    hub.per_connection_bytes_per_s = PART // 4
    key = queue.add(hub.candidate("org/model")).key
    queue.run(key, on_progress=lambda _: queue.cancel(key))
    assert queue.downloads() == []
    assert list(models_dir().iterdir()) == []
    assert [entry.name for entry in (data_dir() / "downloads").iterdir() if entry.is_dir()] == []
    waiting = queue.add(hub.candidate("org/model"))
    queue.cancel(waiting.key)
    assert list(models_dir().iterdir()) == []


def test_a_look_in_the_same_moment_does_not_keep_a_cancelled_one(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = queue.add(hub.candidate("org/model")).key
    looks = [False, False]
    taken = FileLock._acquire
    monkeypatch.setattr(FileLock, "_acquire", lambda lock: looks.pop() if looks else taken(lock))
    queue.cancel(key)
    assert not looks
    assert queue.downloads() == []


def test_a_finished_one_that_the_window_forgets_at_once_is_done(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = records.sweep

    def forget_first(key: str) -> None:
        monkeypatch.setattr(records, "sweep", sweep)
        queue.cancel(key)
        sweep(key)

    monkeypatch.setattr(records, "sweep", forget_first)
    done = fetched(hub)
    assert queue.downloads() == []
    assert_whole(done)
    running = replace(done, state=DownloadState.RUNNING, is_live=True)
    assert pull._follow(running, ProgressLine("")).state is DownloadState.DONE


def test_one_process_runs_it(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_PATIENCE_S", 0.1)
    hub.per_connection_bytes_per_s = PART // 4
    key = queue.add(hub.candidate("org/model")).key
    seen: list[Download] = []

    def second(now: Download) -> None:
        if not seen:
            seen.append(now)
            with refused(ErrorCode.BUSY):
                queue.run(key)
            hub.per_connection_bytes_per_s = 0
            hub.cut()

    assert_whole(queue.run(key, on_progress=second))
    assert seen[0].is_live
    assert seen[0].state is DownloadState.RUNNING


def test_without_a_network_it_waits_and_goes_on_by_itself(hub: HubServer, repo: Repo) -> None:
    candidate = hub.candidate("org/model")
    port = hub.port
    hub.close()
    said: list[str] = []

    def come_back(now: Download) -> None:
        said.append(now.error_code)
        if now.error_code == queue.WAITING_FOR_NETWORK and not hub._servers:
            assert now.state is DownloadState.RUNNING
            assert (now.bytes_per_s, now.eta_s) == (0, None)
            hub.start(port)

    assert_whole(queue.run(queue.add(candidate).key, on_progress=come_back))
    assert queue.WAITING_FOR_NETWORK in said


def test_the_token_goes_to_the_hub_alone(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.token, repo.gated = "hf_secret", "manual"
    failed = fetched(hub)
    assert failed.state is DownloadState.FAILED
    assert "licence" in failed.problem
    monkeypatch.setattr(tokens, "_this_run", {})
    assert not tokens.save_token("127.0.0.1", " hf_secret\n")  # no keyring here
    queue.resume(failed.key)
    assert_whole(queue.run(failed.key))
    assert {each.authorization for each in hub.asked(host="second")} == {""}
    assert "Bearer hf_secret" in {each.authorization for each in hub.asked(host="hub")}
    for file in (data_dir() / "downloads").rglob("*"):
        assert file.is_dir() or b"hf_secret" not in file.read_bytes()
    assert "hf_secret" in tokens.for_child()["SWITCHYARD_HUB_TOKENS"]
    tokens.forget_token("127.0.0.1")
    assert tokens.read_token("127.0.0.1") == ""


def test_a_full_disk_stops_it_and_room_lets_it_go_on(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = transfer._write
    written = 0

    def until_full(out: Any, data: Any) -> None:
        nonlocal written
        written += len(data)
        if written > 3 * PART:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(out, data)

    monkeypatch.setattr(transfer, "_write", until_full)
    failed = fetched(hub)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, "disk_full")
    assert failed.done_bytes > 0
    monkeypatch.setattr(transfer, "_write", write)
    queue.resume(failed.key)
    assert_whole(queue.run(failed.key))
    assert hub.sent_bytes() <= TOTAL + FIRST_CONNECTIONS * PART


def test_no_room_is_said_before_a_byte_is_fetched(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    repo._digests["huge.safetensors"] = ("a" * 64, "b" * 40)
    monkeypatch.setattr(Repo, "size", lambda self, path: 10**17 if path == "huge.safetensors" else len(FILES[path]))
    repo.files["huge.safetensors"] = b""
    with refused(ErrorCode.DISK_FULL):
        queue.add(hub.candidate("org/model"))
    assert hub.requests == []


def test_a_token_that_has_expired_bars_no_public_model(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_this_run", {"127.0.0.1": "hf_expired"})
    monkeypatch.setattr(tokens, "_refused", set())
    hub.order(Fault("status", "*", "hub", value=401, headers={"X-Error-Message": "Invalid credentials"}))
    assert_whole(fetched(hub))
    assert tokens.read_token("127.0.0.1") == ""
    assert len([each for each in hub.asked(host="hub") if each.authorization]) <= len(repo.files)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that not even root may write")
def test_a_folder_that_cannot_be_written(hub: HubServer, repo: Repo) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        queue.add(hub.candidate("org/model"), folder=Path("/proc/nothing"))
    assert queue.downloads() == []


def test_a_folder_that_vanishes(hub: HubServer, repo: Repo) -> None:
    hub.order(Fault("status", SECOND, "second", times=-1, value=500))  # or it may be whole before anybody looks
    key = queue.add(hub.candidate("org/model")).key

    def vanish(now: Download) -> None:
        if now.done_bytes:
            shutil.rmtree(models_dir() / f".download-{key}", ignore_errors=True)

    failed = queue.run(key, on_progress=vanish)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, "invalid_request")
    hub.faults.clear()
    queue.resume(key)
    assert_whole(queue.run(key))


def test_a_disk_that_is_not_connected_costs_nothing(hub: HubServer, repo: Repo, tmp_path: Path) -> None:
    hub.order(Fault("status", FIRST, "second", times=-1, value=500, skip=3))
    key = queue.add(hub.candidate("org/model")).key
    paused = queue.run(key, on_progress=lambda now: queue.pause(key) if now.done_bytes > PART else None)
    hub.faults.clear()
    disk = models_dir().rename(tmp_path / "not connected")
    queue.resume(key)
    failed = queue.run(key)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, "invalid_request")
    assert failed.done_bytes == paused.done_bytes > 0
    assert not models_dir().exists()
    disk.rename(models_dir())
    before = hub.sent_bytes()
    queue.resume(key)
    assert_whole(queue.run(key))
    assert hub.sent_bytes() - before == TOTAL - paused.done_bytes


def test_an_end_that_a_full_disk_cannot_note_is_not_tried_again_at_once(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "write_progress", lambda *_: None)
    hub.order(Fault("status", "*", "hub", times=-1, value=401))
    key = queue.add(hub.candidate("org/model")).key
    assert [each.state for each in queue.run_queue()] == [DownloadState.FAILED]
    assert main(["models", "pull", "--queue"]) == 2
    assert main(["models", "pull", key]) == 2
    hub.faults.clear()
    assert [each.state for each in queue.run_queue()] == [DownloadState.DONE]


def test_a_full_disk_takes_the_end_where_the_last_progress_was(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = queue.add(hub.candidate("org/model")).key
    records.write_progress(key, Progress("running", 12345, problem="a long sentence " * 9))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    ended = Progress("failed", 12345, problem="full", error_code="disk_full")
    records.write_progress(key, ended)
    assert records.read_progress(key) == ended


def test_what_the_disk_lost_is_fetched_again(hub: HubServer, repo: Repo) -> None:
    """As after a power cut: the journal knows of parts whose bytes never reached the disk."""
    hub.order(Fault("status", FIRST, "second", times=-1, value=500, skip=4))
    key = queue.add(hub.candidate("org/model")).key
    queue.run(key, on_progress=lambda now: queue.pause(key) if now.error_code == queue.WAITING_FOR_SERVER else None)
    file = models_dir() / f".download-{key}" / FIRST
    assert any(file.read_bytes())
    file.write_bytes(bytes(len(FILES[FIRST])))
    hub.faults.clear()
    before = hub.sent_bytes(FIRST)
    queue.resume(key)
    assert_whole(queue.run(key))
    assert hub.sent_bytes(FIRST) - before == len(FILES[FIRST])


@pytest.mark.parametrize("cut", [0, 1, 40, 90])
def test_a_torn_journal_costs_what_it_does_not_tell(hub: HubServer, repo: Repo, cut: int) -> None:
    hub.order(Fault("status", SECOND, "hub", times=-1, value=401))
    failed = fetched(hub)
    journal = data_dir() / "downloads" / failed.key / "journal"
    journal.write_bytes(journal.read_bytes()[: -cut or None] + b"part 2 0 12")
    hub.faults.clear()
    queue.resume(failed.key)
    assert_whole(queue.run(failed.key))


def test_the_queue_runs_all_in_order(hub: HubServer) -> None:
    for name in ("one", "two", "three"):
        hub.add(f"org/{name}", {"config.json": name.encode(), "model.safetensors": FILES[SECOND]})
    keys = [queue.add(hub.candidate(f"org/{name}")).key for name in ("one", "two", "three")]
    queue.reorder(keys[2], 0)
    queue.pause(keys[0])
    assert [each.key for each in queue.downloads()] == [keys[2], keys[0], keys[1]]
    assert [each.order for each in queue.downloads()] == [0, 1, 2]
    assert [each.key for each in queue.run_queue()] == [keys[2], keys[1]]
    queue.resume(keys[0])
    assert [each.state for each in queue.run_queue()] == [DownloadState.DONE]
    assert queue.run_queue() == []
    speed = queue.line_speed()
    assert speed is None or speed > 0


@pytest.mark.parametrize(
    "path",
    [
        "../x.gguf",
        "/x.gguf",
        "a/../x.gguf",
        "a\\x.gguf",
        "C:x.gguf",
        "a//x.gguf",
        "x.gguf\n",
        "x" * 300,
        "a./x",
        "aux.gguf",
        "CON/x.gguf",
        "nul",
        "LPT1.x.gguf",
        "com¹.gguf",
        "con .gguf",
        "Switchyard-Manifest.json",
    ],
)
def test_names_that_lead_elsewhere_are_refused(hub: HubServer, path: str) -> None:
    hub.add("org/model", {path: b"x", "model.gguf": b"x"})
    with refused(ErrorCode.CHECKPOINT_UNSAFE):
        queue.add(hub.candidate("org/model"))


def test_odd_names_and_folders(hub: HubServer) -> None:
    files = {
        "größe 😀 model.json": b"{}",
        "Q4_K_M/" + "n" * 230 + "-00001-of-00002.gguf": FILES[FIRST],
        "Q4_K_M/" + "n" * 230 + "-00002-of-00002.gguf": FILES[SECOND],
    }
    hub.add("org/Änderung", files)
    done = queue.run(queue.add(hub.candidate("org/Änderung", "Q4_K_M")).key)
    assert_whole(done, {path.removeprefix("Q4_K_M/"): content for path, content in files.items()})
    for one, other in (("A.json", "a.json"), ("é.json", "e\u0301.json"), ("É.json", "e\u0301.json")):
        hub.add("org/same", {one: b"1", other: b"2"})
        with refused(ErrorCode.CHECKPOINT_UNSAFE):
            queue.add(hub.candidate("org/same"))


def test_another_hub(hub: HubServer) -> None:
    hub.add("org/model", FILES, hub="modelscope")
    assert_whole(fetched(hub))
    assert hub.sent_bytes() == TOTAL


def test_without_any_checksum_a_change_is_noticed(hub: HubServer) -> None:
    hub.add("org/model", FILES, hub="modelscope", with_sha256=False)
    hub.order(Fault("etag", FIRST, times=1, skip=3))
    assert_whole(fetched(hub))


class FakeXet:
    """As much of the chunk store's library as is used; the first `stalls` streams send a little and then nothing."""

    def __init__(self, files: dict[str, bytes], stalls: int = 0) -> None:
        self.files, self.stalls = files, stalls
        self.ranges: list[tuple[int, int]] = []
        self.asked_with: dict[str, Any] = {}

    def new_download_stream_group(self, **asked_with: Any) -> "FakeXetGroup":
        self.asked_with = asked_with
        self.stalls -= 1
        return FakeXetGroup(self, self.stalls >= 0)


class FakeXetGroup:
    def __init__(self, xet: FakeXet, stalls: bool) -> None:
        self.xet, self.stalls, self.aborted = xet, stalls, threading.Event()

    def download_stream(self, info: Any, start: int, end: int) -> Iterator[bytes]:
        self.xet.ranges.append((start, end))
        content = self.xet.files[info.hash][start:end]
        yield content[:1000]
        if self.stalls:
            self.aborted.wait()
            return
        yield content[1000:]

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("stalls", [0, 2])
def test_what_is_given_out_in_no_other_way_comes_from_the_chunk_store(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, stalls: int
) -> None:
    fake = FakeXet({"c" * 64: FILES[FIRST]}, stalls)
    monkeypatch.setattr("huggingface_hub.utils._xet.get_xet_session", lambda: fake)
    hub.add("org/model", FILES, xet={FIRST: "c" * 64})
    hub.order(Fault("ignore_range", FIRST, times=-1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as all other tests have it
    assert_whole(fetched(hub))
    assert {start // PART for start, _ in fake.ranges} == set(range(6))
    assert sum(end - start for start, end in fake.ranges) <= len(FILES[FIRST]) + stalls * PART
    assert fake.asked_with["token"] == "xet"


def test_a_limit_holds_and_can_be_lifted(hub: HubServer, repo: Repo) -> None:
    key = queue.add(hub.candidate("org/model")).key
    queue.set_limit(key, PART)
    seen: list[Download] = []

    def lift(now: Download) -> None:
        seen.append(now)
        if len(seen) == 5:
            queue.set_limit(key, 0)

    assert_whole(queue.run(key, on_progress=lift))
    assert seen[1].limit_bytes_per_s == PART
    assert seen[1].done_bytes < TOTAL


def test_the_terminal_goes_on_with_what_the_window_began(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.checkpoint.hub.contents.find_candidate", lambda reference: hub.candidate("org/model"))
    begun = queue.add(hub.candidate("org/model"))
    queue.pause(begun.key)
    assert main(["models", "pull", "--queue", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"downloads": []}
    hub.order(Fault("status", FIRST, "hub", value=401))
    assert main(["models", "pull", "org/model:Q4_K_M", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "download_failed"
    assert main(["models", "pull", begun.key, "--json", "--limit", "1GB"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["download"]["state"], answer["download"]["limit_bytes_per_s"]) == ("done", 10**9)
    assert_whole(queue.downloads()[0])
    assert main(["models", "pull", "org/model:Q4_K_M"]) == 0  # there already
    assert main(["models", "pull", "--json"]) == 2
    assert hub.sent_bytes() <= TOTAL + 8 * PART


def test_the_terminal_follows_what_the_window_runs(
    hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "_PATIENCE_S", 0.05)
    monkeypatch.setattr("engine.verbs.models.hub._FOLLOW_S", 0.02)
    hub.per_connection_bytes_per_s = PART
    key = queue.add(hub.candidate("org/model")).key
    ended: list[Download] = []
    window = threading.Thread(target=lambda: ended.append(queue.run(key)))
    window.start()
    while not queue.downloads()[0].is_live:
        pass
    code = main(["models", "pull", "org/model:Q4_K_M", "--json"])
    window.join()
    assert code == 0
    assert json.loads(capsys.readouterr().out)["download"]["state"] == "done"
    assert_whole(ended[0])
    assert hub.sent_bytes() == TOTAL


def test_a_disk_that_others_fill_stops_it_in_time(hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot set space aside."""
    monkeypatch.setattr(transfer, "_SPACE_S", 0.0)
    reserve = transfer.reserve
    monkeypatch.setattr(transfer, "reserve", lambda path, size: bool(reserve(path, size) and False))
    hub.per_connection_bytes_per_s = PART // 2
    key = queue.add(hub.candidate("org/model")).key
    free = shutil.disk_usage(data_dir())._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(transfer, "require_space", lambda *_: None)
    failed = queue.run(key)
    assert (failed.state, failed.error_code) == (DownloadState.FAILED, "disk_full")


def test_all_lines_dead_at_once_as_after_a_change_of_network(hub: HubServer, repo: Repo) -> None:
    hub.order(Fault("stall", "*", "second", times=FIRST_CONNECTIONS, after_bytes=1000))
    assert_whole(fetched(hub))
    assert hub.sent_bytes() <= TOTAL + FIRST_CONNECTIONS * PART
