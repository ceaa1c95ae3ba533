"""One pool of slots: which experts are resident, arriving or pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.experts.cache.policies import Key, Policy

Slot = int


class Pool:
    """`capacity` slots and the eviction policy for them.

    A key is absent, arriving (its slot is reserved but the copy has not ended, so not a hit) or resident.  Arriving
    and pinned keys are never evicted.

    Args:
        slots: identifiers of the slots, unique across the pools of one tier.
        on_evicted: called with every evicted key.

    Attributes:
        residents: resident keys and their slots; read-only.
        arriving: keys whose copy is in flight, and their slots; read-only.
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
        return len(self._free) + len(self.residents) + len(self.arriving)

    @property
    def free(self) -> int:
        return len(self._free)

    def use(self, key: Key) -> Slot | None:
        """Records a use of `key`: its slot if it is resident (a hit), else None (a miss)."""
        slot = self.residents.get(key)
        if slot is None:
            self.policy.missed(key)
        else:
            self.policy.hit(key)
        return slot

    def use_all(self, keys: Sequence[Key]) -> list[Slot | None]:
        """`use` and `pin` for all keys of one step, inlined because this is the hot path."""
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
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def is_used(self, key: Key) -> bool:
        return key in self._pins

    def reserve(self, key: Key, only_if_admitted: bool = True) -> Slot | None:
        """Reserves a slot for the absent `key`, which is then arriving; None if no resident should or can be evicted.

        Args:
            only_if_admitted: let the policy refuse if the victim is worth more than `key`.
        """
        if key in self.residents or key in self.arriving:
            raise ValueError(f"expert {key} already has a slot")
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
        self.residents[key] = self.arriving.pop(key)
        self.policy.insert(key)

    def abandon(self, key: Key) -> None:
        self._free.append(self.arriving.pop(key))

    def evict(self, key: Key) -> Slot:
        """Evicts the resident `key`."""
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        self.policy.remove(key)
        slot = self.residents.pop(key)
        self._free.append(slot)
        if self._on_evicted is not None:
            self._on_evicted(key)
        return slot

    def shrink(self, count: int) -> list[Slot]:
        """Removes up to `count` slots, evicting by policy; fewer if the others are pinned or in flight."""
        removed: list[Slot] = []
        while len(removed) < count:
            if not self._free:
                victim = self._victim()
                if victim is None:
                    break
                self.evict(victim)
            removed.append(self._free.pop())
        return removed

    def withdraw(self, slots: range) -> bool:
        """Removes exactly these slots, evicting their residents.  False, with nothing changed, if any is in use.

        An expert whose copy failed may still be pinned by the step that wanted it, although it has no slot any more.
        Nothing is removed before it is unpinned, so that its pool still exists then.
        """
        leaving = [key for key, slot in self.residents.items() if slot in slots]
        if any(key in self._pins for key in leaving) or any(slot in slots for slot in self.arriving.values()):
            return False
        if self._pins.keys() - self.residents.keys() - self.arriving.keys():
            return False
        for key in leaving:
            self.evict(key)
        self._free = [slot for slot in self._free if slot not in slots]
        return True

    def move(self, key: Key, slot: Slot) -> Slot:
        """Records that `key` was copied to `slot`, which the pool did not have before; returns the slot it replaces."""
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        left, self.residents[key] = self.residents[key], slot
        return left

    def grow(self, slots: list[Slot]) -> None:
        self._free.extend(slots)

    def adopt(self, policy: Policy) -> None:
        for key in list(self.policy.victims()):
            policy.insert(key)
        self.policy = policy

    def _victim(self) -> Key | None:
        pins = self._pins
        for key in self.policy.victims():
            if key not in pins:
                return key
        return None
