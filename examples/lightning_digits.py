"""Digit recognition with Lightning over MPI: the Trainer's DDP with the backend of this package.

    torchmpirun -n 2 examples/lightning_digits.py
    2 ranks: test accuracy 98.06 %

Lightning has to be given the numbers of ranks, and the backend's name: with strategy="ddp" it takes gloo. On the CPU a
callback registers the hook by which gradients meet in shared memory. Wants `pip install lightning`.
"""

import os

import digits_data
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from torchmpi_py import torch_backend

parser = digits_data.parser(__doc__)
parser.add_argument("--save", help="folder for the final parameters, a file for each rank")
options = parser.parse_args()
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
train_set, test_set, network = digits_data.prepare(options)
curve = digits_data.Curve(options, network, test_set)


class Digits(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        """The loss of this rank's part of a batch."""
        images, labels = batch
        curve.step()
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def on_train_epoch_end(self):
        """Test, if a curve is wanted."""
        curve.end_epoch()

    def configure_optimizers(self):
        """As the other examples."""
        return torch.optim.SGD(self.parameters(), options.lr)


class Average(lightning.Callback):
    """Gradients meet in shared memory."""

    def on_train_start(self, trainer, module):
        """Register the hook with the DDP that Lightning has made."""
        trainer.strategy.model.register_comm_hook(None, torch_backend.average)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=num_local,
    num_nodes=num_ranks // num_local,
    strategy=DDPStrategy(process_group_backend="torchmpi"),
    callbacks=[Average()],
    max_epochs=options.epochs,
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
sampler = DistributedSampler(train_set, num_ranks, rank, seed=options.seed, drop_last=True)
trainer.fit(Digits(), DataLoader(train_set, options.batch // num_ranks, sampler=sampler, drop_last=True))

accuracy = curve.end()
if trainer.global_rank == 0:
    print(f"{num_ranks} ranks: test accuracy {100 * accuracy:.2f} %")
if options.save:
    os.makedirs(options.save, exist_ok=True)
    torch.save(network.state_dict(), f"{options.save}/rank-{trainer.global_rank}.pt")
