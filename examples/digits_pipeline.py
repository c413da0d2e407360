"""Digit recognition by a pipeline, with torch.distributed.pipelining: each rank has some of the layers.

    torchmpirun -n 2 examples/digits_pipeline.py
    accuracy 98.61 %, 2 ranks in pipelines of 2 stages
    torchmpirun -n 4 examples/digits_pipeline.py --stages 2
    accuracy 98.61 %, 4 ranks in pipelines of 2 stages

The first stage sends the activations of its layers to the second, and so on; the last one computes the loss. While a
stage works on one micro-batch, others work on the next. Gradients travel back. Several pipelines share each batch, and
average the gradients of equal stages. The steps are those of one process (mnist_sequential.py).
"""

import digits_data
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import pad

import torchmpi_py.torch_backend  # noqa: F401  (the backend "torchmpi")
from torchmpi_py.engine import DatasetIterator

parser = digits_data.parser(__doc__)
parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch that are under way at once")
parser.add_argument("--stages", type=int, help="ranks of a pipeline; default: all")
parser.add_argument("--save", help="file for the final parameters, whole")
options = parser.parse_args()

dist.init_process_group("torchmpi")
train_set, test_set, network = digits_data.prepare(options)
num_ranks = dist.get_world_size()
stages = options.stages or num_ranks
if not 1 <= stages <= len(network) or num_ranks % stages:
    parser.error(f"--stages: {num_ranks} ranks and {len(network)} layers cannot be divided into {stages} stages")
pipelines = num_ranks // stages
if options.batch % pipelines:
    parser.error(f"--batch: {options.batch} samples cannot be divided among {pipelines} pipelines")
mesh = init_device_mesh("cpu", (pipelines, stages), mesh_dim_names=("data", "stages"))
pipeline, number = mesh.get_coordinate()
layers = network[len(network) * number // stages : len(network) * (number + 1) // stages]
is_first, is_last = number == 0, number == stages - 1


def schedule(**how):
    """A pipeline of these layers, whose batches must all have the same shape."""
    stage = PipelineStage(layers, number, stages, torch.device("cpu"), group=mesh.get_group("stages"))
    return ScheduleGPipe(stage, **how)


def accuracy(layers, test_set):
    """The share that the network recognizes, which the last stage finds and all return."""
    images, labels = test_set.tensors
    outputs = testing.step(*[images] * is_first)
    rate = (outputs.argmax(1) == labels).double().mean() if is_last else torch.zeros((), dtype=torch.float64)
    dist.broadcast(rate, num_ranks - 1)
    return rate.item()


samples = options.batch // pipelines
rows = -(-samples // options.micro_batches) * options.micro_batches  # padded: micro-batches have equal shapes
loss_of = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=-1)  # padded samples have this label
training = schedule(n_microbatches=options.micro_batches, loss_fn=lambda *x: loss_of(*x) * share, scale_grads=False)
testing = schedule(n_microbatches=1)
parameters = list(layers.parameters())  # some stages have none
optimizer = torch.optim.SGD(parameters, lr=options.lr) if parameters else None
curve = digits_data.Curve(options, layers, test_set, accuracy)
batches = DatasetIterator(train_set, samples, seed=options.seed, rank=pipeline, size=pipelines)
for _ in range(options.epochs):
    for images, labels in curve.steps(batches):
        layers.zero_grad()
        share = batches.weight / len(images)  # of a sample in the loss
        images = pad(images, (0, 0, 0, 0, 0, 0, 0, rows - len(images)))
        labels = pad(labels, (0, rows - len(labels)), value=-1)
        training.step(*[images] * is_first, target=labels if is_last else None)
        for p in parameters:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("data"))
        if optimizer is not None:
            optimizer.step()

result = curve.end()
states = [None] * num_ranks
dist.all_gather_object(states, layers.state_dict())
if dist.get_rank() == 0:
    print(f"accuracy {100 * result:.2f} %, {num_ranks} ranks in pipelines of {stages} stages")
    if options.save:
        torch.save({name: x for state in states[:stages] for name, x in state.items()}, options.save)
dist.destroy_process_group()
