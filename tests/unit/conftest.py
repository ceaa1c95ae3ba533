"""What tests of the light packages share: servers on this machine, and a doctor without slow questions."""

from collections.abc import Iterator

import pytest

from engine.verbs import doctor
from tests.bad_endpoint import BadEndpoint
from tests.hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[BadEndpoint]:
    with BadEndpoint() as found:
        yield found


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tests, in a process of their own, take seconds."""
    monkeypatch.setattr(doctor, "kernel_findings", lambda _hardware: [])
