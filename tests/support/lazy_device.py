"""A device that does nothing before it must, and then in an order of its own among its streams."""

import collections
import contextlib
import itertools
import random

import torch


class LazyDevice:
    """In the place of ``memory.devices.Device``. What a test lets it ``do`` is queued on the current stream."""

    device = torch.device("cpu")

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.queues = collections.defaultdict(collections.deque)  # of (whether it may be done, what) by stream
        self.now = "caller"
        self.names = itertools.count()

    def current(self):
        return LazyStream(self, self.now)

    def stream(self):
        return LazyStream(self, next(self.names))

    @contextlib.contextmanager
    def on(self, stream):
        former, self.now = self.now, stream.name
        yield
        self.now = former

    def event(self):
        return LazyEvent(self)

    def pin(self, x):
        pass

    unpin = pin

    def do(self, function):
        self.queues[self.now].append((lambda: True, function))

    def step(self):
        """One task of a stream that is not waiting."""
        ready = [queue for queue in self.queues.values() if queue and queue[0][0]()]
        assert ready, "the streams wait for each other"
        self.random.choice(ready).popleft()[1]()

    def synchronize(self):
        while any(self.queues.values()):
            self.step()


class LazyStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        number = event.recorded
        self.device.queues[self.name].append((lambda: event.past >= number, lambda: None))


class LazyEvent:
    def __init__(self, device):
        self.device, self.recorded, self.past = device, 0, 0

    def record(self, stream):
        self.recorded += 1
        number = self.recorded

        def mark():
            self.past = max(self.past, number)

        self.device.queues[stream.name].append((lambda: True, mark))

    def query(self):
        return self.past >= self.recorded

    def synchronize(self):
        while not self.query():
            self.device.step()
