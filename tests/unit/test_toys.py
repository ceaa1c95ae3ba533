"""What an addition costs: a toy one of each kind, in a copy of the tree where only the files that it takes differ."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.formats.ggml import GGML

ROOT = Path(__file__).parents[2]

Edits = dict[str, list[tuple[str, str]] | str]
"""File -> what goes before which of its lines; or a new file's content."""

CONFIG, MISSES, POLICIES = "engine/common/config.py", "engine/experts/misses.py", "engine/experts/cache/policies.py"
PAGE, MAIN = "app/views/toys.py", "app/main.py"
TYPES, CARD_TYPES = "engine/kernels/native/src/types", "engine/kernels/cuda/src/blocks.h"

TOYS: dict[str, tuple[int, Edits]] = {
    "setting": (
        2,
        {
            CONFIG: [
                (
                    "    graphs: Graphs = _of_run(\n",
                    """
    toy: str = _of_run(
        "round",
        Choice(("round", "square"), {"round": "Round", "square": "Square"}),
        name="Shape of the toy",
        help="Square ones do not roll.",
        card=MODEL_CARD,
        option="--toy",
        words="shape of the toy",
    )
""",
                )
            ],
            PAGE: "",
        },
    ),
    "page": (
        2,
        {
            PAGE: """
from app.services.services import Services
from app.widgets.page import Page
from app.widgets.scaffold import Card, PageBody, PageHeader, add_items, line_edit, muted_label, push_button, text_label


class ToyPage(Page):
    def __init__(self, services: Services) -> None:
        super().__init__()
        header = PageHeader("Toys", self)
        header.add_buttons(*(push_button(self, f"Wind up toy {number}") for number in range(6)))
        card = Card("Rows", self)
        card.explain("What a row of toys is. It squeaks.")
        field = line_edit(self, "Name of the toy", hint="a short one")
        label = text_label(self, services.settings.engine("").toy, buddy=field)
        add_items(card.body, label, field, muted_label(self, "No toy is here yet. " * 20))
        self.lay_out(header, body=PageBody(self, card, widest_px=600))
""",
            MAIN: [
                (
                    "    )\n\n\ndef first_run_entry() ->",
                    '        PageEntry("tools", "Toys", _toys),\n',
                ),
                (
                    "def first_run_entry() ->",
                    """
def _toys(services: Services) -> Page:
    from app.views.toys import ToyPage

    return ToyPage(services)


""",
                ),
            ],
        },
    ),
    "lane": (
        2,
        {
            "engine/common/lanes.py": [
                (
                    ')\n"""What the engine records',
                    """
    Lane(
        "toy",
        "Toy",
        "What the toy does. It squeaks.",
        "bytes",
        "disk",
        "B/s",
        (Track("toy", "playing with the toy", "toy", moves=True),),
        needs="spans",
    ),
""",
                ),
                (
                    ")\n\nSENSOR_LANES: ",
                    '    ("heat", "Heat", "amount", "cpu", "°C", ("heat",), "How hot it is."),\n',
                ),
            ],
            MISSES: [],
        },
    ),
    "way to serve a miss": (
        2,
        {
            MISSES: [
                (
                    "def _fetching(step: Step)",
                    """
class Toy(OnCpu):
    name = "toy"

    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        from engine.common.lanes import track_number
        from engine.telemetry.recorder import RECORDER

        begun = clock.now_ns()
        super().serve(step, experts, held)
        RECORDER.span(track_number("toy"), lanes.COPY, begun, begun + 10**9, nbytes=5 * 10**8)


""",
                ),
                ('MIXED = "mixed"\n', "WAYS.append(Toy)\n"),
            ],
            CONFIG: [(', "layer"]\nMISSES', ', "toy"'), ('                "layer": "Whole', '"toy": "Play",\n')],
        },
    ),
    "cache policy": (
        2,
        {
            POLICIES: [
                (
                    "POLICIES: dict",
                    """
class Mru(Lru):
    def victims(self) -> Iterator[Key]:
        return iter(list(super().victims())[::-1])

    def without_residents(self) -> Policy:
        return Mru()


""",
                ),
                ('    "static": lambda', '    "mru": lambda _capacity, _popularity, _seed: Mru(),\n'),
            ],
            CONFIG: [(', "static"]\nCACHE', ', "mru"'), ('                "static":', '"mru": "Not the last ones",\n')],
        },
    ),
    "weight type": (
        4,
        {
            "engine/formats/ggml.py": [
                (
                    "TYPES = (\n",
                    """
def _toy(blocks: Bytes) -> Groups:
    return Groups(_as(blocks[:, 4:], "i1")[:, None], _as(blocks[:, :4], "<f4"))


def _put_toy(blocks: Bytes, scales: Floats) -> None:
    blocks[:, :4] = scales.astype("<f4")[:, None].view("u1")


""",
                ),
                (
                    '    BlockType("F32"',
                    '    BlockType("TOY_8", "8-bit, for play", 99, 32, 36, _toy, put=_put_toy),\n',
                ),
            ],
            f"{TYPES}/toy_8.h": "// See q8_0.h, with a scale of 32 bits.\n",
            f"{TYPES}/all.h": [('#include "tq1_0.h"\n', '#include "toy_8.h"\n')],
            CARD_TYPES: [("struct Q2_0 : NoMinima", "struct TOY_8 : Q8_0 {};\n\n")],
        },
    ),
    "family of the usual kind": (
        1,
        {
            "engine/families/__init__.py": [
                (
                    '    "afmoe": Family(',
                    '    "toy": Family(types=("toy", "toy_text"), replies=HERMES, packs_rows=True),\n',
                )
            ]
        },
    ),
    "endpoint": (
        2,
        {
            "engine/serving/toy_api.py": """
from engine.serving.answers import Call, Endpoint


async def toys(call: Call) -> str:
    name, _path = await call.service.path_of(call.body.get("toy"))
    return f"{name} squeaks"


def error_body(error, status):
    return {"squeak": error.message, "status": status}


PATHS = [Endpoint("POST", "/toys", toys)]
""",
            "engine/serving/server.py": [
                ("from engine.serving.answers import", "from engine.serving import toy_api\n"),
                (
                    '    Interface(anthropic_api.PATHS, anthropic_api.error_body, "',
                    '    Interface(toy_api.PATHS, toy_api.error_body, "/toys"),\n',
                ),
            ],
        },
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree with all toys: what no toy takes is linked."""
    tree, texts = tmp_path_factory.mktemp("tree"), dict[str, str]()
    for limit, edits in TOYS.values():
        assert len(edits) == limit
        for name, edit in edits.items():
            if isinstance(edit, str):
                texts[name] = texts.get(name) or edit
                continue
            text = texts.get(name) or (ROOT / name).read_text(encoding="utf-8")
            for anchor, before in edit:
                assert text.count(anchor) == 1, f"{anchor!r} in {name}"
                text = text.replace(anchor, before + anchor)
            texts[name] = text
    folders = {folder for name in texts for folder in Path(name).parents}
    for folder in sorted(folders):
        (tree / folder).mkdir(exist_ok=True)
        for each in (ROOT / folder).iterdir():
            inside = each.relative_to(ROOT)
            if each.name[0] != "." and inside not in folders and inside.as_posix() not in texts:
                (tree / inside).symlink_to(each)
    for name, text in texts.items():
        (tree / name).write_text(text, encoding="utf-8")
    return tree


def _run(tree: Path, script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=tree,
        env=os.environ
        | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(tree),
            "QT_QPA_PLATFORM": "offscreen",
            "SWITCHYARD_HOME": str(folder / "home"),
            "SWITCHYARD_NATIVE": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


ENGINE = """
import asyncio, contextlib, io
from typing import get_args

import httpx2
import torch

from engine import cli
from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.model_shape import read_model
from engine.common.config import CachePolicy, EngineConfig
from engine.devices.emulated import open_emulated
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.cache.tier import PolicySelector
from engine.families import family_of
from engine.families.replies import HERMES
from engine.families.replies.reader import form_of
from engine.hardware.machine import read_machine
from engine.hardware.profiles import DeviceProfile
from engine.planner.predict import predict_decode
from engine.serving.server import Address, make_app
from engine.serving.service import Service
from engine.telemetry.analysis import range_averages
from engine.telemetry.recorder import RECORDER
from engine.telemetry.trace_export import trace_events, write_spans
from tests.engine.hybrid_layers import Layers, routing
from tests.engine.test_serving import made_up_models
from tests.scripted_broker import ScriptedBroker

said = io.StringIO()
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said):
    cli.main(["chat", "--help"])
assert "--toy {round,square}" in said.getvalue()
for choices in ("off,toy,layer}", "random,mru,static}"):
    assert choices in said.getvalue().replace("\\n", "").replace(" ", "")

# A miss is served in the new way, where asked for and where it is the fastest, and what it did is recorded.
RECORDER.start()
generator = torch.Generator().manual_seed(7)
with open_emulated(DeviceProfile("tiny", "for tests", 2**24, 20.0, 20.0, 1.0)) as device:
    for policy in ("lru", "mru", "auto"):
        with Layers(device, slots=4, mode="toy", policy=policy) as layers:
            for count in (1, 4, 1):
                layers.check(0, routing(generator, count, 3))
                layers.cache.wait()
spans, steps = RECORDER.take_spans(), RECORDER.take_steps()
assert "toy" in {event["args"]["name"] for event in trace_events(spans, steps) if event["name"] == "thread_name"}
table = io.StringIO()
write_spans(spans, table)
assert "\\ntoy,0,copy," in table.getvalue()
begun = int(spans["start_ns"].min())
assert range_averages(spans, steps, begun, begun + 10**10).gigabytes_per_s["toy"] > 0

machine, shape = read_machine("desktop-rtx-4070-12gb"), read_model("qwen3-30b-a3b")
planned = predict_decode(machine, shape, EngineConfig("", misses="toy", cache_policy="mru"))
assert planned.tokens_per_s > 0
assert "TOY_8" in as_quantised(shape, "model-TOY_8.gguf").stored.in_place.formats

assert set(get_args(CachePolicy)) == {"auto", *POLICY_NAMES}
selector, adopted = PolicySelector(4), None
for step in range(4000):
    adopted = selector.observe([step % 6]) or adopted
assert selector.adopted == "mru", selector.hit_rates()
assert type(adopted).__name__ == "Mru"

assert family_of("toy_text").packs_rows
assert form_of("toy_text") is HERMES

async def ask():
    app = make_app(Service(ScriptedBroker(ends=True), made_up_models()), Address(port=0))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return [(await client.post("/toys", json={"toy": toy})).json() for toy in ("", 5, "none")]

squeaks, *errors = asyncio.run(ask())
assert squeaks.endswith(" squeaks")
assert [error["status"] for error in errors] == [400, 404]
"""

WINDOW = """
import sys, time
from pathlib import Path

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QApplication, QLabel

from app.services.history.history import History
from app.services.settings import Settings
from app.theme import ThemeController
from app.widgets.timeline.lanes import lane_help, lanes_of, read_lane, reading, track_name
from app.widgets.timeline.navigator import Viewport
from engine.common.lanes import track_number
from engine.planner.simulator.sweeps import Timeline
from engine.telemetry import lanes
from engine.telemetry.recorder import Recorder
from tests.app.layout_walker import layout_problems, without_name
from tests.app.stage import staged

recorder, begin = Recorder(), time.perf_counter_ns()
recorder.start()
recorder.span(track_number("toy"), lanes.COPY, begin, begin + 10**9, nbytes=5 * 10**8)
history = History()
history.add_spans(recorder.take_spans())
history.add_gauges(begin, {"heat": 41.0})
shown = {each.key: each for each in lanes_of(history, machine=True)}
viewport = Viewport(begin, 10**9, 100)
assert lane_help(shown["toy"]) == "What the toy does. It squeaks."
assert reading(shown["toy"], read_lane(shown["toy"], history, viewport, {}), 50) == "0.50 GB/s"
assert reading(shown["heat"], read_lane(shown["heat"], history, viewport, {}), 50) == "41 °C"
assert track_name("toy") == "toy"
assert Timeline().busy_s("toy") == 0

application = QApplication([])
settings, theme = Settings(), ThemeController("light", parent=application)
settings.set("toy", "square")
with staged(settings, theme, Path(sys.argv[1])) as stage:
    for size, text in ((QSize(1280, 800), 14), (QSize(720, 450), 20)):
        theme.set_font_px(text)
        stage.show(size)
        stage.window.show_page("tools")
        stage.settle()
        page = stage.window.page("tools")
        assert page.isVisible()
        assert "square" in {label.text() for label in page.findChildren(QLabel)}
        assert layout_problems(stage.window, size) == []
        assert without_name(stage.window) == []
"""

TYPE = """
import sys
from pathlib import Path

import numpy as np
import torch

from engine.checkpoint.gguf.file import read_gguf
from engine.formats.ggml import GGML
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import decoded_logits
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

folder = Path(sys.argv[1])
made = tiny_checkpoint("qwen3_moe", folder / "made", moe_intermediate_size=32)
file = write_model(made, folder / "toy.gguf", "qwen3moe", quantised="TOY_8")
found = read_gguf(file).tensors
assert {each.dtype for each in found.values()} == {"F32", "TOY_8"}
down = found["blk.1.ffn_down_exps.weight"]
raw = np.fromfile(file, np.uint8, down.nbytes, offset=down.offset).reshape(*down.shape[:-1], -1)
with opened_model(file, "fp32") as exact, torch.no_grad():
    held = exact.bank.layers["model.layers.1.mlp.experts"].stacked["down_proj"]
    assert torch.equal(held, torch.from_numpy(GGML["TOY_8"].dequantise(raw)))
    wanted = torch.cat(decoded_logits(exact.model)).flatten()
with opened_model(file, "auto") as ours, torch.no_grad():
    logits = torch.cat(decoded_logits(ours.model)).float().flatten()
    assert ours.info.precision == "stored"
    assert "TOY_8 became 8-bit" in ours.info.device_note
    assert torch.cosine_similarity(logits, wanted, 0).item() > 0.99
"""


def test_each_toy_works_in_the_engine(tree: Path, tmp_path: Path) -> None:
    _run(tree, ENGINE, tmp_path)


def test_the_page_and_the_lanes_are_shown(tree: Path, tmp_path: Path) -> None:
    _run(tree, WINDOW, tmp_path)


@pytest.mark.exhaustive
def test_a_model_of_the_type_is_read_and_decoded(tree: Path, tmp_path: Path) -> None:
    _run(tree, TYPE, tmp_path)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_no_other_file_names_a_type(name: str) -> None:
    assert name in GGML
    named = re.compile(rf"\b{name}\b|\b{name.lower()}\.h\b")
    sources = (each for end in ("py", "h", "cpp", "cu") for each in (ROOT / "engine").rglob(f"*.{end}"))
    assert {each.relative_to(ROOT).as_posix() for each in sources if named.search(each.read_text("utf-8"))} == {
        "engine/formats/ggml.py",
        f"{TYPES}/{name.lower()}.h",
        f"{TYPES}/all.h",
        CARD_TYPES,
    }
