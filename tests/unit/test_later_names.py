"""Messages name types whose modules are imported when such a message is first read, and not before."""

import subprocess
import sys

import pytest

import engine.protocol as messages
from engine.planner.plan_parts import Plan

_PROGRAM = """
import sys
import engine.protocol
assert not {"numpy", "engine.planner.plan_parts", "engine.hardware.measured"} & set(sys.modules), "too early"
line = b'{"type":"TuningPlans","request_id":"t","plan":{},"contestants":[]}'
try:
    engine.protocol.decode(line)
except engine.protocol.EngineError:
    assert "engine.planner.plan_parts" in sys.modules  # such a plan has no fields
"""


def test_the_protocol_waits_for_no_planner() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)


def test_the_later_types_can_be_asked_for() -> None:
    assert messages.Plan is Plan
    with pytest.raises(AttributeError, match="Nothing"):
        messages.Nothing  # noqa: B018
