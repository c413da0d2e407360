"""torchtnt's init_from_env, which makes a group only where the variables are set, and its training loop."""

import sys

import regression
import torch
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.fit import fit
from torchtnt.utils import get_global_rank, get_world_size, init_from_env


class Unit(AutoUnit):
    losses = []

    def compute_loss(self, state, data):
        inputs, targets = data
        outputs = self.module(inputs)
        return torch.nn.functional.mse_loss(outputs, targets), outputs

    def configure_optimizers_and_lr_scheduler(self, module):
        return regression.adam(module.parameters()), None

    def on_train_step_end(self, state, data, step, results):
        loss = results.loss.detach().clone()
        torch.distributed.all_reduce(loss)
        self.losses.append(loss.item() / get_world_size())


device = init_from_env(device_type="cpu", pg_backend=sys.argv[1])
unit = Unit(module=regression.network(), device=device, strategy="ddp")
loader = regression.loader(get_global_rank(), get_world_size())
fit(unit, train_dataloader=loader, eval_dataloader=[], max_epochs=1)
regression.report(get_global_rank(), get_world_size(), unit.losses)
