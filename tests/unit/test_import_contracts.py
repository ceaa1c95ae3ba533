"""Imports run one way, some of them late.  What is forbidden is in pyproject.toml; here is what `app` may use."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import engine.protocol as messages
from engine.planner.plan_parts import Plan

CHECKOUT = Path(__file__).resolve().parents[2]

APP_MAY_USE = (
    "engine.protocol",
    "engine.common",
    "engine.formats",
    "engine.hardware",
    "engine.planner",
    "engine.checkpoint",
    "engine.parts",
    "engine.batch_files",
    "engine.remote",
    "engine.telemetry",
    "engine.tools",
    "engine.tuning",
)


def test_contracts_in_pyproject_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_window_uses_only_the_light_side_of_the_engine() -> None:
    graph = grimp.build_graph("app", "engine", cache_dir=None)
    forbidden = sorted(
        f"{importer} imports {imported}"
        for importer in graph.modules
        if importer.startswith("app")
        for imported in graph.find_modules_directly_imported_by(importer)
        if imported.startswith("engine.") and not imported.startswith(APP_MAY_USE)
    )
    assert forbidden == []


LIGHT = """
app.main app.services.engine_client app.views.chat.chat_view app.views.settings.page app.views.data_folder_start
engine.formats engine.families.family engine.protocol engine.checkpoint.library engine.checkpoint.catalogue
engine.tuning.fit engine.jobs.job engine.parts.install engine.remote.client engine.remote.job engine.process.remote
engine.verbs.batch engine.hardware.probe engine.hardware.measured engine.hardware.profiles engine.cli
engine.verbs.simulate engine.experts.file_image engine.planner.papers.report engine.planner.simulator.plans
"""


def test_imports_load_no_torch() -> None:
    """What a static contract cannot see: a lazy import that is not lazy after all."""
    script = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    assert not {"torch", "transformers"} & sys.modules.keys(), module
"""
    command = [sys.executable, "-c", script, *LIGHT.split()]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
