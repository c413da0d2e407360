"""FSDP2 and checkpoints of torch.distributed.checkpoint: what is trained equals what one process trains."""

import pytest
import regression
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi


def sharded(mesh, **how):
    """The network with each layer's parameters shared among the ranks of a mesh, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    model = regression.network()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return model, regression.adam(model.parameters())


def mesh_of(*sizes, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(regression.device, sizes, mesh_dim_names=names)


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_trains_as_one_process(mpi, group, reshard):
    model, optimizer = sharded(mesh_of(mpi.size()), reshard_after_forward=reshard)
    regression.train(model, optimizer, mpi.rank(), mpi.size(), max_norm=0.5)
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert mpi.allreduce(kept) == sum(parameter.numel() for parameter in regression.network().parameters())
    regression.assert_equal(model.state_dict(), regression.trained_alone(max_norm=0.5))


def test_gradients_of_several_backwards_are_added(mpi, group):
    model, _ = sharded(mesh_of(mpi.size()))
    alone = regression.network()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        regression.loss(model, step, mpi.rank(), mpi.size()).backward()
        regression.loss(alone, step).backward()
    gradients, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, alone))
    regression.assert_equal(gradients, expected)


@pytest.mark.mpi(min_size=4)
def test_replicas_of_shards(mpi, group):
    """HSDP: two groups of two ranks each share the parameters, and add their gradients."""
    if mpi.size() != 4:
        pytest.skip("a mesh of 2 x 2 is for 4 ranks")
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    model, optimizer = sharded(mesh)
    regression.train(model, optimizer, mpi.rank(), mpi.size())
    regression.assert_equal(model.state_dict(), regression.trained_alone())
    inner = torch.full((3,), mpi.rank())
    dist.all_reduce(inner, group=mesh.get_group("shard"))
    assert inner.tolist() == [4 * (mpi.rank() // 2) + 1] * 3


def test_a_checkpoint_is_taken_up_by_fewer_ranks(mpi, group, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = mpi.broadcast_object(str(tmp_path))
    model, optimizer = sharded(mesh_of(mpi.size()))
    regression.train(model, optimizer, mpi.rank(), mpi.size(), steps=range(2))
    network, state = get_state_dict(model, optimizer)
    dcp.save({"network": network, "optimizer": state, "step": 2}, checkpoint_id=folder)

    size = max(1, mpi.size() - 1)
    fewer = dist.new_group(range(size), backend="torchmpi")
    if mpi.rank() < size:
        model, optimizer = sharded(dist.device_mesh.DeviceMesh.from_group(fewer, regression.device))
        network, state = get_state_dict(model, optimizer)
        saved = {"network": network, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=folder, process_group=fewer)
        set_state_dict(model, optimizer, model_state_dict=saved["network"], optim_state_dict=saved["optimizer"])
        regression.train(model, optimizer, mpi.rank(), size, steps=range(saved["step"], regression.STEPS))
        regression.assert_equal(model.state_dict(), regression.trained_alone())
        dist.destroy_process_group(fewer)
    mpi.barrier()
