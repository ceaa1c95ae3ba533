"""The Batch page with servers to choose: who answers, where text goes, what a trial says, and what a job shows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.batch_job import JobEntry, JobState
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import keys_for, on_each_node
from app.views.batch.page import BatchPage
from app.views.batch.phrases import pace_text, place_text, status_text
from app.widgets.quantities import SEPARATOR
from engine.batch_files.job_watcher import PlacePace
from engine.common.config import HERE, BatchJob, EngineConfig
from engine.protocol import BatchSampled, EndpointKey
from engine.remote import endpoint as keys
from engine.remote.endpoint import Endpoint, save_endpoint
from tests.app.scripted_batches import ScriptedBatches, row, shown_page
from tests.app.test_batch_page import drop, words

RACK = Endpoint("Rack", "http://10.0.0.5:8000/v1", "big/model")


@pytest.fixture(params=[True, False], ids=["with a model", "without a model"])
def engine(qapp: QApplication, request: pytest.FixtureRequest) -> Iterator[ScriptedBatches]:
    result = ScriptedBatches(loaded=request.param)
    yield result
    result.deleteLater()


@pytest.fixture
def page(engine: ScriptedBatches, switchyard_home: Path, qtbot: QtBot) -> Iterator[BatchPage]:
    save_endpoint(RACK)
    save_endpoint(Endpoint("Desk", "http://127.0.0.1:9/v1"))
    with shown_page(engine, qtbot) as page:
        yield page


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "complaints.csv"
    file.write_text("text\n" + "".join(f"line {n}\n" for n in range(6)), encoding="utf-8")
    return file


def fill(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    drop(page, table)
    qtbot.waitUntil(page.form.foot.start.isEnabled)
    qtbot.waitUntil(lambda: "6 rows" in page.form.input.caption.text())


@pytest.mark.takes_turns(2)
def test_who_answers_is_chosen_and_where_text_goes_is_said(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    places = page.form.places
    assert places.isVisible()
    assert places.box("Rack").accessibleDescription() == "10.0.0.5:8000 · big/model".replace(" · ", SEPARATOR)
    assert places.names == ()
    assert "No text leaves this PC" in places.sent.text()
    places.box("Desk").setChecked(True)
    assert places.names == (HERE, "Desk")
    assert "no text leaves it" in places.sent.text()
    places.box("Rack").setChecked(True)
    assert "sent to Rack (10.0.0.5:8000)" in places.sent.text()
    assert not places.twice.isHidden()
    places.box(HERE).setChecked(False)
    places.twice.setChecked(True)
    job = page.form.job()
    assert (job.endpoints, job.ask_twice) == (("Desk", "Rack"), True)
    for name in ("Desk", "Rack"):
        places.box(name).setChecked(False)
    assert not page.form.foot.start.isEnabled()
    assert "Choose who answers" in page.form.foot.plan.text()


@pytest.mark.takes_turns(2)
def test_a_trial_there_says_what_all_rows_take(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    fill(page, qtbot, table)
    page.form.places.box("Rack").setChecked(True)
    page.form.places.box(HERE).setChecked(False)
    assert "A trial" in page.form.foot.plan.text()
    page.form.sample.button.click()
    run = engine.samples[-1]
    engine.answer(row(0), row(1), row(2), sample=True)
    run.deliver(BatchSampled(run.id, 3, 120.0, 30.0, 2.5, 0.5, "EUR"))
    engine.end_sample()
    said = page.form.foot.plan.text()
    assert "2.5 s for a row" in said
    assert "3.00 EUR" in said


def test_a_job_for_servers_starts_without_a_model_and_shows_each_of_them(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    fill(page, qtbot, table)
    page.form.places.box("Rack").setChecked(True)
    page.form.places.box(HERE).setChecked(False)
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: page.pages.currentWidget() is page.job_view)
    assert engine.jobs[-1].command.job.endpoints == ("Rack",)
    why = "Rack does not accept the key: it may have expired."
    engine.tell(
        3,
        6,
        rate=20.0,
        places=(
            PlacePace("Rack", "10.0.0.5:8000", "out", why, rows=1),
            PlacePace("Desk", "127.0.0.1:9", tokens_per_s=20.0, under_way=2, rows=2, cost=0.0123, currency="EUR"),
        ),
    )
    shown = words(page.job_view.progress)
    for text in ("Rows are sent to Rack (10.0.0.5:8000)", "Not asked", "20 tokens/s", "2 rows at once", "0.0123 EUR"):
        assert text in shown
    assert "Rack (10.0.0.5:8000)" in "".join(
        label.toolTip() or label.text() for label in page.job_view.settings._values
    )
    engine.end(6)
    (entry,) = page._jobs.entries
    assert entry.state is JobState.FINISHED


def test_jobs_that_need_the_model_wait_for_it_and_others_do_not(
    engine: ScriptedBatches, switchyard_home: Path, tmp_path: Path
) -> None:
    jobs = BatchJobs(engine)
    for name, endpoints in (("a", ()), ("b", ("Rack",)), ("c", ("Rack", HERE)), ("d", ("Rack",))):
        jobs.add(BatchJob("in.csv", str(tmp_path / f"{name}.csv"), endpoints=endpoints))
    begun = [Path(run.command.job.output).stem for run in engine.jobs]
    assert begun == (["a", "b", "d"] if engine.model is not None else ["b", "d"])
    jobs.close_down()
    jobs.deleteLater()


def test_keys_of_this_run_go_along_and_no_others(switchyard_home: Path) -> None:
    local = Endpoint("Desk", "http://127.0.0.1:9/v1")
    save_endpoint(local)
    save_endpoint(Endpoint("Other", "http://127.0.0.1:10/v1"))
    job = BatchJob("in.csv", "out.csv", endpoints=("Desk", HERE))
    assert keys_for(job) == ()
    for endpoint, key in ((local, "sk-1"), (Endpoint("Other", "http://127.0.0.1:10/v1"), "sk-2")):
        keys.save_key(endpoint, key)
    assert keys_for(job) == (EndpointKey("Desk", "sk-1"),)
    assert keys_for(BatchJob("in.csv", "out.csv")) == ()
    for endpoint in (local, Endpoint("Other", "http://127.0.0.1:10/v1")):
        keys.forget_key(endpoint)


def test_a_job_is_given_to_a_cluster_where_ray_is_installed(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.views.batch.new_job.has_ray", lambda: True)
    fill(page, qtbot, table)
    places = page.form.places
    assert not places.cluster.isHidden()
    assert not places.address.isEnabled()
    places.box("Rack").setChecked(True)
    places.cluster.setChecked(True)
    assert not places.box("Rack").isEnabled()
    assert "the Ray cluster that this PC belongs to" in places.sent.text()
    places.address.setText(" ")
    assert not page.form.foot.start.isEnabled()
    places.address.setText("10.0.0.5:6379")
    assert "the Ray cluster at 10.0.0.5:6379" in places.sent.text()
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: page.pages.currentWidget() is page.job_view)
    if engine.config is None:
        assert engine.jobs == []  # nobody has said which model
        return
    job = engine.jobs[-1].command.job
    assert (job.ray, job.endpoints) == ("10.0.0.5:6379", ())
    engine.tell(0, 6, blocked="Connecting to the Ray cluster at 10.0.0.5:6379.")
    assert "Connecting to the Ray cluster at 10.0.0.5:6379." in words(page.job_view.progress)
    engine.tell(3, 6, places=(PlacePace("node one", "pc-one", tokens_per_s=20.0, under_way=2, rows=3),))
    shown = words(page.job_view.progress)
    assert "Rows are sent to node one (pc-one)" in shown
    settings = "".join(label.toolTip() or label.text() for label in page.job_view.settings._values)
    assert "the Ray cluster at 10.0.0.5:6379" in settings
    engine.end(6)


def test_nodes_of_a_cluster_have_no_limits_of_this_pc() -> None:
    config = EngineConfig("m", "cpu", "int8", ram_bytes=10**9, threads=2)
    assert on_each_node(config, BatchJob("in.csv", "out.csv", ray="auto")) == EngineConfig("m", precision="int8")
    assert on_each_node(config, BatchJob("in.csv", "out.csv")) is None
    assert on_each_node(None, BatchJob("in.csv", "out.csv", ray="auto")) is None


def test_a_chat_here_holds_up_nobody_elsewhere() -> None:
    job = BatchJob("in.csv", "out.csv", endpoints=(HERE, "Rack"))
    places = (PlacePace("Rack", "10.0.0.5:8000"), PlacePace(""))
    entry = JobEntry("k", job, JobState.RUNNING, 0.0, done=1, total=6, tokens_per_s=20.0, places=places)
    assert status_text(entry) == ("Rows are sent to Rack (10.0.0.5:8000). Chats go first on this PC.")
    entry = replace(entry, beside_chat=True)
    assert status_text(entry) == "Rows are sent to Rack (10.0.0.5:8000). This PC answers your chat first."
    near = replace(entry, places=(PlacePace("127.0.0.1:81", "127.0.0.1:81", under_way=1), PlacePace("")))
    assert status_text(near).startswith("Rows are sent to 127.0.0.1:81. ")  # what became of the other is not known yet
    near = replace(near, job=replace(job, endpoints=(HERE, "127.0.0.1:81")))
    assert status_text(near).startswith("Rows are sent to 127.0.0.1:81 on this PC; no text leaves it. ")
    assert place_text(near.places[0]) == "1 row at once"
    assert pace_text(entry)[0] == "20 tokens/s"
    alone = replace(entry, job=replace(job, endpoints=()))
    assert "Shares the engine with your chat" in status_text(alone)
    assert pace_text(alone) == ("", "")
