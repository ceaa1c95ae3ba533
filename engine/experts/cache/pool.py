"""One pool of slots: who is resident, who is arriving, who may not leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.experts.cache.policies import Key, Policy

Slot = int


class Pool:
    """`capacity` slots and the policy that says who leaves.

    A key is absent, arriving (its slot is taken, the copy has not ended: not a hit) or resident.  Arriving and
    pinned keys are never evicted.

    Args:
        slots: identifiers of the slots, unique across the pools of one tier.
        on_evicted: called with every key that leaves.

    Attributes:
        residents: resident keys and their slots; not to be changed.
        arriving: keys whose copy is in flight, and their slots; not to be changed.
    """

    def __init__(self, slots: range, policy: Policy, on_evicted: Callable[[Key], None] | None = None) -> None:
        self.policy = policy
        self.residents: dict[Key, Slot] = {}
        self.arriving: dict[Key, Slot] = {}
        self._free: list[Slot] = list(reversed(slots))
        self._pins: dict[Key, int] = {}
        self._on_evicted = on_evicted

    @property
    def capacity(self) -> int:
        """Slots that the pool may use now."""
        return len(self._free) + len(self.residents) + len(self.arriving)

    @property
    def free(self) -> int:
        """Slots with nobody in them or on the way to them."""
        return len(self._free)

    def use(self, key: Key) -> Slot | None:
        """Counts a use of `key`: its slot if it is resident (a hit), else None (a miss)."""
        slot = self.residents.get(key)
        if slot is None:
            self.policy.missed(key)
        else:
            self.policy.hit(key)
        return slot

    def use_all(self, keys: Sequence[Key]) -> list[Slot | None]:
        """`use` for the keys of one step, of which the residents are pinned: a step is nearly all of what is done."""
        residents, pins, hit, missed = self.residents, self._pins, self.policy.hit, self.policy.missed
        slots: list[Slot | None] = []
        for key in keys:
            slot = residents.get(key)
            if slot is None:
                missed(key)
            else:
                hit(key)
                pins[key] = pins.get(key, 0) + 1
            slots.append(slot)
        return slots

    def pin(self, key: Key) -> None:
        """Keep the resident `key` where it is until `unpin`; pins count."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Give back one `pin`."""
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def is_used(self, key: Key) -> bool:
        """Whether somebody has pinned `key`."""
        return key in self._pins

    def reserve(self, key: Key, only_if_admitted: bool = True) -> Slot | None:
        """A slot for the absent `key`, which is arriving from now on, or None if no one should or can leave.

        Args:
            only_if_admitted: let the policy refuse when the victim is worth more than `key`.

        Raises:
            ValueError: if `key` is already resident or arriving: its bytes would be counted twice.
        """
        if key in self.residents or key in self.arriving:
            raise ValueError(f"expert {key} has a slot already")
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._victim()
            if victim is None or (only_if_admitted and not self.policy.admits(key, victim)):
                return None
            self.policy.remove(victim)
            slot = self.residents.pop(victim)
            if self._on_evicted is not None:
                self._on_evicted(victim)
        self.arriving[key] = slot
        return slot

    def arrived(self, key: Key) -> None:
        """The copy of `key` has ended: from now on it is resident."""
        self.residents[key] = self.arriving.pop(key)
        self.policy.insert(key)

    def abandon(self, key: Key) -> None:
        """The copy of `key` failed or was cancelled: its slot is free again."""
        self._free.append(self.arriving.pop(key))

    def evict(self, key: Key) -> Slot:
        """Takes the resident, unpinned `key` out.

        Raises:
            ValueError: if it is pinned.
        """
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        self.policy.remove(key)
        slot = self.residents.pop(key)
        self._free.append(slot)
        if self._on_evicted is not None:
            self._on_evicted(key)
        return slot

    def shrink(self, count: int) -> list[Slot]:
        """Gives up to `count` slots back, evicting as the policy says; fewer if the rest is in use or in flight."""
        given: list[Slot] = []
        while len(given) < count:
            if not self._free:
                victim = self._victim()
                if victim is None:
                    break
                self.evict(victim)
            given.append(self._free.pop())
        return given

    def withdraw(self, slots: range) -> bool:
        """Takes these very slots out, evicting who is in them; False, and nothing changed, if one of them is in use."""
        leaving = [key for key, slot in self.residents.items() if slot in slots]
        if any(key in self._pins for key in leaving) or any(slot in slots for slot in self.arriving.values()):
            return False
        for key in leaving:
            self.evict(key)
        self._free = [slot for slot in self._free if slot not in slots]
        return True

    def move(self, key: Key, slot: Slot) -> Slot:
        """The resident `key` has been copied to `slot`, which was none of the pool's; the one that it leaves.

        Raises:
            ValueError: if it is pinned.
        """
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        left, self.residents[key] = self.residents[key], slot
        return left

    def grow(self, slots: list[Slot]) -> None:
        """Adds slots, for example those that `shrink` gave back before."""
        self._free.extend(slots)

    def adopt(self, policy: Policy) -> None:
        """Let another policy (one without residents) decide from now on; who is resident stays so."""
        for key in list(self.policy.victims()):
            policy.insert(key)
        self.policy = policy

    def _victim(self) -> Key | None:
        pins = self._pins
        for key in self.policy.victims():
            if key not in pins:
                return key
        return None
