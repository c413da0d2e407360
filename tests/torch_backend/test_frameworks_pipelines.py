"""Pipelines of torch.distributed.pipelining: stages on several ranks train as one process."""

import pytest
import regression
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_train_as_one_process(mpi, group, schedule):
    """Four ranks are two pipelines, each of which has half of the samples."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh

    stages = 2 if mpi.size() == 4 else mpi.size()
    mesh = init_device_mesh("cpu", (mpi.size() // stages, stages), mesh_dim_names=("data", "stages"))
    pipeline, number = mesh.get_coordinate()
    layers = regression.network()[5 * number // stages : 5 * (number + 1) // stages]
    stage = pipelining.PipelineStage(layers, number, stages, torch.device("cpu"), group=mesh.get_group("stages"))
    run = getattr(pipelining, schedule)(stage, n_microbatches=6, loss_fn=torch.nn.functional.mse_loss)
    parameters = list(layers.parameters())
    optimizer = regression.adam(parameters or [torch.zeros(1)])
    for step in range(regression.STEPS):
        inputs, targets = (x[pipeline :: mesh.size(0)] for x in regression.batch(step))
        optimizer.zero_grad()
        run.step(*[inputs] * stage.is_first, target=targets if stage.is_last else None)
        for p in parameters:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("data"))
        optimizer.step()
    alone = regression.trained_alone()
    regression.assert_equal(layers.state_dict(), {name: alone[name] for name in layers.state_dict()})
