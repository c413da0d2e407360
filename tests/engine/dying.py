"""Ends this process at a chosen point of a save: before or after the n-th call of a function that touches files."""

import builtins
import os
import signal

import torch

TOUCHED = [(os, "open"), (os, "fsync"), (os, "rename"), (os, "unlink"), (builtins, "open"), (torch, "save")]


class Points:
    """Counts points, two per call; at the one called ``last`` the process is killed. -1: none."""

    def __init__(self, last=-1):
        self.last = last
        self.names = []

    def __enter__(self):
        self.originals = [(holder, name, getattr(holder, name)) for holder, name in TOUCHED]
        for holder, name, original in self.originals:
            setattr(holder, name, self._watched(name, original))
        return self

    def __exit__(self, *_):
        for holder, name, original in self.originals:
            setattr(holder, name, original)

    def _watched(self, name, original):
        def call(*arguments, **options):
            self._reach(f"before {name}")
            result = original(*arguments, **options)
            self._reach(f"after {name}")
            return result

        return call

    def _reach(self, name):
        if len(self.names) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)
