"""How many misses are copied to a device after a token: as many as its hits pay for, twice over.

A copy reads the same memory as the CPU that computes misses, and on an emulated card it also takes a core.  What a copy
costs, and what a hit gains over a miss, is read from the tokens themselves: their times are explained by how many
experts they missed and how many copies were started before them, by least squares in which old tokens count less and
less (Ljung 1999, section 11.2, as sums).  Before there are tokens enough, what was measured of single experts counts.
"""

from __future__ import annotations

_REMEMBERED = 256
"""Tokens after which one counts by 1/e."""
_PRIOR = 32.0
"""The estimate beforehand counts as so many tokens, each an expert or a copy away from the mean."""
_SHARE = 0.5
"""Part of what hits gain that copies may cost."""
_TRIALS = 0.01
"""Part of the time that copies may take even if hits gain nothing: otherwise nobody would see when they do."""
_DEAREST = 16.0
"""The most hits that are asked for a copy."""
_OUTLIER = 2.0
"""A token counts as no longer than so many usual ones: something else has run meanwhile."""


class CopyPace:
    """The price of copies, and how many are due.

    Args:
        hit_s: seconds that a hit gains over a miss, as estimated beforehand.
        copy_s: seconds that a copy costs the tokens meanwhile, as estimated beforehand.

    Attributes:
        hit_s, copy_s: the same as of now.
        token_s: of late.
    """

    def __init__(self, hit_s: float, copy_s: float) -> None:
        self.hit_s, self.copy_s, self.token_s = hit_s, copy_s, 0.0
        self._prior = (hit_s, copy_s)
        self._weight, self._missed, self._copies = 0.0, 0.0, 0.0
        self._mm = self._mc = self._cc = self._mt = self._ct = 0.0
        self._due = 0.0

    def observe(self, token_s: float, missed: int, copies: int) -> None:
        """A token took so long, with so many experts missed, and copies started before it."""
        if self._weight:
            token_s = min(token_s, _OUTLIER * self.token_s)
        keep = 1 - 1 / _REMEMBERED
        self._weight = keep * self._weight + 1
        share = 1 / self._weight
        m, c, t = missed - self._missed, copies - self._copies, token_s - self.token_s
        self._missed, self._copies, self.token_s = (
            self._missed + share * m,
            self._copies + share * c,
            self.token_s + share * t,
        )
        rest = 1 - share  # the sums are about the means, which have moved (West 1979)
        self._mm, self._mc = keep * self._mm + rest * m * m, keep * self._mc + rest * m * c
        self._cc, self._mt = keep * self._cc + rest * c * c, keep * self._mt + rest * m * t
        self._ct = keep * self._ct + rest * c * t
        mm, cc = self._mm + _PRIOR, self._cc + _PRIOR
        mt, ct = self._mt + _PRIOR * self._prior[0], self._ct + _PRIOR * self._prior[1]
        determinant = mm * cc - self._mc * self._mc
        self.hit_s = (mt * cc - ct * self._mc) / determinant
        self.copy_s = (ct * mm - mt * self._mc) / determinant

    @property
    def price(self) -> float:
        """Hits that pay for a copy, twice over: a policy that brings experts for fewer costs more than it gains."""
        asked = self.copy_s / (_SHARE * self.hit_s) if self.hit_s > 0 else _DEAREST
        return min(max(asked, 0.0), _DEAREST)

    def due(self, hits: int, most: int) -> int:
        """How many copies to start after a token with so many hits, up to `most`."""
        worth_s = max(_SHARE * self.hit_s * hits, _TRIALS * self.token_s)
        self._due = min(self._due + worth_s / self.copy_s, most) if self.copy_s > 0 else float(most)
        return int(self._due)

    def started(self, copies: int) -> None:
        """So many of those due."""
        self._due -= copies
