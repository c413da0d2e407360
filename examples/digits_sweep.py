"""Many trainings at a time: groups of ranks try learning rates and momenta, and bad ones end early.

    torchmpirun -n 4 --groups 2 examples/digits_sweep.py
    ...
    the best of 8: {'lr': 0.03, 'momentum': 0.9}, accuracy 98.33 %
    torchmpirun -n 4 examples/digits_sweep.py --ranks 2

With --groups each group of ranks is a job of its own: a rank that dies costs one experiment. The command, given again
after the sweep was killed, goes on with what is left.
"""

import argparse
import os

import digits_data
import torch

import torchmpi_py as mpi
from torchmpi_py import sweeps
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="directory of MNIST's idx files; default: scikit-learn's digits")
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--batch", type=int, default=60, help="samples per step, over the ranks of a group")
parser.add_argument("--lr", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3])
parser.add_argument("--momentum", type=float, nargs="+", default=[0.0, 0.9])
parser.add_argument("--ranks", type=int, help="ranks of a group; default: 1, or those that --groups gives")
parser.add_argument("--directory", default="experiments", help="where the sweep is kept")
options = parser.parse_args()

if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
    torch.set_num_threads(1)
train_set, test_set = digits_data.load(options.data)


def train(configuration):
    """One training by the ranks of a group; the accuracy on the test set, in percent."""
    network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
    engine = AllReduceSGDEngine()

    def report(state):
        accuracy = 100 * digits_data.accuracy(network, test_set)
        if mpi.is_chief():
            print(f"epoch {state.epoch}: accuracy {accuracy:.2f} %")  # into the log of this experiment
        mpi.report(accuracy, step=state.epoch)

    engine.hooks.on_end_epoch = report
    engine.train(
        network=network,
        criterion=torch.nn.CrossEntropyLoss(),
        iterator=DatasetIterator(train_set, -(-options.batch // mpi.size()), seed=options.seed),
        optimizer=torch.optim.SGD(network.parameters(), **configuration),
        maxepoch=options.epochs,
    )
    return 100 * digits_data.accuracy(network, test_set)


mpi.start()
results = mpi.experiments(
    {"lr": options.lr, "momentum": options.momentum},
    train,
    ranks_per_experiment=options.ranks,
    directory=options.directory,
    seed=options.seed,
    stop=sweeps.successive_halving(first_step=1, factor=3),
)
if mpi.is_chief():
    best = results.best()
    print(f"the best of {len(results)}: {best.configuration}, accuracy {best.value:.2f} %")
mpi.stop()
