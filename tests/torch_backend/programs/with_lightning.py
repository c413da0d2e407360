"""Lightning, with as many devices as the launcher has started ranks on this node."""

import logging
import os
import sys
import warnings

import lightning
import regression
import torch
from lightning.pytorch.strategies import DDPStrategy

warnings.filterwarnings("ignore")  # Lightning has advice on everything
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.losses = regression.network(), []

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.network(inputs), targets)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return regression.adam(self.parameters())


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=1,
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
module = Module()
trainer.fit(module, regression.loader(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
regression.report(trainer.global_rank, trainer.world_size, module.losses)
