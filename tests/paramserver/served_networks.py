"""A network whose parameters are of two dtypes, so of two servers, and models of what updates do to it."""

import io

import torch

from torchmpi_py import paramserver as ps


class Two(torch.nn.Module):
    """Parameters of two dtypes that are multiples of 1, 2, 3 and so on by one number, at first ``value``."""

    def __init__(self, value=0.0):
        super().__init__()
        self.a = torch.nn.Parameter(value * torch.arange(1.0, 4))
        self.b = torch.nn.Parameter(value * torch.arange(1.0, 5, dtype=torch.float64).view(2, 2))

    def set_gradient(self, factor):
        for p in self.parameters():
            p.grad = factor * torch.arange(1.0, p.numel() + 1, dtype=p.dtype).view_as(p)

    def move(self, by):
        with torch.no_grad():
            for p in self.parameters():
                p += by * torch.arange(1.0, p.numel() + 1, dtype=p.dtype).view_as(p)

    def value(self):
        """Return the number of which the parameters are multiples."""
        return common_factor(self.parameters())


def common_factor(tensors):
    factors = torch.cat([p.detach().double().view(-1) / torch.arange(1.0, p.numel() + 1) for p in tensors])
    assert (factors == factors[0]).all()
    return factors[0].item()


def served(update, number=0):
    """Return what a server of the update holds."""
    return update.served.packs[number].server.receive().wait()


def served_value(update):
    """Return the number of which the values of the servers are multiples."""
    return common_factor(served(update, number) for number in range(2))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fetch_together(mpi, update):
    """Have all roots fetch before anybody sends, so that the result is one and the same in every run."""
    if update.is_root:
        ps.prefetch_tensors(update.served)[0].wait()
    mpi.barrier()


def wait_for_sends(mpi, update):
    """Wait until what all ranks have sent is at the servers."""
    mpi.wait_all([pack.sending for pack in update.served.packs if pack.sending is not None])
    mpi.barrier()


def downpour(net, **options):
    return ps.DownpourUpdate(net, init_delay=0, **({"local_update": lambda g: g.mul_(-1)} | options))


KINDS = {
    "downpour": downpour,
    "easgd": lambda net, **options: ps.EASGDUpdate(net, init_delay=0, **options),
    "difference": lambda net, **options: ps.DifferenceUpdate(net, init_delay=0, **options),
    "ssp": lambda net, **options: ps.StaleSynchronousUpdate(net, init_delay=0, staleness=1, **options),
}
