"""Digit recognition as multi-GPU Caffe did it: shared weights on a node, differences of weights between nodes.

    torchmpirun -n 4 examples/mnist_parameterserver_difference.py --ranks-per-node 2
    ...
    accuracy 98.33 % with the server's parameters, of 2 copies

The ranks of a node train one copy of the weights without locks (Hogwild). A parameter server adds up how far each
node's copy has moved; what a node learns while its difference is under way is kept. Nobody waits. Here --ranks-per-node
divides the ranks of one machine; on several nodes level 1 is that division already.
"""

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import nn as mpinn, paramserver as ps
from torchmpi_py.engine import DatasetIterator, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks that share one copy of the weights")
parser.add_argument("--init-delay", type=int, default=0, help="steps before the server is seeded")
parser.add_argument("--update-frequency", type=int, default=5, help="steps between exchanges")
parser.add_argument("--prefetch", type=int, default=1, help="steps that an exchange may take")
options = parser.parse_args()

mpi.start()
train_set, test_set, network = digits_data.prepare(options)
mpinn.synchronize_parameters(network)

batches = DatasetIterator(
    train_set, -(-options.batch // mpi.size()), seed=options.seed, rank=mpi.rank(), size=mpi.size()
)
level = mpi.push_communicator(mpi.rank() // options.ranks_per_node)
node = mpi.communicator(level)
hogwild = ps.Hogwild(network, comm=node)
update = ps.DifferenceUpdate(
    network,
    dataparallel_communicator=level,
    shares_memory=True,
    init_delay=options.init_delay,
    update_frequency=options.update_frequency,
    prefetch=options.prefetch,
)

engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)
engine.hooks.on_update = lambda state: update.update(state.t - 1)  # state.t counts this step already
engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=batches,
    lr=options.lr / node.size,  # the ranks of a node take as many steps more on its copy
    maxepoch=options.epochs,
)

# The result is what the server holds when all ranks are done.
update.take_result()

accuracy = curve.end()
mpinn.check_with_allreduce(network)
if mpi.rank() == 0:
    print(f"accuracy {100 * accuracy:.2f} % with the server's parameters, of {update.num_workers} copies")
mpi.stop()
