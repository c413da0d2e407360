"""Asynchronous operations on a device with streams: what waits for what. The device is a stand-in that is late."""

import pytest
import torch
from support.lazy_device import LazyDevice

from torchmpi_py.core import communication_thread
from torchmpi_py.core.handles import Work
from torchmpi_py.memory import devices


class Step(Work):
    """Queues its own end on the current stream."""

    label = "work"

    def __init__(self, device, error=None):
        self.device, self.error = device, error

    def run(self, in_background=False):
        self.device.do(lambda: self.device.over.append("work"))
        if self.error:
            raise self.error
        return self.device.now


@pytest.fixture(params=range(5))
def device(monkeypatch, request):
    """``over``: what has been carried out."""
    lazy = LazyDevice(request.param)
    lazy.over = []
    monkeypatch.setattr(devices, "of", lambda device: lazy)
    thread = communication_thread.CommunicationThread(inline=False)
    monkeypatch.setattr(communication_thread, "current_thread", thread)
    yield lazy
    thread.close()


def test_wait_orders_the_callers_stream_and_done_asks_the_device(device):
    device.do(lambda: device.over.append("before"))
    handle = devices.submit(Step(device), device.device, [])
    assert handle.wait() != "caller"
    assert not handle.done()
    assert device.over == []
    device.do(lambda: device.over.append("after"))
    handle.synchronize()
    assert device.over[:2] == ["before", "work"]
    assert handle.done()
    device.synchronize()
    assert device.over == ["before", "work", "after"]
    assert handle.wait() != "caller"  # again, on whatever stream is current then


def test_errors_come_out_of_wait(device):
    handle = devices.submit(Step(device, ValueError("no")), device.device, [])
    for wait in (handle.wait, handle.synchronize):
        with pytest.raises(ValueError, match="no"):
            wait()
    assert not handle.done()
    device.synchronize()
    assert device.over == ["work"]
    assert handle.done()


def test_on_the_host_there_are_no_streams(device):
    handle = devices.submit(Step(device), None, [])
    assert handle.wait() == "caller"
    assert list(device.queues) == ["caller"]


def test_the_host_as_a_device():
    host = devices.of(torch.device("cpu"))
    event = host.event()
    event.record(host.current())
    host.stream().wait_event(event)
    with host.on(host.stream()):
        assert event.query()
    assert not host.is_capturing()
