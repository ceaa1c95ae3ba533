"""The server with a certificate of its own: made once, trusted by its fingerprint and nothing else."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from engine.cli import main
from engine.common.errors import EngineError
from engine.remote.client import Client
from engine.remote.endpoint import endpoint_at, saved_endpoints
from engine.remote.failures import RemoteError, Trouble
from engine.remote.trust import fingerprint, offered_certificate
from engine.serving.server import Address, Server, own_certificate
from engine.serving.service import Service
from tests.scripted_broker import ScriptedBroker, made_up_models


def test_it_is_made_once_for_the_user_alone() -> None:
    file = own_certificate()
    content = file.read_bytes()
    assert own_certificate().read_bytes() == content
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"damaged")
    assert own_certificate().read_bytes() != content
    with pytest.raises(EngineError):
        fingerprint(b"nothing")


def test_another_switchyard_trusts_it_by_its_fingerprint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = Address(port=0, key="0123456789", certificate=own_certificate())
    server = Server(Service(ScriptedBroker(ends=True), made_up_models()), address)
    port = server.start()
    try:
        endpoint = endpoint_at(f"https://127.0.0.1:{port}", "rack")
        with Client(endpoint, "0123456789") as client, pytest.raises(RemoteError) as failed:
            client.models()
        assert failed.value.kind is Trouble.CERTIFICATE
        shown = fingerprint(offered_certificate(endpoint))
        assert shown == fingerprint(own_certificate().read_bytes())
        add = ["endpoints", "add", "rack", endpoint.url, "--untested", "--json", "--fingerprint"]
        assert main([*add, "AB:CD"]) == 2
        assert saved_endpoints() == ()
        capsys.readouterr()
        assert main([*add, shown.lower()]) == 0
        (kept,) = saved_endpoints()
        assert json.loads(capsys.readouterr().out)["certificate"] == kept.ca_file
        assert "PRIVATE" not in Path(kept.ca_file).read_text()
        with Client(kept, "0123456789") as client:
            assert client.models().server == "switchyard"
    finally:
        server.stop()


def test_only_who_can_be_reached_is_announced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.tiny_checkpoint import write_tiny_checkpoint

    model = write_tiny_checkpoint(tmp_path / "tiny")
    assert main(["serve", "--model", str(model), "--announce", "Rack"]) == 2
    assert "--host" in capsys.readouterr().err
