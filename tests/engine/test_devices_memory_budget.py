"""Every byte of a budget is accounted for, whatever happens."""

import threading

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.common.errors import ErrorCode
from engine.devices.host_memory import HostMemory, allocate_host, available_ram
from engine.devices.memory_budget import DeviceMemoryError, MemoryBudget, MemoryCategory, Reservation
from tests.refusals import refused

CATEGORIES = st.sampled_from(MemoryCategory)
SIZES = st.integers(0, 400)


class BudgetMachine(RuleBasedStateMachine):
    """A budget against a plain dictionary of what should be counted."""

    memories = Bundle("memories")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.total = 1000
        self.used = dict.fromkeys(MemoryCategory, 0)
        self.peak = 0
        self.device_is_full = False
        self.budget = MemoryBudget("a device", self.total, self.allocator)

    def allocator(self, nbytes: int) -> torch.Tensor:
        if self.device_is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate_host(nbytes)

    @property
    def free(self) -> int:
        return max(0, self.total - sum(self.used.values()))

    @rule(target=memories, nbytes=SIZES, category=CATEGORIES, full=st.booleans())
    def allocate(self, nbytes: int, category: MemoryCategory, full: bool) -> object:
        self.device_is_full = full
        if nbytes > self.free or full:
            with pytest.raises(DeviceMemoryError) as caught:
                self.budget.allocate(nbytes, category)
            assert (caught.value.asked, caught.value.free) == (nbytes, self.free)
            self.peak = max(self.peak, self.budget.use().peak)  # it was counted while the device was asked
            return multiple()
        memory = self.budget.allocate(nbytes, category)
        assert memory.shape == (nbytes,)
        assert memory.data_ptr() % 4096 == 0
        assert self.budget.holds(memory[: nbytes // 2])
        self.used[category] += nbytes
        return memory, category

    @rule(taken=consumes(memories))
    def release(self, taken: tuple[torch.Tensor, MemoryCategory]) -> None:
        memory, category = taken
        self.budget.release(memory)
        self.used[category] -= memory.nbytes
        with pytest.raises(ValueError, match="already released"):
            self.budget.release(memory)

    @rule(target=reservations, nbytes=SIZES, category=CATEGORIES)
    def reserve(self, nbytes: int, category: MemoryCategory) -> object:
        if nbytes > self.free:
            with pytest.raises(DeviceMemoryError):
                self.budget.reserve(nbytes, category)
            return multiple()
        self.used[category] += nbytes
        return self.budget.reserve(nbytes, category)

    @rule(reservation=reservations, nbytes=SIZES)
    def resize(self, reservation: Reservation, nbytes: int) -> None:
        more = nbytes - reservation.nbytes
        if more > 0 and more > self.free:
            with pytest.raises(DeviceMemoryError):
                reservation.resize(nbytes)
            return
        reservation.resize(nbytes)
        self.used[reservation.category] += more

    @rule(total=st.integers(0, 1500))
    def limit(self, total: int) -> None:
        self.budget.limit(total)
        self.total = total

    @invariant()
    def adds_up(self) -> None:
        use = self.budget.use()
        self.peak = max(self.peak, use.used)
        assert use.by_category == self.used
        assert use.used == sum(self.used.values())
        assert (use.total, self.budget.total) == (self.total, self.total)
        assert self.budget.free == self.free
        assert self.budget.excess == max(0, use.used - self.total)
        assert use.peak == self.peak


TestBudgetMachine = BudgetMachine.TestCase


def test_threads_never_get_more_than_there_is() -> None:
    budget = MemoryBudget("a device", 10_000, allocate_host)
    most: list[int] = []

    def grab() -> None:
        held: list[torch.Tensor] = []
        for turn in range(200):
            try:
                held.append(budget.allocate(1000 + turn, MemoryCategory.EXPERTS))
            except DeviceMemoryError:
                while held:
                    budget.release(held.pop())
            most.append(budget.use().used)
        while held:
            budget.release(held.pop())

    threads = [threading.Thread(target=grab) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 10_000
    assert budget.use().peak <= 10_000
    assert budget.use().used == 0


def test_messages_say_what_to_do() -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise MemoryError

    budget = MemoryBudget("cuda:0", 2_000_000_000, refuse)
    with pytest.raises(DeviceMemoryError, match=r"cuda:0 .*2\.0 GB .*3\.0 GB .*experts.*--vram"):
        budget.allocate(3_000_000_000, MemoryCategory.EXPERTS)
    with pytest.raises(DeviceMemoryError, match=r"1\.0 GB for kv"):
        budget.allocate(1_000_000_000, MemoryCategory.KV)
    assert budget.use().used == 0


def test_what_the_host_does_not_have_is_refused_before_it_is_touched() -> None:
    budget = MemoryBudget("emulated:big#0", 2**50, allocate_host)
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, kind=DeviceMemoryError):
        budget.allocate(available_ram() * 2, MemoryCategory.EXPERTS)
    with pytest.raises(MemoryError):
        HostMemory().allocate(available_ram() * 2)


def test_other_errors_of_an_allocator_are_not_called_a_lack_of_memory() -> None:
    def broken(nbytes: int) -> torch.Tensor:
        raise RuntimeError("the card fell off the bus")

    budget = MemoryBudget("cuda:0", 1000, broken)
    with pytest.raises(RuntimeError, match="fell off"):
        budget.allocate(10, MemoryCategory.KV)
    assert budget.use().used == 0
