"""Which misses of a layer are served in which way, so that the last of them is done soonest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from engine.common.choice import Choice
from engine.experts.cache.policies import Key

_WORTH_ENTERING = 0.97
"""Part of the time without the first way that a layer may take with it: estimates are off by some per cent."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of serving misses in one way, as a pipeline of two stages, each handling one expert at a time.

    Attributes:
        seconds: tokens of an expert -> its time in the second stage.
        bring_s: time of an expert in the first stage.
        backlog_s, busy_s: time until the first and the second stage are free.
        keeps_caller: the second stage runs on the calling thread, which all such ways share.
        caller_s: what each expert keeps the calling thread otherwise, before that computes its own share.
        entry_s: what it takes once, before the first expert that is served so; asked of the first way only.
    """

    seconds: Callable[[int], float]
    bring_s: float = 0.0
    backlog_s: float = 0.0
    busy_s: float = 0.0
    keeps_caller: bool = False
    caller_s: float = 0.0
    entry_s: float = 0.0

    @property
    def each_s(self) -> float:
        """Time from one expert to the next in the first stage, which the calling thread has to feed."""
        return max(self.bring_s, self.caller_s)

    def alone_s(self, tokens: Sequence[int]) -> float:
        """When experts with so many tokens each are done, in this order, if all are served so."""
        arrived_s, ended_s, each_s = self.backlog_s, self.busy_s, self.each_s
        for count in tokens:
            arrived_s += each_s
            ended_s = max(ended_s, arrived_s) + self.seconds(count)
        return ended_s


def ends_s(ways: Sequence[Estimate], tokens: Sequence[Sequence[int]]) -> float:
    """When the last is done of experts with so many tokens each, most first, that are served in each way.

    The first way's caller lets the others begin before it computes.
    """
    first, own = ways[0], tokens[0]
    caller_s = first.busy_s + sum(len(some) * way.caller_s for way, some in zip(ways[1:], tokens[1:], strict=True))
    if own:
        caller_s += first.entry_s + sum(map(first.seconds, own))
    away_s = (way.alone_s(some) for way, some in zip(ways[1:], tokens[1:], strict=True) if some)
    return max(caller_s, *away_s, 0.0)


def split_among(misses: Sequence[tuple[Key, int]], ways: Sequence[Estimate]) -> list[list[Key]]:
    """Assigns misses to ways, to minimise the time when the last of them is done.

    Greedy, most tokens first: an expert moves from the first way to another if that makes the end earlier.  For the CPU
    and one link this is optimal while no expert has more tokens than the knee, since fetching any takes equally long.
    Beyond, where many tokens keep the device busier than the link, it is the usual rule for two machines (longest
    first, Graham 1969), and the order that overlaps copies and kernels best: equal times on the first of two machines,
    decreasing ones on the second (Johnson 1954).

    Args:
        misses: (key, tokens), any order.
        ways: the first one must keep the caller.

    Returns:
        Keys of each way, most tokens first; ties go to the first way.
    """
    order = sorted(misses, key=lambda miss: (-miss[1], miss[0]))
    sizes = {tokens for _, tokens in order}
    took_s = [{tokens: way.seconds(tokens) for tokens in sizes} for way in ways]
    each_s = [way.each_s for way in ways]
    served: list[list[Key]] = [[] for _ in ways]
    arrived_s, ended_s = [way.backlog_s for way in ways], [way.busy_s for way in ways]
    ended_s[0] += ways[0].entry_s + sum(took_s[0][tokens] for _, tokens in order)
    if all(not way.keeps_caller and way.backlog_s + way.each_s >= ended_s[0] for way in ways[1:]):
        served[0] = [key for key, _ in order]  # before another way had brought one, the first has done them all
        return served
    if order and (number := _sooner_alone(ways, [tokens for _, tokens in order])):
        served[number] = [key for key, _ in order]
        return served
    for key, tokens in order:
        chosen, now_s, best_s = 0, ended_s, (max(ended_s) * (1 - 1e-9), 0.0)
        for number in range(1, len(ways)):
            way, then_s = ways[number], ended_s.copy()
            then_s[0] += way.caller_s - took_s[0][tokens]
            place = 0 if way.keeps_caller else number
            then_s[place] = max(then_s[place], arrived_s[number] + each_s[number]) + took_s[number][tokens]
            end_s = max(then_s), sum(then_s)  # ties are broken by the least total time
            if end_s < best_s:
                chosen, now_s, best_s = number, then_s, end_s
        served[chosen].append(key)
        arrived_s[chosen] += each_s[chosen]
        ended_s = now_s
    if ways[0].entry_s and served[0]:
        for number, way in enumerate(ways[1:], 1):  # without the first way, nothing is paid for entering it
            without_s = way.alone_s([tokens for _, tokens in order])
            if not way.keeps_caller and _WORTH_ENTERING * without_s < max(ended_s):
                return [[key for key, _ in order] if each == number else [] for each in range(len(ways))]
    return served


def _sooner_alone(ways: Sequence[Estimate], tokens: Sequence[int]) -> int:
    """The other way, if there is but one and it is done before the first could have served even one: the number."""
    first, other, fewest = ways[0], ways[-1], tokens[-1]
    if len(ways) != 2 or not first.entry_s or other.keeps_caller or first.seconds(fewest) < other.caller_s:
        return 0
    least_s = first.busy_s + first.entry_s + (len(tokens) - 1) * other.caller_s + first.seconds(fewest)
    return int(_WORTH_ENTERING * other.alone_s(tokens) < least_s)


_LONGEST_REST: Final = 15
"""The most layers in a row that are not priced, where all misses went one way before."""


class PromptWay(Enum):
    """A way of all misses of a prompt's layer."""

    SHARED = "shared"
    FETCHED = "fetched"
    ON_CPU = "on the CPU"


def prompt_prices(
    misses: Sequence[tuple[int, int]], ahead: Collection[int], ways: Sequence[Estimate], busy_s: float
) -> tuple[dict[PromptWay, float], list[list[int]]]:
    """Seconds of a prompt's layer in each way that there is, and how both sides would share its misses.

    Args:
        misses: (expert, tokens).
        ahead: experts that are on their way to the card, which the processor takes only if it takes all.
        ways: the processor, and the link.
        busy_s: until the card has done what it has.
    """
    here, there = ways
    left = [miss for miss in misses if miss[0] not in ahead]
    left.sort(key=lambda miss: -miss[1])
    counts = [count for _, count in left]
    prices = {PromptWay.ON_CPU: max(ends_s(ways, [[count for _, count in misses], []]), busy_s)}
    here = replace(here, busy_s=here.busy_s + (len(misses) - len(left)) * there.caller_s)
    prices[PromptWay.FETCHED] = max(ends_s([here, there], [[], counts]), busy_s)
    shares = split_among(left, [here, there])
    if shares[0] and (shares[1] or len(left) < len(misses)):
        tokens = dict(left)
        shared = [[tokens[expert] for expert in mine] for mine in shares]
        prices[PromptWay.SHARED] = max(ends_s([here, there], shared), busy_s)
    shares[1][:0] = [expert for expert, _ in misses if expert in ahead]
    return prices, shares


@dataclass(slots=True)
class _OfSize:
    """Prompts of about one length.

    Attributes:
        choice: of their layers' way.
        way: of the last layer that was priced.
        rest, resting: layers that are not priced, in a row, and how many of them are left.
    """

    choice: Choice[PromptWay]
    way: PromptWay | None = None
    rest: int = 0
    resting: int = 0


class PromptChoice:
    """The way of a prompt's layers on one device, for prompts of each length; see `Choice` for `is_busy`.

    The split of a layer's misses is priced expert by expert.  What comes with each way is not: work of the host that
    the link or the card hides, threads that another program holds up, copies that the next layer finds under way.  So
    what whole layers took, from a layer's routing to that of the layer after it, corrects the price of their way.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._of_size: dict[int, _OfSize] = {}
        self._is_busy = is_busy

    def way(self, tokens: int) -> PromptWay | None:
        """Of the last layer with about so many tokens, if there was one."""
        return self._of(tokens).way

    def rests(self, tokens: int) -> PromptWay | None:
        """The way of a layer with so many tokens, if it need not be priced, which takes time."""
        known = self._of(tokens)
        if not known.resting:
            return None
        known.resting -= 1
        return known.way

    def choose(self, tokens: int, prices: Mapping[PromptWay, float]) -> PromptWay:
        """The way of a layer with so many tokens.

        Args:
            prices: seconds that the layer should take in each way that there is.
        """
        known = self._of(tokens)
        taken = known.choice.take(prices, steps=1 + known.rest)
        is_settled = taken is known.way is not PromptWay.SHARED and not known.choice.is_learning
        known.way, known.rest = taken, min(2 * known.rest + 1, _LONGEST_REST) if is_settled else 0
        known.resting = known.rest
        return taken

    def observe(self, tokens: int, way: PromptWay, took_s: float, price_s: float) -> None:
        """A layer with so many tokens, which went this way at this price, took so long."""
        self._of(tokens).choice.observe(way, took_s, price_s)

    def _of(self, tokens: int) -> _OfSize:
        size = tokens.bit_length()
        if size not in self._of_size:
            self._of_size[size] = _OfSize(
                Choice(tuple(PromptWay), warm=1, run=2, first=4, in_common=0.0, is_busy=self._is_busy)
            )
        return self._of_size[size]
