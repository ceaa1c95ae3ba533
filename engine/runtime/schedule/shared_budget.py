"""One budget of memory for pools whose pages hold keys and values in different ways.

Each pool may have all of it, as far as the others leave any.  What rows hold or were promised counts at once.  Memory
stays with a pool that once wrote to it, so before more would be in use than there is, pools give back pages which no
row holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.runtime.kv.pages import PagePool

_FEWEST_PAGES = 16
"""Given back at a time."""

Discard = Callable[[Sequence[int]], None]
"""Returns the memory of these pages to the system; they can be written to again."""


@dataclass(eq=False)
class _Member:
    pool: PagePool
    page_bytes: int
    discard: Discard

    @property
    def bytes_in_use(self) -> int:
        return self.pool.in_use * self.page_bytes

    @property
    def bytes_touched(self) -> int:
        return len(self.pool.touched) * self.page_bytes


class SharedBudget:
    """That of a first pool, which others join for a while.

    Args:
        page_bytes: of a page of this pool, in all layers.
    """

    def __init__(self, pool: PagePool, page_bytes: int, discard: Discard) -> None:
        self.nbytes = pool.capacity * page_bytes
        self._members: list[_Member] = []
        self.join(pool, page_bytes, discard)

    def join(self, pool: PagePool, page_bytes: int, discard: Discard) -> None:
        """This pool has its part of it from now on."""
        member = _Member(pool, page_bytes, discard)
        self._members.append(member)
        pool.others = lambda: self._others(member)
        pool.before_touching = lambda: self._make_room(member)

    def leave(self, pool: PagePool) -> None:
        """The memory of this pool is gone."""
        self._members = [each for each in self._members if each.pool is not pool]

    @property
    def bytes_touched(self) -> int:
        """Memory of all pages that were written to and not given back."""
        return sum(each.bytes_touched for each in self._members)

    def _others(self, member: _Member) -> int:
        """What the others have in use, in pages of this one."""
        others = sum(each.bytes_in_use for each in self._members if each is not member)
        return -(-others // member.page_bytes)

    def _make_room(self, member: _Member) -> None:
        """Before a page is written to for the first time; idle pages of its own pool go last."""
        for each in sorted(self._members, key=lambda each: each is member):
            over = self.bytes_touched + member.page_bytes - self.nbytes
            if over <= 0:
                return
            pages = each.pool.give_back(max(_FEWEST_PAGES, -(-over // each.page_bytes)))
            if pages:
                each.discard(pages)
