"""Plot the learning rates that `optim.large_batch` gives, from the optimizer itself, step by step.

python benchmarks/warmup.py docs/warmup.png
"""

import sys

import matplotlib.pyplot as plt
import torch
from torch.optim.lr_scheduler import SequentialLR, StepLR

from torchmpi_py.optim import large_batch

STEPS, WARMUP_STEPS, LR = 160, 60, 0.1


def rates(factor, rule, then=None):
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = large_batch(optimizer, factor, rule=rule, warmup_steps=WARMUP_STEPS)
    if then is not None:
        schedule = SequentialLR(optimizer, [schedule, then(optimizer)], [WARMUP_STEPS])
    taken = []
    for _ in range(STEPS):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return taken


figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
for color, factor in enumerate((2, 4, 8)):
    axes.plot(rates(factor, "linear"), color=f"C{color}", label=f"{factor} ranks, linear")
    axes.plot(rates(factor, "sqrt"), color=f"C{color}", linestyle=":", label=f"{factor} ranks, sqrt")
axes.plot(
    rates(8, "linear", lambda each: StepLR(each, 50)), color="C2", linestyle="--", label="8 ranks, then StepLR(50)"
)
axes.axhline(LR, color="grey", linewidth=0.8, label="1 rank")
axes.set(xlabel="step", ylabel="learning rate", ylim=(0, 1.15))
axes.legend(ncols=4, fontsize=7, loc="upper left")
figure.savefig(sys.argv[1], dpi=120)
