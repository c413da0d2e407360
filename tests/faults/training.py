"""A trial in which networks are trained, and a rank injects its fault in a hook of the engine or in its data set."""

import striking
from striking import hold, me, meet, plan, strike_at

strike_at("before start")
import torch  # noqa: E402

import torchmpi_py as mpi  # noqa: E402
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator  # noqa: E402


class Samples(torch.utils.data.Dataset):
    """The prefetch thread reads it."""

    def __len__(self):
        return 64 * mpi.size()

    def __getitem__(self, index):
        strike_at("prefetch thread")
        return torch.full((4,), float(index % 7)), index % 2


def on_sample(state):
    striking.step += 1
    if striking.step == 3:  # what torch imports for its first step takes long on a machine under load
        hold()
    strike_at("hook")


meet()
mpi.start()
if not plan.get("meets"):
    hold()
engine = AllReduceSGDEngine(asynchronous=True)
engine.hooks.on_sample = on_sample
net = torch.nn.Linear(4, 2)
iterator = DatasetIterator(Samples(), 4)
engine.train(
    network=net, criterion=torch.nn.CrossEntropyLoss(), iterator=iterator, lr=0.1, maxepoch=plan.get("epochs", 5)
)
mpi.nn.check_with_allreduce(net)
if me == 0:
    print("all done", flush=True)
mpi.stop()
