"""What holds for every test: nothing leaves the machine, nothing is left behind, nothing depends on the order."""

import datetime
import gc
import ipaddress
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before anything imports Qt, torch or huggingface_hub: they read these once.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.null.Keyring"  # the user's own is none of a test's business
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: handing over to a second thread costs more than it gives

# Tests start some hundred Python processes: what is not kept compiled is compiled by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Where tests want more threads: one that waits for the others sleeps and does not spin, for there are other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A temporary folder of our own, so that what a test forgets in it can be seen.  Its path is short: the names of Unix
# sockets may have only about a hundred characters.  pytest keeps its `tmp_path` folders where it always does.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_TEMPORARY = tempfile.mkdtemp(prefix="sy-")
tempfile.tempdir = os.environ["TMPDIR"] = _TEMPORARY

# A script's background command starts with interrupts ignored, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where values of parameters take turns, it is one day's turn in all workers, whenever they begin.
os.environ.setdefault("SWITCHYARD_TEST_DAY", "0" if os.environ.get("CI") else str(datetime.date.today().toordinal()))

# What fixtures of a wider scope than a test write; each test has a folder of its own.
os.environ["SWITCHYARD_HOME"] = os.path.join(_TEMPORARY, "home")
os.environ["SWITCHYARD_FIND_MODELS"] = "0"  # other programs' models on this machine are none of ours

gc.disable()

import pytest  # noqa: E402
from hypothesis import HealthCheck  # noqa: E402
from hypothesis import settings as hypothesis_settings  # noqa: E402

from tests import leaks  # noqa: E402
from tests.combinations import mark_most_of_products  # noqa: E402

# Neither asserts on a clock: on a busy machine examples take as long as they take.
_UNHURRIED = hypothesis_settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.register_profile("local", _UNHURRIED)
hypothesis_settings.register_profile("ci", _UNHURRIED, derandomize=True, database=None)
hypothesis_settings.load_profile("ci" if os.environ.get("CI") else "local")


def _refuse_others(host: Any) -> None:
    """Refuses to look up or reach any other machine."""
    if isinstance(host, bytes):
        host = host.decode()
    # None and the wildcard bind locally; anything not a string is a Unix socket or a netlink address.
    if not isinstance(host, str) or host in ("", "localhost"):
        return
    try:
        is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise RuntimeError(f"A test wanted to reach {host}: tests use no network but loopback.")


def _only_loopback() -> None:
    """For every thread of this process.  An audit hook would be called for all that Python does, 2 % of the suite."""

    def guarded(name: str) -> Any:
        own = getattr(socket.socket, name)

        def method(self: socket.socket, *arguments: Any) -> Any:
            address = arguments[-1]
            _refuse_others(address[0] if isinstance(address, tuple) and address else None)
            return own(self, *arguments)

        return method

    for name in ("connect", "connect_ex", "bind", "sendto"):
        setattr(socket.socket, name, guarded(name))
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        _refuse_others(host)
        return look_up(host, *arguments, **options)

    socket.getaddrinfo = getaddrinfo


_only_loopback()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files", type=int, default=0, metavar="N", help="at the end, name the N test files that took longest"
    )


_SECONDS: dict[str, float] = {}
"""What each test file has taken, its fixtures with it; complete where the reports of all workers arrive."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    _SECONDS[file] = _SECONDS.get(file, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    slowest = sorted(_SECONDS, key=_SECONDS.__getitem__, reverse=True)[: config.getoption("--slowest-files")]
    if slowest:
        terminalreporter.section("slowest files")
        for file in slowest:
            terminalreporter.write_line(f"{_SECONDS[file]:7.1f} s  {file}")


def pytest_unconfigure() -> None:
    shutil.rmtree(_TEMPORARY, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Only now: what is imported for all tests stays, and was looked through in vain while it grew."""
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """`tests/e2e` and `tests/gpu` carry their markers by where they lie; of products most are exhaustive.

    In whatever order: those of the real window, which take longest, come first, so that no worker is left with one.
    """
    for item in items:
        folder = item.path.parent.name
        if folder in ("e2e", "gpu"):
            item.add_marker(folder)
    mark_most_of_products(item for item in items if item.path.parent.name != "gpu")  # there code is another for each
    yield
    items.sort(key=lambda item: item.path.parent.name != "e2e")


@pytest.fixture(autouse=True)
def libraries_are_not_looked_through() -> None:
    """Takes what is there out of the garbage collector's sight, again once modules were imported: it is there for good.

    Looking through all of torch and transformers takes a quarter of a second, and each model that is closed collects
    what it leaves.
    """
    global _modules_seen
    if len(sys.modules) > _modules_seen + _FEW_MODULES:
        gc.collect()
        gc.freeze()
        _modules_seen = len(sys.modules)


_FEW_MODULES = 3
_modules_seen = 0


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Fails a test that leaves a thread, a process, a window or a temporary file.

    Set up before every other function-scoped fixture, so torn down after all of them; what fixtures of a wider scope
    hold was there before.
    """
    before = leaks.snapshot()
    yield
    if found := leaks.leaks_since(before):
        pytest.fail("left behind:\n  " + "\n  ".join(found))


@pytest.fixture
def _home(leak_check: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the test's own; half of the tests write nothing there.  It goes when nothing is patched any more."""
    home = tmp_path_factory.getbasetemp() / f"home-{next(_homes)}"
    yield home
    shutil.rmtree(home, ignore_errors=True)


_homes = itertools.count()


@pytest.fixture(autouse=True)
def switchyard_home(_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Switchyard folder of the test's own, in place of the user's settings, models, chats and logs.

    It stays until the test's threads have ended: one that still lists models would otherwise go on in the shared one.
    """
    monkeypatch.setenv("SWITCHYARD_HOME", str(_home))
    before = leaks.threads()
    yield _home
    leaks.wait_for_threads(before)


@pytest.fixture(autouse=True)
def nothing_has_fallen() -> Iterator[None]:
    """What gave way in one test is not told in the next."""
    yield
    falls = sys.modules.get("engine.common.falls")
    if falls is not None:
        falls.FALLS.clear()


@pytest.fixture(autouse=True)
def same_torch_for_every_test(leak_check: None) -> None:
    """Seed and thread count of torch are global: a test may set them, the next one does not inherit them."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` also keeps a stack for cards, of every call
        torch.set_num_threads(1)
