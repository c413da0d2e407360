"""The optimizer steps and samples of a rank, counted for ``torchmpirun --layouts`` (`launch.layouts`).

If TORCHMPIRUN_LAYOUT is the path of a folder, ``import torch`` installs two of torch's global hooks, so that programs
can be measured without changes. The optimizer hook records the time after each step. It counts only steps of the first
optimizer, as long as that optimizer exists. A wrapper's step contains another optimizer's step, and a program may have
several optimizers.

The module hook counts the samples of a step. This number is the first dimension of the first tensor that the outermost
module receives, summed over the module's calls in the step (gradient accumulation). The outermost module is the first
module in training mode that has trainable parameters and is called with a tensor. The hook runs only in three steps of
the warm-up, so a measured step contains just one additional call of a Python function.
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

# Number of steps with the module hook. A compiled model is compiled again without the hook, before the warm-up ends.
_WATCHED_STEPS = 3
_WARM_STEPS, _WARM_SHARE = 5, 0.2  # The warm-up lasts at least this long, in steps and as a share of the measured time.
_NUM_PARTS = 4  # The measured time is divided into this many parts, whose rates show the spread.


class StepCount:
    """A counter of steps that runs until the time is over or the program ends, and then writes ``rank-R.json``.

    Environment variables set the folder of this file, and the measured time in seconds.
    """

    def __init__(self) -> None:
        self._file = Path(os.environ[variables.LAYOUT], f"rank-{variables.rank_in(os.environ) or 0}.json")
        self._seconds, self._process_id = float(os.environ[variables.LAYOUT_SECONDS]), os.getpid()
        self._times = list[float]()  # the time after each step
        # _first: the index of the first measured step; 0 during the warm-up
        self._first = self._batch = self._samples = self._num_others = 0
        self._model: torch.nn.Module | None = None
        self._is_over = False
        self._optimizer: Any = lambda: None
        register_optimizer_step_post_hook(self._after_step)
        self._modules = register_module_forward_pre_hook(self._before_forward)
        atexit.register(self.record, is_whole=False)

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # This function must not become part of the compiled model.
            return
        sizes = [each.shape[0] for each in inputs if isinstance(each, torch.Tensor) and each.dim()]
        is_outermost = sizes and module.training and self._model in (None, module)
        if is_outermost and any(parameter.requires_grad for parameter in module.parameters()):
            self._model = module
            self._samples += sizes[0]

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if self._is_over or self._optimizer() not in (None, optimizer):
            self._num_others += 1  # After the end, this number is not used.
            return
        self._optimizer, now = weakref.ref(optimizer), time.perf_counter()
        self._times.append(now)
        if self._first:
            if now - self._times[self._first] >= self._seconds and len(self._times) > self._first + _NUM_PARTS:
                self.record(is_whole=True)
            return
        if len(self._times) > 1:  # Ignore calls before the first step, because a program may first test its model.
            self._batch = max(self._batch, self._samples)  # The last batch of an epoch may be smaller.
        self._samples, self._model = 0, None
        if len(self._times) == _WATCHED_STEPS:
            self._modules.remove()
        if len(self._times) >= _WARM_STEPS and now - self._times[0] >= _WARM_SHARE * self._seconds:
            self._first = len(self._times) - 1

    def record(self, *, is_whole: bool) -> None:
        """Write the file, unless it was written before; omit the rates if there were too few steps.

        ``is_whole`` is True if the measured time is over, and False if the program has ended early.
        """
        if self._is_over or os.getpid() != self._process_id:  # A forked child is not the rank.
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
            "rates": rates,  # in steps per second, for the whole time and then for its parts
            "batch": self._batch,
            "num_threads": torch.get_num_threads(),
            "num_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(self._file)
