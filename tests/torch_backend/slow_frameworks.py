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

import torchmpi_py as mpi
from torchmpi_py import torch_backend

warnings.filterwarnings("ignore")  # Lightning has advice on everything
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
torch._logging.set_logs(all=logging.ERROR)
CLASSES = 4


class Module(lightning.LightningModule):
    """The regression of the other tests, with a metric that is reduced over the ranks, and a logged mean."""

    def __init__(self):
        super().__init__()
        self.network = regression.network()
        self.error = torchmetrics.MeanSquaredError().double()

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, _):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self(inputs), targets)

    def validation_step(self, batch, _):
        inputs, targets = batch
        self.error(self(inputs), targets)
        self.log("error", self.error)
        self.log("mean", inputs.mean(), sync_dist=True)

    def configure_optimizers(self):
        return regression.adam(self.parameters())


class Average(lightning.Callback):
    """Gradients by way of the hook: ``ddp_comm_hook=`` of the strategy is for GPUs alone."""

    def on_train_start(self, trainer, module):
        trainer.strategy.model.register_comm_hook(None, torch_backend.average)


def trainer(**how):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "barebones": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=mpi.local_size(),
        num_nodes=mpi.num_nodes(),
        strategy=DDPStrategy(process_group_backend="torchmpi"),
        max_epochs=1,
        enable_checkpointing=False,
        **quiet,
        **how,
    )


def loader():
    """The batches of ``regression``, of which a rank gets every size-th row; Lightning's own sampler would shuffle."""
    batches = [regression.batch(step) for step in range(regression.STEPS)]
    rows = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    sampler = torch.utils.data.DistributedSampler(rows, mpi.size(), mpi.rank(), shuffle=False)
    return torch.utils.data.DataLoader(rows, regression.ROWS // mpi.size(), sampler=sampler)


def train(**how):
    module, run = Module(), trainer(**how)
    run.fit(module, loader())
    assert (run.world_size, run.global_rank, dist.get_backend()) == (mpi.size(), mpi.rank(), "torchmpi")
    regression.assert_equal(module.network.state_dict(), regression.trained_alone())
    (result,) = run.validate(module, loader(), verbose=False)
    inputs, targets = loader().dataset.tensors
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(module.network(inputs), targets)
    assert abs(result["error"] - expected) < 1e-6, (result, expected)
    assert abs(result["mean"] - inputs.mean()) < 1e-6


def metrics():
    """Those that add up, and those that gather: of different sizes, and from ranks that have seen nothing."""
    scores = torch.arange(7 * mpi.size()) * 7 % 5 / 5
    labels = torch.arange(7 * mpi.size()) % 2
    own = torch.arange(7 * mpi.size()) % (1 + mpi.size()) == mpi.rank()  # of different lengths; some are left out
    used = torch.arange(7 * mpi.size()) % (1 + mpi.size()) < mpi.size()
    for make in (torchmetrics.Accuracy, torchmetrics.AUROC, torchmetrics.F1Score):
        metric, alone = make(task="binary"), make(task="binary", sync_on_compute=False)
        metric.update(scores[own], labels[own])
        alone.update(scores[used], labels[used])
        torch.testing.assert_close(metric.compute(), alone.compute())
    cat = torchmetrics.CatMetric()
    cat.update(torch.arange(mpi.rank() + 1.0))
    assert cat.compute().tolist() == [float(i) for rank in range(mpi.size()) for i in range(rank + 1)]


def compiled_module():
    """DistributedDataParallel inside of a compiled function, with and without the hook."""
    for hook in (None, torch_backend.average):
        model = regression.network()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        function = torch.compile(ddp, backend="aot_eager")
        regression.train(function, regression.adam(ddp.parameters()), mpi.rank(), mpi.size())
        regression.assert_equal(model.state_dict(), regression.trained_alone())


def compiled_collectives():
    """all_reduce and all_gather inside a graph."""
    from torch.distributed import _functional_collectives as functional

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + x, 0, dist.group.WORLD)

    ranks = torch.arange(1.0, 1 + mpi.size())
    expected = torch.cat([torch.full((3,), 2 * ranks.sum() + rank) for rank in ranks])
    assert torch.equal(function(torch.full((3,), 1.0 + mpi.rank())), expected)


mpi.start()
train()
train(callbacks=[Average()])
metrics()
compiled_module()
compiled_collectives()
sys.stdout.write(f"rank {mpi.rank()} of {mpi.size()} agrees\n")
