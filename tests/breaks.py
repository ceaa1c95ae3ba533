"""Ways to break an installation: each breaks it, lets a start happen, and takes away what a start cannot."""

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from engine.checkpoint import mirror
from engine.checkpoint.downloads import queue, source
from engine.common import files, installed
from engine.common import installed as integrity
from engine.common.installed import CURRENT, WHOLE
from engine.parts import install, updates
from engine.parts.wheels import begin_download, downloads_folder
from tests.broken import BIG, NEW, OLD, Fresh, Proxy, Updating, chosen, mounted
from tests.bundles import make_lock
from tests.hub_server import Fault, HubServer

MB = 10**6
Break = Callable[[Fresh], AbstractContextManager[object]]


@contextmanager
def killed_while_fetching(world: Fresh) -> Iterator[None]:
    """As a process that died at once would leave it: nothing is tidied up."""

    class Killed(BaseException):
        pass

    def die(now: queue.Download) -> None:
        if now.done_bytes:
            raise Killed

    world.hub.bytes_per_s = 1 * MB
    with contextlib.suppress(Killed):
        queue.run(begin_download(chosen()).key, on_progress=die)
    world.hub.bytes_per_s = 0.0
    yield


def killed(step: str) -> Break:
    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        if isinstance(world, Updating):
            stop_before_unpacking(world)
        else:
            assert world.fetch(begin_download(chosen())) == ""
        world.killed_at(step, *([NEW] if isinstance(world, Updating) else []))
        yield

    return breaks


def stop_before_unpacking(world: Updating) -> None:
    found = updates.look_for_update()
    assert found is not None
    assert world.fetch(updates.begin_update(found)) == ""


@contextmanager
def killed_before_its_name(world: Fresh) -> Iterator[None]:
    world.start()
    (world.parts / CURRENT).unlink()
    world.engine.rename(world.engine.with_name(f"{world.engine.name}.12345678.partial"))
    yield


@contextmanager
def killed_before_its_use(world: Fresh) -> Iterator[None]:
    world.start()
    (world.parts / CURRENT).unlink()
    yield


def disk_full(when: str) -> Break:
    """Another program fills the disk in the middle, after the room was found to be enough."""

    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        kept = world.folder / "kept"
        if world.home.exists():
            world.home.rename(kept)
        world.home.mkdir()
        with mounted("-t", "tmpfs", "-o", f"size={72 if when != 'before' else 40}m", "tmpfs", world.home):
            shutil.copytree(kept, world.home, dirs_exist_ok=True)
            full = world.home / "film.mkv"

            def fill(at: object) -> None:
                if (at == when or when == "fetching") and not full.exists():
                    with full.open("wb", buffering=0) as film, contextlib.suppress(OSError):
                        for size in (MB, 4096):
                            while True:
                                film.write(bytes(size))

            world.on_step = fill
            if when == "fetching":
                world.hub.bytes_per_s = 1 * MB
                world.on_way = fill
            yield
            world.hub.bytes_per_s = 0.0
            world.on_step = world.on_way = lambda _: None
            full.unlink(missing_ok=True)
            shutil.rmtree(kept)
            shutil.copytree(world.home, kept)
        world.home.rmdir()
        kept.rename(world.home)

    return breaks


@contextmanager
def no_room(world: Fresh) -> Iterator[None]:
    with disk_full("before")(world):
        yield
        assert world.hub.requests == [], "it was only said after something had been fetched"


@contextmanager
def no_network(world: Fresh) -> Iterator[None]:
    make_lock(world.root, world.wheels, "http://127.0.0.1:9")
    yield
    make_lock(world.root, world.wheels, world.address)


def faulty(*faults: Fault) -> Break:
    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        world.hub.order(*(dataclasses.replace(each, times=-1) for each in faults))
        yield
        world.hub.faults.clear()

    return breaks


@contextmanager
def network_dies(world: Fresh) -> Iterator[None]:
    drop, refuse = Fault("drop", "*torch*", times=1, after_bytes=40_000), Fault("refuse", times=-1, skip=2)
    world.hub.order(drop, refuse)
    yield
    world.hub.faults.clear()
    world.hub.requests.clear()


def proxy(login: str) -> Break:
    """The office's, which lets `anna:geheim%20es` out."""

    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        make_lock(world.root, world.wheels, world.address.replace("127.0.0.1", "packages.invalid"))
        with Proxy(world.hub.endpoint, "anna:geheim es") as office:
            world.monkeypatch.setenv("HTTP_PROXY", office.address(login))
            yield
            world.monkeypatch.delenv("HTTP_PROXY")
        make_lock(world.root, world.wheels, world.address)

    return breaks


@contextmanager
def other_host_lies(world: Fresh) -> Iterator[None]:
    torch = world.wheels[0]
    with HubServer() as liar:
        liar.add("x/y", {torch.name: bytes(torch.stat().st_size)}, commit="1")
        there = f"{liar.endpoint}/x/y/resolve/1/{torch.name}"
        world.hub.order(Fault("status", "*torch*", times=-1, value=302, headers={"Location": there}))
        yield
    world.hub.faults.clear()


def other_content(content: Callable[[bytes], bytes]) -> Break:
    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        name, real = world.wheels[0].name, world.hub.repos["wheels/all"].files
        real[name] = content(world.wheels[0].read_bytes())
        world.hub.repos["wheels/all"]._digests.clear()
        yield
        real[name] = world.wheels[0]
        world.hub.repos["wheels/all"]._digests.clear()

    return breaks


@contextmanager
def wrong_hash(world: Fresh) -> Iterator[None]:
    lock = world.root / "engine-lock.json"
    said = json.loads(lock.read_text())
    said["wheels"][world.wheels[0].name]["sha256"] = "0" * 64
    lock.write_text(json.dumps(said))
    yield
    make_lock(world.root, world.wheels, world.address)


@contextmanager
def wrong_clock(world: Fresh) -> Iterator[None]:
    """A server whose certificate is not valid yet, as a computer of 1970 sees it."""
    key, name = generate_private_key(SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    begins = datetime.datetime(2040, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begins)
    made = made.not_valid_after(begins + datetime.timedelta(days=90))
    there = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = made.add_extension(there, critical=False).sign(key, SHA256())
    pem = world.folder / "certificate.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    pem.write_bytes(certificate.public_bytes(Encoding.PEM) + private)
    (hub,) = (each for each in world.hub._servers if each.name == "hub")
    plain, context = hub.socket, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    hub.socket = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    trusts = ssl.create_default_context(cafile=str(pem))
    world.monkeypatch.setattr(source, "system_trust", lambda: trusts)
    make_lock(world.root, world.wheels, world.address.replace("http:", "https:"))
    yield
    hub.socket = socket.socket(fileno=hub.socket.detach())
    make_lock(world.root, world.wheels, world.address)


@contextmanager
def read_only_home(world: Fresh) -> Iterator[None]:
    """As root may write everywhere, a file lies where the folder would be."""
    world.parts.parent.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        world.parts.write_text("")
        yield
        world.parts.unlink()
    else:
        world.parts.parent.chmod(0o500)
        yield
        world.parts.parent.chmod(0o700)


@contextmanager
def read_only_program(world: Fresh) -> Iterator[None]:
    with mounted("--bind", world.root, world.root):
        subprocess.run(["mount", "-o", "remount,bind,ro", world.root], check=True)
        yield


@contextmanager
def odd_path(world: Fresh) -> Iterator[None]:
    odd = world.folder / 'Größe & Söhne\'s "x" %20 #1; $HOME 日本 '
    world.root.rename(odd)
    world.root = odd
    world.monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(odd))
    world.monkeypatch.setenv("SWITCHYARD_HOME", str(world.folder / "Zuhause #2 ; $USER  100%41 é "))
    yield


def damaged(of: Callable[[Fresh], Path], text: str, *, is_later: bool = False) -> Break:
    """Another text in a file, or half of it; `is_later`: in one that a first start wrote, and the next one mends."""

    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        if is_later:
            assert world.start() == ""
        file = of(world)
        before = file.read_bytes()
        file.write_bytes(text.encode() if text != "half" else before[: len(before) // 2])
        yield
        if not is_later:
            file.write_bytes(before)

    return breaks


def bundle_json(world: Fresh) -> Path:
    return world.root / "bundle.json"


def engine_lock(world: Fresh) -> Path:
    return world.root / "engine-lock.json"


def current_json(world: Fresh) -> Path:
    return world.parts / CURRENT


def whole_json(world: Fresh) -> Path:
    return world.engine / WHOLE


@contextmanager
def lost_engine(world: Fresh) -> Iterator[None]:
    assert world.start() == ""
    shutil.rmtree(world.engine)
    yield


@contextmanager
def lost_library(world: Fresh) -> Iterator[None]:
    """What a virus scanner takes away; the engine says so when it does not start, and is not used again."""
    assert world.start() == ""
    (world.engine / "torch" / "lib.so").unlink()
    told = integrity.give_up_damaged(world.engine)
    assert "lost files since it was installed (torch/lib.so), perhaps to a virus scanner: start" in told.message
    yield


@contextmanager
def half_removed(world: Fresh) -> Iterator[None]:
    old = world.parts / "engine-0.1.0-cpu"
    assert world.start() == ""
    shutil.copytree(world.engine, old)
    (old / WHOLE).unlink()
    shutil.rmtree(old / "torch")
    now = json.loads((world.parts / CURRENT).read_text())
    (world.parts / CURRENT).write_text(json.dumps({**now, "engine": old.name, "previous": {"engine": old.name}}))
    yield


@contextmanager
def two_starts(world: Fresh) -> Iterator[None]:
    world.parts.mkdir(parents=True, exist_ok=True)
    world.monkeypatch.setattr(install, "_PATIENCE_S", 0.0)
    with files.holding(world.parts / "lock", 0.0, ""):
        yield


@contextmanager
def no_keyring(world: Fresh) -> Iterator[None]:
    world.monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.fail.Keyring")
    yield


@contextmanager
def locked_file(world: Fresh) -> Iterator[None]:
    """As a virus scanner on Windows holds it."""

    def held(new: Path, old: Path) -> None:
        if old.name == CURRENT:
            raise PermissionError(13, "The process cannot access the file", str(old))
        new.replace(old)

    real = files.replace_file
    world.monkeypatch.setattr(files, "replace_file", held)
    yield
    world.monkeypatch.setattr(files, "replace_file", real)


@contextmanager
def lost_bytes_of_a_wheel(world: Fresh) -> Iterator[None]:
    assert world.fetch(begin_download(chosen())) == ""
    wheel = downloads_folder() / world.engine.name / world.wheels[0].name
    wheel.write_bytes(wheel.read_bytes()[:-9] + bytes(9))
    yield


def environment(name: str, value: str) -> Break:
    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        world.monkeypatch.setenv(name, value)
        yield
        world.monkeypatch.delenv(name)

    return breaks


@contextmanager
def no_wheels_of_ours(world: Fresh) -> Iterator[None]:
    (world.root / "wheels").rename(world.folder / "away")
    yield
    (world.folder / "away").rename(world.root / "wheels")


# --- ways to break an update --------------------------------------------------------------------------


def list_of(**said: object) -> Break:
    @contextmanager
    def breaks(world: Fresh) -> Iterator[None]:
        assert isinstance(world, Updating)
        world.publish(**said)  # type: ignore[arg-type]
        yield
        world.publish()

    return breaks


@contextmanager
def no_update_server(world: Fresh) -> Iterator[None]:
    real = mirror.chosen("updates")
    mirror.use("updates", "http://127.0.0.1:9")
    yield
    mirror.use("updates", real)


@contextmanager
def old_runs(world: Fresh) -> Iterator[None]:
    """The window and the engine of the version before go on, and so does an engine that is started meanwhile."""
    with (world.engine / "torch" / "lib.so").open("rb") as held:
        yield
        engine = installed.current_engine(OLD)
        assert engine.folder == world.engine
        assert held.read() == BIG == (world.engine / "torch" / "lib.so").read_bytes()


@contextmanager
def updated_window_lost(world: Fresh) -> Iterator[None]:
    """The next start has the version before, and offers the newer one again."""
    assert isinstance(world, Updating)
    assert world.start() == ""
    (world.window / "app" / "self_test.py").unlink()
    assert installed._sound_window() == world.root / "window"
    assert world.works() == OLD
    yield
