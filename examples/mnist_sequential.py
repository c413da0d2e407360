"""Digit recognition in one process, without MPI: the twin of all the other examples.

    python examples/mnist_sequential.py
    ...
    test loss 0.0572, accuracy 98.61 %
    python examples/mnist_sequential.py --data DIRECTORY      # MNIST's idx files instead of scikit-learn's digits

Any number of ranks takes the same steps with mnist_allreduce.py.
"""

import digits_data
import torch

from torchmpi_py.engine import Accuracy, Average, DatasetIterator, EpochLines, ProgressBar, SGDEngine

parser = digits_data.parser(__doc__)
parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
parser.add_argument("--progress", action="store_true", help="show a bar")
parser.add_argument("--save", help="file for the final parameters")
options = parser.parse_args()

train_set, test_set, network = digits_data.prepare(options)
criterion = torch.nn.CrossEntropyLoss()
make = torch.optim.Adam if options.optimizer == "adam" else torch.optim.SGD

engine = SGDEngine()
curve = digits_data.Curve(options, network, test_set)
curve.follow(engine)

engine.train(
    network=network,
    criterion=criterion,
    iterator=DatasetIterator(train_set, options.batch, seed=options.seed),
    optimizer=make(network.parameters(), lr=options.lr),
    maxepoch=options.epochs,
    extensions=[ProgressBar() if options.progress else EpochLines()],
)
curve.end()

loss, accuracy = Average(), Accuracy()


def measure(state):
    """Count what is tested."""
    loss.add(state.loss, state.num_samples)
    accuracy.add(state.output, state.sample[1], state.num_samples)


engine.hooks.on_forward_criterion = measure
engine.test(network=network, criterion=criterion, iterator=DatasetIterator(test_set, options.batch, shuffle=False))

print(f"test loss {loss.value:.4f}, accuracy {100 * accuracy.value:.2f} %")
if options.save:
    torch.save(network.state_dict(), options.save)
