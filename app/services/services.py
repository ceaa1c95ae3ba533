"""All services behind the pages, created once and passed to their users."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import ChatStore
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient
from app.services.installation import StarterDownload
from app.services.model_start import ModelStart
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.services.token_counter import TokenCounter
from app.services.tuning_outrun import HardwareChange, TuningOutrun
from app.theme import ThemeController

if TYPE_CHECKING:
    from app.services.api_server import ApiServer
    from app.services.batch_jobs import BatchJobs
    from app.services.batch_sample import BatchSample
    from app.services.documents import Documents
    from app.services.downloads import Downloads
    from app.services.endpoints import Endpoints
    from app.services.engine_part import EnginePart
    from app.services.hub import Hub
    from app.services.kept import SavedPresets, SavedPrompts
    from app.services.library import Library, ModelSpeeds
    from app.services.tools import Tools
    from app.services.tuning import SpeedTest, Tuning
    from app.services.updates import Updates


@dataclass
class Services:
    """One of each.  Those that the window does not need at once are created on first use."""

    settings: Settings
    theme: ThemeController
    client: EngineClient
    store: ChatStore
    devices: DeviceMonitor
    telemetry: TelemetryHub
    model_start: ModelStart
    download: StarterDownload
    hardware_change: HardwareChange
    tuning_outrun: TuningOutrun
    answers: AnswerQueue
    token_counter: TokenCounter

    @classmethod
    def around(
        cls,
        client: EngineClient,
        store: ChatStore,
        settings: Settings,
        theme: ThemeController,
        devices: DeviceMonitor | None = None,
    ) -> Services:
        devices = devices or DeviceMonitor()
        start, answers = ModelStart(client, settings), AnswerQueue(client, store)
        answers.model_wanted.connect(start.need)
        return cls(
            settings=settings,
            theme=theme,
            client=client,
            store=store,
            devices=devices,
            telemetry=TelemetryHub(client, settings, devices),
            model_start=start,
            download=StarterDownload(),
            hardware_change=HardwareChange(devices),
            tuning_outrun=TuningOutrun(client),
            answers=answers,
            token_counter=TokenCounter(),
        )

    @cached_property
    def jobs(self) -> BatchJobs:
        from app.services.batch_jobs import BatchJobs

        jobs = BatchJobs(self.client, at_once=lambda: self.settings.jobs_at_once)
        self.settings.changed.connect(jobs.start_more)
        jobs.model_wanted.connect(self.model_start.need)
        return jobs

    @cached_property
    def prompts(self) -> SavedPrompts:
        from app.services.kept import SavedPrompts

        return SavedPrompts()

    @cached_property
    def presets(self) -> SavedPresets:
        from app.services.kept import SavedPresets

        return SavedPresets()

    @cached_property
    def sample(self) -> BatchSample:
        from app.services.batch_sample import BatchSample

        return BatchSample(self.client, self.jobs)

    @cached_property
    def tuning(self) -> Tuning:
        from app.services.tuning import Tuning

        return Tuning(self.client, self.settings)

    @cached_property
    def library(self) -> Library:
        from app.services.library import Library

        return Library()

    @cached_property
    def hub(self) -> Hub:
        from app.services.hub import Hub

        return Hub()

    @cached_property
    def downloads(self) -> Downloads:
        from app.services.downloads import Downloads

        return Downloads(self.settings)

    @cached_property
    def engine_part(self) -> EnginePart:
        from app.services.engine_part import EnginePart

        return EnginePart(self.downloads)

    @cached_property
    def updates(self) -> Updates:
        from app.services.updates import Updates

        return Updates(self.settings, self.downloads, lambda: bool(self.client.answering or self.jobs.running))

    @cached_property
    def speeds(self) -> ModelSpeeds:
        from app.services.library import ModelSpeeds

        return ModelSpeeds(self.settings)

    @cached_property
    def speed_test(self) -> SpeedTest:
        from app.services.tuning import SpeedTest

        return SpeedTest(self.client, self.model_start)

    @cached_property
    def endpoints(self) -> Endpoints:
        from app.services.endpoints import Endpoints

        return Endpoints(self.settings)

    @cached_property
    def documents(self) -> Documents:
        from app.services.documents import Documents

        return Documents(self.store)

    @cached_property
    def tools(self) -> Tools:
        from app.services.tools import Tools

        return Tools(self.settings, lambda: self.documents, lambda job, rows: self.jobs.add(job, rows))

    @cached_property
    def api_server(self) -> ApiServer:
        from app.services.api_server import ApiServer

        return ApiServer(self.client, self.settings, self.model_start)

    def close(self) -> None:
        made = vars(self)
        if "jobs" in made:
            self.jobs.close_down()
        if "tuning" in made:
            self.tuning.close()
        for name in (
            "engine_part",
            "updates",
            "downloads",
            "library",
            "hub",
            "speeds",
            "api_server",
            "endpoints",
            "tools",
            "documents",
            "prompts",
            "presets",
        ):
            if name in made:
                made[name].close()
        self.telemetry.close()
        for service in (self.token_counter, self.download, self.hardware_change, self.tuning_outrun, self.model_start):
            service.close()
