"""The time that loading still takes is told per phase, and only once a phase has shown its rate."""

from app.services.engine_request import LoadingPace
from app.views.chat.model_picker import loading_words
from engine.protocol import Phase, Progress


def test_each_phase_has_a_rate_of_its_own() -> None:
    now = [100.0]
    pace = LoadingPace(lambda: now[0])

    def tell(phase: Phase, done: int, at_s: float) -> None:
        now[0] = at_s
        pace.note(Progress("load", phase, done * 10**9, 10 * 10**9))

    assert pace.share is None
    assert loading_words(pace) == "Opening the model"
    tell("reading", 1, 100.0)
    tell("reading", 2, 100.5)
    assert pace.left_s is None  # too early to tell
    tell("reading", 3, 102.0)
    assert pace.left_s == 7.0
    assert loading_words(pace).startswith("Reading weights")
    assert "3.00 GB of 10.0 GB" in loading_words(pace)
    assert "7 s left" in loading_words(pace)
    tell("converting", 4, 103.0)
    assert pace.left_s is None
    tell("converting", 4, 110.0)
    assert pace.left_s is None  # nothing moves: nothing is promised
    tell("converting", 5, 113.0)
    assert pace.left_s == 50.0
    assert loading_words(pace).startswith("Converting weights")
    tell("keeping", 11, 114.0)
    assert pace.share == 1.0
    pace.note(Progress("load", "loading", 0, 0))
    assert pace.share is None
    assert pace.left_s is None
    pace.note(None)
    assert pace.progress is None
