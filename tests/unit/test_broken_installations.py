"""Broken installations, one in each row of `BROKEN`: what is wrong, and the sentence that a start in it ends with.

No sentence: that start puts it right by itself.  Whatever happens, what worked before works still; and once the reason
is gone, a start is all that it takes.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.common import installed as integrity
from engine.parts.install import FINISHING, TESTING, UNPACKING
from engine.process.failures import as_engine_error
from tests import breaks
from tests.broken import OLD, UV, Fresh, Updating
from tests.hub_server import Fault, HubServer
from tests.quick_downloads import make_quick

pytestmark = pytest.mark.skipif(UV is None or sys.platform == "win32", reason="needs uv, and kills as POSIX knows them")


PAGE, WRONG = Fault("page", "*torch*"), Fault("wrong_bytes", "*torch*", after_bytes=9)
OTHER_SIZE = "bytes where .* were promised|instead of"
NOT_AGAIN = "install Switchyard again; models and chats stay"
BROKEN: list[tuple[str, type[Fresh], breaks.Break, str]] = [
    ("killed while fetching", Fresh, breaks.killed_while_fetching, ""),
    ("killed while unpacking", Fresh, breaks.killed(UNPACKING), ""),
    ("killed while testing", Fresh, breaks.killed(TESTING), ""),
    ("killed before the part had its name", Fresh, breaks.killed_before_its_name, ""),
    ("killed before the part was in use", Fresh, breaks.killed_before_its_use, ""),
    ("disk full while fetching", Fresh, breaks.disk_full("fetching"), "disk .*full|needed on the disk"),
    ("disk full while unpacking", Fresh, breaks.disk_full(UNPACKING), "disk .*full: make room"),
    ("not enough room to begin with", Fresh, breaks.no_room, r"MB needed on the disk .*: make room"),
    ("no network", Fresh, breaks.no_network, "cannot be reached: waiting for the network"),
    ("the network dies in the middle", Fresh, breaks.network_dies, "broke: trying again"),
    ("a proxy that wants a login", Fresh, breaks.proxy(""), "proxy asks for a name and a password"),
    ("a proxy, wrong password", Fresh, breaks.proxy("anna:falsch"), "proxy refuses this name and password"),
    ("a proxy, right password", Fresh, breaks.proxy("anna:geheim%20es"), ""),
    ("a hotel's page instead of the file", Fresh, breaks.faulty(PAGE), "sends 49 bytes instead of"),
    (
        "other bytes of the same length",
        Fresh,
        breaks.faulty(WRONG),
        "wrong checksum .*another mirror",
    ),
    ("a file that ends early", Fresh, breaks.faulty(Fault("short", "*torch*", value=9)), "bytes where|instead of"),
    ("a file without an end", Fresh, breaks.faulty(Fault("endless", "*torch*")), ""),
    ("a redirect to a host that lies", Fresh, breaks.other_host_lies, "wrong checksum"),
    (
        "a longer file",
        Fresh,
        breaks.other_content(lambda data: data + b"x" * 9),
        "bytes where .* were promised|instead of",
    ),
    ("a shorter file", Fresh, breaks.other_content(lambda data: data[:-9]), OTHER_SIZE),
    ("a wrong hash in the list", Fresh, breaks.wrong_hash, "wrong checksum"),
    ("a clock of long ago", Fresh, breaks.wrong_clock, "check this computer's date"),
    ("a home without rights", Fresh, breaks.read_only_home, "Cannot read or write .*: check its permissions"),
    ("a program on a disk that is read-only", Fresh, breaks.read_only_program, ""),
    ("an odd path", Fresh, breaks.odd_path, ""),
    ("bundle.json empty", Fresh, breaks.damaged(breaks.bundle_json, ""), NOT_AGAIN),
    ("bundle.json cut off", Fresh, breaks.damaged(breaks.bundle_json, "half"), NOT_AGAIN),
    ("bundle.json of a newer format", Fresh, breaks.damaged(breaks.bundle_json, '{"format": 2}'), NOT_AGAIN),
    ("engine-lock.json empty", Fresh, breaks.damaged(breaks.engine_lock, ""), NOT_AGAIN),
    ("engine-lock.json cut off", Fresh, breaks.damaged(breaks.engine_lock, "half"), NOT_AGAIN),
    ("engine-lock.json of a newer format", Fresh, breaks.damaged(breaks.engine_lock, '{"format": 2}'), NOT_AGAIN),
    ("current.json empty", Fresh, breaks.damaged(breaks.current_json, "", is_later=True), ""),
    ("current.json cut off", Fresh, breaks.damaged(breaks.current_json, "half", is_later=True), ""),
    (
        "current.json of a newer format",
        Fresh,
        breaks.damaged(breaks.current_json, '{"using": []}', is_later=True),
        "",
    ),
    ("whole.json empty", Fresh, breaks.damaged(breaks.whole_json, "", is_later=True), ""),
    ("whole.json cut off", Fresh, breaks.damaged(breaks.whole_json, "half", is_later=True), ""),
    (
        "whole.json of a newer format",
        Fresh,
        breaks.damaged(breaks.whole_json, '{"format": 2}', is_later=True),
        "",
    ),
    ("the engine's folder lost", Fresh, breaks.lost_engine, ""),
    ("a library lost", Fresh, breaks.lost_library, ""),
    ("a version before half removed", Fresh, breaks.half_removed, ""),
    ("a wheel damaged on the disk", Fresh, breaks.lost_bytes_of_a_wheel, "fetch the engine again"),
    ("two starts at once", Fresh, breaks.two_starts, "Another Switchyard is installing something: wait"),
    ("no keyring", Fresh, breaks.no_keyring, ""),
    ("a file that a virus scanner holds", Fresh, breaks.locked_file, "Cannot read or write .*current.json"),
    (
        "an engine that fails its test",
        Fresh,
        breaks.environment("SELF_TEST_PROBLEM", "Illegal."),
        "does not work",
    ),
    ("our own wheels lost", Fresh, breaks.no_wheels_of_ours, "install Switchyard again"),
    ("an update: no server", Updating, breaks.no_update_server, "cannot be reached: check the network"),
    ("an update: a list without an end", Updating, breaks.faulty(Fault("endless", "latest.json")), "has no end"),
    ("an update signed with another key", Updating, breaks.list_of(key=Ed25519PrivateKey.generate()), "not signed by"),
    ("an update with another list's signature", Updating, breaks.list_of(signs=b"{}"), "not signed by"),
    ("an update that is older", Updating, breaks.list_of(version="0.1.0"), "the newest version"),
    ("an update: no room", Updating, breaks.disk_full("before"), r"MB needed on the disk .*: make room"),
    ("an update: disk full while unpacking", Updating, breaks.disk_full(UNPACKING), "disk .*full: make room"),
    ("an update whose window fails its test", Updating, breaks.environment("WINDOW_PROBLEM", "No Qt."), "No Qt"),
    ("an update whose engine fails its test", Updating, breaks.environment("SELF_TEST_PROBLEM", "Bad."), "Bad"),
    (
        "an update that leads out of its folder",
        Updating,
        breaks.list_of(spoil=["../../out"]),
        "where none belong",
    ),
    ("an update killed while testing", Updating, breaks.killed(TESTING), ""),
    ("an update killed in the switch", Updating, breaks.killed(FINISHING), ""),
    ("an update while another one is installed", Updating, breaks.two_starts, "Another Switchyard"),
    ("an update while the old version runs", Updating, breaks.old_runs, ""),
    ("an update: current.json is held", Updating, breaks.locked_file, "Cannot read or write .*current.json"),
    ("an updated window lost a file", Updating, breaks.updated_window_lost, ""),
]


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch, 16 * 1024)
    monkeypatch.setattr(os, "sync", lambda: None)


rows = pytest.mark.parametrize(("kind", "broken", "says"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])


@rows
def test_it_is_put_right_by_a_start_or_told_in_one_sentence(
    kind: type[Fresh], broken: breaks.Break, says: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_right(kind(tmp_path, monkeypatch, hub, is_quick=True), broken, says)


@pytest.mark.exhaustive
@rows
def test_the_same_with_everything_real(
    kind: type[Fresh], broken: breaks.Break, says: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_right(kind(tmp_path, monkeypatch, hub), broken, says)


def put_right(world: Fresh, broken: breaks.Break, says: str) -> None:
    before = OLD if isinstance(world, Updating) else ""
    assert world.works() == before
    world.hub.requests.clear()
    with broken(world):
        said = world.start()
        if says:
            assert re.search(says, said)
            assert "\n" not in said
            assert said.endswith(".")
        else:
            assert said == ""
    if says:
        assert world.works() in (before, world.wanted), "what worked before does not work any more"
        assert world.start() == ""
    assert world.works() == world.wanted
    assert not list(world.parts.glob("*.partial"))


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libtorch.so: cannot open shared object file")])
def test_an_engine_that_lost_a_file_says_so_and_is_fetched_anew(
    error: Exception, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Fresh(tmp_path, monkeypatch, hub, is_quick=True)
    assert world.start() == ""
    monkeypatch.setattr(integrity, "__file__", str(world.engine / "engine" / "common" / "integrity.py"))
    assert "lost files" not in as_engine_error(error, "starting").message
    (world.engine / "torch" / "lib.so").write_bytes(b"another")
    assert "lost files since it was installed (torch/lib.so)" in as_engine_error(error, "starting").message
    assert world.works() == ""
    assert world.start() == ""
    assert world.works() == OLD


def test_there_are_more_than_thirty() -> None:
    assert len({row[0] for row in BROKEN}) == len(BROKEN) > 30
