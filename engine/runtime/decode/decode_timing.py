"""How fast a loaded model decodes: real tokens at batch 1, timed from the first one on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.common.config import SamplingParams
from engine.runtime.decode.chat_session import ChatSession
from engine.runtime.decode.generation import CancelCheck, never_cancelled
from engine.runtime.loaded_model import LoadedModel
from engine.tuning.decode_rate import DecodeRate

TIMED_PROMPT = (
    "A railway switchyard sorts freight cars. Explain in plain words how the hump, the switches and the retarders work."
)
_FEWEST_TOKENS = 4


def time_decode(
    loaded: LoadedModel,
    prompt: Sequence[int],
    tokens: int,
    *,
    seconds: float = float("inf"),
    on_token: Callable[[int, float], None] = lambda _count, _rate: None,
    cancelled: CancelCheck = never_cancelled,
) -> DecodeRate:
    """Continues a prompt greedily by so many tokens after the first, whatever they are.

    Args:
        seconds: a slow model is stopped after so long, with the tokens that it has made, four at the least.
        on_token: told how many there are, and the rate since the first.

    Raises:
        EngineError: as `ChatSession.generate`.
    """
    arrivals: list[tuple[int, float]] = []
    begun = time.perf_counter()

    def on_text(_text: str, count: int) -> None:
        if arrivals and count == arrivals[-1][0]:
            return  # what was held back of the text: no further token
        arrivals.append((count, time.perf_counter()))
        first, since = arrivals[0]
        if count > first:
            on_token(count - first, (count - first) / (arrivals[-1][1] - since))

    def enough() -> bool:
        if cancelled():
            return True
        return bool(arrivals) and arrivals[-1][0] > _FEWEST_TOKENS and time.perf_counter() - arrivals[0][1] > seconds

    session = ChatSession(loaded)
    try:
        session.generate_from_ids(
            list(prompt), SamplingParams(max_tokens=tokens + 1), on_text=on_text, cancelled=enough, end_ids=frozenset()
        )
    finally:
        session.clear()
    if not arrivals:
        return DecodeRate(0.0, 0.0, 0)
    # Not every token completes a text.
    (first, first_s), (last, last_s) = arrivals[0], arrivals[-1]
    rate = (last - first) / (last_s - first_s) if last > first else 0.0
    return DecodeRate(rate, first_s - begun, last - first)
