"""What every device must do, whatever it is: test classes of each kind inherit this and give a `device` fixture."""

import itertools
import time
from typing import NoReturn

import pytest
import torch

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import COPY, CopyRecord, Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER
from tests.refusals import refused


def fail() -> NoReturn:
    raise ZeroDivisionError("on purpose")


def host_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


class DeviceContract:
    def test_memory_is_page_aligned_and_counted(self, device: Device) -> None:
        free = device.memory.free
        memory = device.memory.allocate(5000, MemoryCategory.EXPERTS)
        assert memory.data_ptr() % 4096 == 0
        assert (memory.shape, memory.dtype, memory.device) == ((5000,), torch.uint8, device.torch_device)
        assert device.memory.free == free - 5000
        device.memory.release(memory)
        assert device.memory.free == free

    def test_memory_beyond_the_budget_is_refused_and_the_rest_is_still_there(self, device: Device) -> None:
        with pytest.raises(DeviceMemoryError) as caught:
            device.memory.allocate(device.memory.free + 2**50, MemoryCategory.KV)
        assert caught.value.code == ErrorCode.NOT_ENOUGH_MEMORY
        assert device.name in caught.value.message
        device.memory.release(device.memory.allocate(4096, MemoryCategory.KV))

    def test_host_memory_is_page_aligned(self, device: Device) -> None:
        memory = device.host_memory.allocate(3 * 4096, unit=4096)
        assert memory.data_ptr() % 4096 == 0
        assert memory.device.type == "cpu"
        device.host_memory.release(memory)
        assert device.host_memory.pinned_bytes == 0

    def test_bytes_go_to_the_device_and_back(self, device: Device) -> None:
        there = device.memory.allocate(3_000_001, MemoryCategory.STAGING)
        sent, back = host_bytes(3_000_001), torch.empty(3_000_001, dtype=torch.uint8)
        arrived = device.h2d_stream.copy(there, sent)
        device.d2h_stream.wait(arrived)
        device.d2h_stream.copy(back, there).wait()
        assert torch.equal(back, sent)

    @pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)])
    def test_copies_of_every_shape(self, device: Device, shape: tuple[int, ...]) -> None:
        sent = torch.randn(shape)
        there = torch.empty(shape, device=device.torch_device)
        back = torch.empty(shape)
        device.small_copy_stream.copy(there, sent)
        device.small_copy_stream.copy(back, there).wait()
        assert torch.equal(back, sent)

    def test_copies_between_strided_tensors(self, device: Device) -> None:
        sent = torch.randn(6, 8).t()
        there = torch.empty(8, 12, device=device.torch_device)[:, ::2]
        device.h2d_stream.copy(there, sent).wait()
        assert torch.equal(there.cpu(), sent)

    @pytest.mark.parametrize("other", [torch.empty(4), torch.empty(2, 2, dtype=torch.uint8)])
    def test_copies_of_unlike_tensors_are_refused_at_once(self, device: Device, other: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="cannot copy"):
            device.h2d_stream.copy(torch.empty(4, dtype=torch.uint8, device=device.torch_device), other)
        device.h2d_stream.synchronize()

    def test_a_stream_works_in_order(self, device: Device) -> None:
        total = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        events = [device.compute_stream.submit(lambda n=n: total.mul_(3).add_(n)) for n in range(20)]
        events[-1].wait()
        expected = 0
        for n in range(20):
            expected = expected * 3 + n
        assert int(total) == expected
        assert all(event.done() for event in events)
        spans = [(event.started_s, event.ended_s) for event in events]
        assert all(start <= end for start, end in spans)
        # A card keeps time to half a microsecond.
        assert all(a[1] <= b[0] + 2e-6 for a, b in itertools.pairwise(spans))

    def test_events_carry_spans_of_the_host_clock(self, device: Device) -> None:
        before = clock.now()
        event = device.h2d_stream.copy(torch.empty(10**6, device=device.torch_device), torch.ones(10**6))
        assert event.wait()
        after = clock.now()
        assert before - 1e-3 <= event.started_s <= event.ended_s <= after + 1e-3
        assert event.done()
        assert event.failure is None

    def test_a_stream_waits_for_another(self, device: Device) -> None:
        memory = torch.zeros(4 * 10**6, dtype=torch.uint8, device=device.torch_device)
        found = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        device.synchronize()
        for round_ in range(1, 6):
            arrived = device.h2d_stream.copy(memory, torch.full_like(memory, round_, device="cpu"))
            device.compute_stream.wait(arrived)
            seen = device.compute_stream.submit(lambda: found.copy_(memory.long().sum()))
            device.h2d_stream.wait(seen)  # the next copy overwrites what is read here
            seen.wait()
            assert int(found) == round_ * memory.numel()
            assert seen.started_s >= arrived.ended_s - 2e-6

    def test_record_is_done_when_all_before_it_is(self, device: Device) -> None:
        work = device.compute_stream.submit(lambda: time.sleep(0.01))
        end = device.compute_stream.record()
        end.wait()
        assert work.done()
        assert end.ended_s >= work.ended_s - 2e-6

    def test_an_error_surfaces_at_every_later_wait_until_recovery(self, device: Device) -> None:
        ran: list[int] = []
        stream = device.compute_stream
        good = stream.submit(lambda: ran.append(1))
        bad = stream.submit(fail)
        late = stream.submit(lambda: ran.append(2))
        good.wait()
        for event in (bad, late, bad):
            with refused(ErrorCode.INTERNAL, match="ZeroDivisionError: on purpose"):
                event.wait()
            assert event.done()
            assert event.failure is not None
        assert stream.failure is not None
        with pytest.raises(EngineError, match="on purpose"):
            device.synchronize()
        device.recover()
        assert stream.failure is None
        stream.submit(lambda: ran.append(3)).wait()
        device.synchronize()
        assert ran == [1, 3]

    def test_a_failure_reaches_the_streams_that_wait_for_it_and_no_other(self, device: Device) -> None:
        bad = device.compute_stream.submit(fail)
        device.h2d_stream.wait(bad)
        ran: list[int] = []
        event = device.h2d_stream.submit(lambda: ran.append(1))
        with pytest.raises(EngineError, match="on purpose"):
            event.wait()
        device.d2h_stream.submit(lambda: ran.append(2)).wait()
        assert ran == [2]
        device.recover()
        device.synchronize()

    def test_an_engine_error_keeps_its_code(self, device: Device) -> None:
        def refuse() -> None:
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, "The record is damaged.")

        with refused(ErrorCode.CHECKPOINT_DAMAGED, match=r"The record is damaged\."):
            device.compute_stream.submit(refuse).wait()
        device.recover()

    def test_work_in_inference_mode_may_change_inference_tensors(self, device: Device) -> None:
        with torch.inference_mode():
            tensor = torch.zeros(3, device=device.torch_device)
            device.compute_stream.submit(lambda: tensor.add_(1)).wait()
            device.h2d_stream.copy(tensor, torch.full((3,), 2.0)).wait()
        assert tensor.tolist() == [2, 2, 2]

    def test_every_copy_is_told_of_before_its_event_is_done(self, device: Device) -> None:
        told: list[CopyRecord] = []
        stop = device.copy_log.listen(told.append)
        broken = device.copy_log.listen(lambda record: fail())
        there = device.memory.allocate(1000, MemoryCategory.EXPERTS)
        event = device.h2d_stream.copy(there, host_bytes(1000))
        event.wait()
        assert [(one.stream, one.nbytes) for one in told] == [(device.h2d_stream.name, 1000)]
        assert (told[0].started_s, told[0].ended_s) == (event.started_s, event.ended_s)
        stop()
        broken()
        device.h2d_stream.copy(there, host_bytes(1000)).wait()
        assert len(told) == 1

    def test_whatever_is_copied_or_labelled_has_a_span(self, device: Device) -> None:
        there = device.memory.allocate(4096, MemoryCategory.STAGING)
        RECORDER.start()
        try:
            for label in (COPY, None, (lanes.FETCH, 3, 7, 1)):
                device.h2d_stream.copy(there, host_bytes(4096), label).wait()
            device.compute_stream.submit(lambda: None, (lanes.EXPERTS, 2, -1, 5)).wait()
            device.compute_stream.submit(lambda: None).wait()
            spans = RECORDER.take_spans()
        finally:
            RECORDER.stop()
        fields = ["lane", "name", "layer", "expert", "count", "nbytes", "device"]
        assert {tuple(int(span[field]) for field in fields) for span in spans} == {
            (lanes.H2D, lanes.COPY, -1, -1, 1, 4096, device.index),
            (lanes.H2D, lanes.FETCH, 3, 7, 1, 4096, device.index),
            (lanes.GPU, lanes.EXPERTS, 2, -1, 5, 0, device.index),
        }

    def test_closing_twice_and_using_what_is_closed(self, device: Device) -> None:
        event = device.compute_stream.record()
        event.wait()
        device.close()
        device.close()
        assert event.wait()
        for stream in device.streams:
            for use in (stream.record, stream.synchronize, stream.recover, lambda s=stream: s.submit(fail)):
                with pytest.raises(EngineError, match="was closed"):
                    use()
