"""What is wanted of the catalogue: words, a size, an ability, a licence, and whether it must run well here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.tuning.fit import ROLES, Recommendation


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """An offer must hold all of these.

    Attributes:
        words: in its name, its maker's, or what it is good at.
        most_bytes: of the download; 0 for any.
        ability: one of `engine.checkpoint.catalogue.ABILITIES`; empty for any.
        is_free: its licence allows every use.
        runs_well: fast enough for a chat here.
    """

    words: str = ""
    most_bytes: int = 0
    ability: str = ""
    is_free: bool = False
    runs_well: bool = False

    def takes(self, offer: Recommendation) -> bool:
        entry = offer.entry
        text = f"{entry.name} {entry.family} {entry.strengths} {entry.languages} {offer.reference}".casefold()
        return (
            all(word in text for word in self.words.casefold().split())
            and (not self.most_bytes or offer.bytes <= self.most_bytes)
            and (not self.ability or self.ability in entry.abilities)
            and (not self.is_free or entry.is_free)
            and (not self.runs_well or offer.verdict in ("fast", "works"))
        )


def offered(offers: tuple[Recommendation, ...], wanted: OfferFilter) -> tuple[Recommendation, ...]:
    """Those that are wanted: first what is recommended, balanced before fast and large; then as the catalogue has
    them."""
    order = {"balanced": 0, **{role: at for at, role in enumerate(ROLES, 1) if role != "balanced"}}
    return tuple(sorted(filter(wanted.takes, offers), key=lambda one: order.get(one.role, len(order) + 1)))
