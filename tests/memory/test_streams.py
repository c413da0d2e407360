"""Asynchronous operations on a device with streams: what waits for what. The device is a stand-in that takes notes."""

import contextlib

import pytest
import torch

from torchmpi_py.core import communication_thread
from torchmpi_py.core.handles import Work
from torchmpi_py.memory import devices


class Notes:
    """A device, its streams and its events."""

    def __init__(self):
        self.notes = []
        self.device = torch.device("cpu")
        self.now = "caller's stream"
        self.is_over = True

    def current(self):
        return Stream(self, self.now)

    def stream(self):
        return Stream(self, "own stream")

    @contextlib.contextmanager
    def on(self, stream):
        former, self.now = self.now, stream.name
        yield
        self.now = former

    def event(self):
        return Event(self, f"event {sum(1 for note in self.notes if note.startswith('made')) + 1}")


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        self.device.notes.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, device, name):
        device.notes.append(f"made {name}")
        self.device, self.name = device, name

    def record(self, stream):
        self.device.notes.append(f"{self.name} in {stream.name}")

    def query(self):
        return self.device.is_over

    def synchronize(self):
        self.device.notes.append(f"host waits for {self.name}")


class Step(Work):
    label = "work"

    def __init__(self, device, error=None):
        self.device, self.error = device, error

    def run(self, in_background=False):
        self.device.notes.append(f"work in {self.device.now}")
        if self.error:
            raise self.error
        return "result"


@pytest.fixture
def device(monkeypatch):
    notes = Notes()
    monkeypatch.setattr(devices, "of", lambda device: notes)
    thread = communication_thread.CommunicationThread(inline=False)
    former = communication_thread.current_thread
    communication_thread.current_thread = thread
    yield notes
    thread.close()
    communication_thread.current_thread = former


ORDER = [
    "event 2 in caller's stream",
    "own stream waits for event 2",
    "work in own stream",
    "event 1 in own stream",
]


def happened(device):
    return [note for note in device.notes if not note.startswith("made")]


def test_wait_orders_the_callers_stream_and_done_asks_the_device(device):
    handle = devices.submit(Step(device), device.device, [])
    device.is_over = False
    assert handle.wait() == "result"
    assert happened(device) == [*ORDER, "caller's stream waits for event 1"]
    assert not handle.done()
    device.is_over = True
    assert handle.done()
    assert handle.wait() == "result"  # on whatever stream is current then
    handle.synchronize()
    assert happened(device)[-1] == "host waits for event 1"


def test_errors_come_out_of_wait(device):
    handle = devices.submit(Step(device, ValueError("no")), device.device, [])
    for wait in (handle.wait, handle.synchronize):
        with pytest.raises(ValueError, match="no"):
            wait()
    assert happened(device) == ORDER
    assert handle.done()


def test_on_the_host_there_are_no_streams(device):
    handle = devices.submit(Step(device), None, [])
    assert handle.wait() == "result"
    assert device.notes == ["work in caller's stream"]


def test_the_host_as_a_device():
    host = devices.of(torch.device("cpu"))
    event = host.event()
    event.record(host.current())
    host.stream().wait_event(event)
    with host.on(host.stream()):
        assert event.query()
    assert not host.is_capturing()
