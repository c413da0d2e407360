"""Digit recognition in one process, without MPI: the twin of mnist_allreduce.py.

python examples/mnist_sequential.py
python examples/mnist_sequential.py --data DIRECTORY      # MNIST's idx files instead of scikit-learn's digits
"""

import argparse

import digits_data
import torch

from torchmpi_py.engine import Accuracy, Average, DatasetIterator, SGDEngine, show_progress

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="directory of MNIST's idx files")
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--batch", type=int, default=60, help="samples per step")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--progress", action="store_true", help="show a bar")
parser.add_argument("--save", help="file for the final parameters")
options = parser.parse_args()

torch.manual_seed(options.seed)
train_set, test_set = digits_data.load(options.data)
network = digits_data.conv_net(image_size=train_set.tensors[0].shape[-1])
criterion = torch.nn.CrossEntropyLoss()

engine = SGDEngine()
loss, accuracy = Average(), Accuracy()


def measure(state):
    """Count what is tested, not what is trained on."""
    if not state.training:
        loss.add(state.loss, state.num_samples)
        accuracy.add(state.output, state.sample[1], state.num_samples)


engine.hooks.on_forward_criterion = measure
if options.progress:
    show_progress(engine)

engine.train(
    network=network,
    criterion=criterion,
    iterator=DatasetIterator(train_set, options.batch, seed=options.seed),
    lr=options.lr,
    maxepoch=options.epochs,
)
engine.test(network=network, criterion=criterion, iterator=DatasetIterator(test_set, options.batch, shuffle=False))

print(f"test loss {loss.value:.4f}, accuracy {100 * accuracy.value:.2f} %")
if options.save:
    torch.save(network.state_dict(), options.save)
