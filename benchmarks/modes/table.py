"""The table of modes: where each comes from, its program in ``examples/`` and the options of its command."""

from __future__ import annotations

import dataclasses

TWIN = "mnist_sequential.py"
ADAM = "--optimizer adam --lr 0.002"


@dataclasses.dataclass(frozen=True)
class Mode:
    """A row. ``twin``: the options of the twin beyond those that all programs get."""

    name: str
    origin: str
    program: str
    options: str = ""
    twin: str = ""


MODES = [
    Mode("allreduce", "TorchMPI, PaddlePaddle", "mnist_allreduce.py"),
    Mode("asynchronous allreduce", "TorchMPI", "mnist_allreduce.py", "--asynchronous"),
    Mode("ring allreduce", "TensorFlow", "mnist_allreduce.py", "--flavour ring"),
    Mode("sharded optimizer", "PaddlePaddle", "mnist_allreduce.py", "--sharded"),
    Mode("wrapped optimizer", "Horovod", "digits_own_loop.py", "", ADAM),
    Mode("sharded by parameter", "PaddlePaddle", "digits_own_loop.py", "--sharded --placement round_robin", ADAM),
    Mode("compressed gradients", "PowerSGD", "digits_own_loop.py", "--compression powersgd", ADAM),
    Mode("large batch", "TensorFlow", "digits_large_batch.py"),
    Mode("local SGD", "Stich", "digits_local_sgd.py", "--period 8"),
    Mode("post-local, in groups", "Lin et al.", "digits_local_sgd.py", "--period 16 --group-period 4 --start 48"),
    Mode("slow momentum", "SlowMo", "digits_local_sgd.py", "--period 8 --slow-momentum 0.5"),
    Mode("gossip", "Boyd et al.", "digits_gossip.py"),
    Mode("asynchronous gossip", "Lian et al.", "digits_gossip.py", "--partners random --asynchronous"),
    Mode("dsgd", "TorchMPI", "mnist_parameterserver_dsgd.py"),
    Mode("synchronous server", "TensorFlow", "mnist_parameterserver_synchronous.py"),
    Mode("downpour", "TorchMPI, TensorFlow", "mnist_parameterserver_downpour.py"),
    Mode("bounded staleness", "TensorFlow", "mnist_parameterserver_ssp.py", "--staleness 3"),
    Mode("easgd", "TorchMPI", "mnist_parameterserver_easgd.py"),
    Mode("eamsgd", "TorchMPI", "mnist_parameterserver_easgd.py", "--momentum 0.9 --lr 0.01"),
    Mode("easgd of groups", "TorchMPI", "mnist_parameterserver_easgd_dataparallel.py"),
    Mode("hogwild", "multi-GPU Caffe", "mnist_parameterserver_hogwild.py"),
    Mode("weight differences", "multi-GPU Caffe", "mnist_parameterserver_difference.py", "--ranks-per-node 2"),
    Mode("hybrid", "multi-node Caffe", "mnist_hybrid.py", "--ranks-per-group 2"),
    Mode("tensor parallelism", "TorchMPI", "mnist_modelparallel.py", "--ranks-per-group 2"),
    Mode("pipeline", "GPipe", "digits_pipeline.py"),
    Mode("checkpoints", "TensorFlow", "mnist_allreduce.py", "--checkpoint runs"),
    Mode("DDP", "PyTorch", "ddp_digits.py"),
    Mode("FSDP", "PyTorch", "fsdp_digits.py", "--lr 0.05"),  # with momentum 0.5
]
