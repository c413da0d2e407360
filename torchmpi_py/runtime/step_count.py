"""The optimizer steps and samples of a rank, counted for ``torchmpirun --layouts`` (`launch.layouts`).

``import torch`` installs two of torch's global hooks where TORCHMPIRUN_LAYOUT names a folder, so any program is
measured as it is. The hook of optimizers keeps the time after each step. Only the first optimizer counts, while it
lives: a wrapper's step contains the step of the optimizer inside, and a program may have several optimizers.

The hook of modules finds the number of samples of a step: the first dimension of the first tensor that the outermost
module gets, summed over its calls in the step (accumulation of gradients). The outermost module is the first one in
training mode that is called with a tensor and has parameters to train. Modules are watched in three steps of the
warm-up alone, so a measured step costs one call of a Python function more than any other.
"""

import atexit
import itertools
import json
import os
import resource
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchmpi_py.launch import variables

_WATCHED_STEPS = 3  # by the hook of modules; a compiled model is compiled again without it, before the warm-up ends
_WARM_STEPS, _WARM_SHARE = 5, 0.2  # the warm-up takes both: steps, and a share of the measured time
_NUM_PARTS = 4  # of the measured time, whose rates show the spread


class StepCount:
    """Counts until the time is over, or the program ends, and leaves the file ``rank-R.json`` in the folder.

    The environment names the folder and the time.
    """

    def __init__(self) -> None:
        self._file = Path(os.environ[variables.LAYOUT], f"rank-{variables.rank_in(os.environ) or 0}.json")
        self._seconds, self._process_id = float(os.environ[variables.LAYOUT_SECONDS]), os.getpid()
        self._times = list[float]()  # after each step
        # _first: index of the measurement's start; 0: in the warm-up
        self._first = self._batch = self._samples = self._num_others = 0
        self._model: torch.nn.Module | None = None
        self._is_over = False
        self._optimizer: Any = lambda: None
        register_optimizer_step_post_hook(self._after_step)
        self._modules = register_module_forward_pre_hook(self._before_forward)
        atexit.register(self.record, is_whole=False)

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # this function must not become part of the model
            return
        sizes = [each.shape[0] for each in inputs if isinstance(each, torch.Tensor) and each.dim()]
        is_outermost = sizes and module.training and self._model in (None, module)
        if is_outermost and any(parameter.requires_grad for parameter in module.parameters()):
            self._model = module
            self._samples += sizes[0]

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if self._is_over or self._optimizer() not in (None, optimizer):
            self._num_others += 1  # after the end nothing reads it
            return
        self._optimizer, now = weakref.ref(optimizer), time.perf_counter()
        self._times.append(now)
        if self._first:
            if now - self._times[self._first] >= self._seconds and len(self._times) > self._first + _NUM_PARTS:
                self.record(is_whole=True)
            return
        if len(self._times) > 1:  # before the first step a program may have tried its model
            self._batch = max(self._batch, self._samples)  # an epoch's last batch may be smaller
        self._samples, self._model = 0, None
        if len(self._times) == _WATCHED_STEPS:
            self._modules.remove()
        if len(self._times) >= _WARM_STEPS and now - self._times[0] >= _WARM_SHARE * self._seconds:
            self._first = len(self._times) - 1

    def record(self, *, is_whole: bool) -> None:
        """Leave the file, unless it is there; without rates if there were too few steps.

        ``is_whole``: the time is over, and the program has not ended before.
        """
        if self._is_over or os.getpid() != self._process_id:  # a forked child is not the rank
            return
        self._is_over, first, rates = True, self._first or _WARM_STEPS - 1, list[float]()
        if (num_steps := len(self._times) - 1 - first) >= _NUM_PARTS:
            ends = [first + num_steps * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
            spans = (ends[0], ends[-1]), *itertools.pairwise(ends)
            rates = [(end - begin) / (self._times[end] - self._times[begin]) for begin, end in spans]
        report = {
            "is_whole": is_whole,
            "num_steps": len(self._times),
            "num_others": self._num_others,  # steps of other optimizers
            "rates": rates,  # in steps per second: of all of the time, then of its parts
            "batch": self._batch,
            "num_threads": torch.get_num_threads(),
            "num_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(self._file)
