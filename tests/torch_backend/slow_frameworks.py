"""What takes long to import, in one job: Lightning, torchmetrics, and collectives in a compiled function.

Every rank compares with what it computes alone, and prints one line when all is right.
"""

import logging
import sys
import warnings

import lightning
import regression
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import _functional_collectives as functional

import torchmpi_py as mpi
from torchmpi_py import torch_backend

warnings.filterwarnings("ignore")  # Lightning has advice on everything
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch._logging.set_logs(all=logging.ERROR)


class Module(lightning.LightningModule):
    """The regression of the other tests, with a metric that is reduced over the ranks, and a logged mean."""

    def __init__(self):
        super().__init__()
        self.network = regression.network()
        self.error = torchmetrics.MeanSquaredError().double()

    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.error(self.network(batch[0]), batch[1])
        self.log("error", self.error)
        self.log("mean", batch[0].mean(), sync_dist=True)

    def configure_optimizers(self):
        return regression.adam(self.parameters())


class Average(lightning.Callback):
    """Gradients by way of the hook: ``ddp_comm_hook=`` of the strategy is for GPUs alone."""

    def on_train_start(self, trainer, module):
        trainer.strategy.model.register_comm_hook(None, torch_backend.average)


def train(callbacks):
    module, batches = Module(), regression.loader(mpi.rank(), mpi.size())  # Lightning's own sampler would shuffle
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    world = {"accelerator": "cpu", "devices": mpi.local_size(), "num_nodes": mpi.num_nodes()}
    strategy = DDPStrategy(process_group_backend="torchmpi")
    run = lightning.Trainer(strategy=strategy, max_epochs=1, callbacks=callbacks, **world, **quiet)
    run.fit(module, batches)
    assert (run.world_size, run.global_rank, dist.get_backend()) == (mpi.size(), mpi.rank(), "torchmpi")
    regression.assert_equal(module.network.state_dict(), regression.trained_alone())
    (result,) = run.validate(module, batches, verbose=False)
    inputs, targets = regression.rows().tensors
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(module.network(inputs), targets)
    assert abs(result["error"] - expected) < 1e-6, (result, expected)
    assert abs(result["mean"] - inputs.mean()) < 1e-6


def metrics():
    """Those that add up, and those that gather: of different sizes, and from ranks that have seen nothing."""
    numbers = torch.arange(7 * mpi.size())
    scores, labels = numbers * 7 % 5 / 5, numbers % 2
    own = numbers % (1 + mpi.size()) == mpi.rank()  # of different lengths; some are left out
    used = numbers % (1 + mpi.size()) < mpi.size()
    for make in (torchmetrics.Accuracy, torchmetrics.AUROC, torchmetrics.F1Score):
        metric, alone = make(task="binary"), make(task="binary", sync_on_compute=False)
        metric.update(scores[own], labels[own])
        alone.update(scores[used], labels[used])
        torch.testing.assert_close(metric.compute(), alone.compute())
    cat = torchmetrics.CatMetric()
    cat.update(torch.arange(mpi.rank() + 1.0))
    assert cat.compute().tolist() == [float(i) for rank in range(mpi.size()) for i in range(rank + 1)]


def compiled_module(hook):
    """DistributedDataParallel inside of a compiled function."""
    model = regression.network()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if hook:
        ddp.register_comm_hook(None, torch_backend.average)
    function = torch.compile(ddp, backend="aot_eager")
    regression.train(function, regression.adam(ddp.parameters()), mpi.rank(), mpi.size())
    regression.assert_equal(model.state_dict(), regression.trained_alone())


@torch.compile(backend="aot_eager", fullgraph=True)
def collectives(x):
    """all_reduce and all_gather inside a graph."""
    total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return functional.all_gather_tensor(total + x, 0, dist.group.WORLD)


mpi.start()
train([])
train([Average()])
metrics()
compiled_module(hook=False)
compiled_module(hook=True)
ranks = torch.arange(1.0, 1 + mpi.size())
expected = torch.cat([torch.full((3,), 2 * ranks.sum() + rank) for rank in ranks])
assert torch.equal(collectives(torch.full((3,), 1.0 + mpi.rank())), expected)
sys.stdout.write(f"rank {mpi.rank()} of {mpi.size()} agrees\n")
