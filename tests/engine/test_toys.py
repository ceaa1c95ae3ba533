"""What is added by an entry: a cache policy, an interface for other programs, a family."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, get_args

import httpx2
import pytest

from engine.common.config import CachePolicy
from engine.common.errors import EngineError
from engine.experts.cache.policies import CANDIDATES, POLICIES, POLICY_NAMES, Key, Lru, Policy
from engine.experts.cache.selection import PolicySelector
from engine.families import PACKAGES, family_of
from engine.families.family import Family
from engine.families.replies import HERMES
from engine.families.replies.reader import form_of
from engine.families.table import TABLE
from engine.serving import server
from engine.serving.answers import Call, Endpoint
from engine.serving.server import Address, Interface, make_app
from engine.serving.service import Service
from tests.engine.test_serving import made_up_models
from tests.scripted_broker import ScriptedBroker


class Mru(Lru):
    """Evicts what was used last, which is right where experts come round in turn."""

    def victims(self) -> Iterator[Key]:
        return iter(list(super().victims())[::-1])

    def without_residents(self) -> Policy:
        return Mru()


def test_a_cache_policy_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(get_args(CachePolicy)) == {"auto", *POLICY_NAMES}
    monkeypatch.setitem(POLICIES, "mru", lambda *_: Mru())
    selector = PolicySelector(4, (*CANDIDATES, "mru"))
    adopted = None
    for step in range(4000):
        adopted = selector.observe([step % 6]) or adopted
    assert selector.adopted == "mru"
    assert isinstance(adopted, Mru)
    assert selector.hit_rates()["lru"] == 0


def test_an_interface_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    async def toys(call: Call) -> str:
        name, _path = await call.service.path_of(call.body.get("toy"))
        return f"{name} squeaks"

    def error(error: EngineError, status: int) -> dict[str, Any]:
        return {"squeak": error.message, "status": status}

    monkeypatch.setattr(
        server, "INTERFACES", [Interface([Endpoint("POST", "/toys", toys)], error, "/toys"), *server.INTERFACES]
    )
    app = make_app(Service(ScriptedBroker(ends=True), made_up_models()), Address(port=0))

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [await client.post("/toys", json=body) for body in ({"toy": ""}, {"toy": 5}, {"toy": "none"})]

    answers = asyncio.run(ask())
    assert answers[0].json().endswith(" squeaks")
    assert [answer.json()["status"] for answer in answers[1:]] == [400, 404]


def test_a_family_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "toy", Family(replies=HERMES, packs_rows=True))
    monkeypatch.setitem(PACKAGES, "toy", "toy")
    assert family_of("toy").packs_rows
    assert form_of("toy") is HERMES
