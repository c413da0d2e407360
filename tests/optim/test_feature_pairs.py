"""Features of reducers in pairs: each run ends with the parameters of one process that has the batches of all ranks.

A run has four steps in two halves. Between the halves a frozen layer is thawed, and a run is resumed from its states.
"""

import contextlib
import copy
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.nn.functional import cross_entropy

import torchmpi_py
from torchmpi_py import nn as mpinn, optim
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

KINDS = ["synchronized", "registered", "wrapped", "BF16", "TopK", "sharded", "sharded BF16", "round robin"]
FEATURES = ["accumulate", "clip", "frozen", "join", "momentum", "resume", "scaler", "sparse", "tied", "unused"]
SHARDED = {"sharded": {}, "sharded BF16": {"compression": compression.BF16()}, "round robin": {"placement": "hash"}}
WRAPPED = {"wrapped": {}, "BF16": {"compression": compression.BF16()}, "TopK": {"compression": compression.TopK(1.0)}}
STEPS = 4
REFUSED = {("join", "synchronized"): "call register_async_backward"}
REFUSED |= {("join", kind): "expected a torch.nn.Module or an optim.DistributedOptimizer" for kind in SHARDED}
REFUSED |= {("frozen", kind): "create a new one" for kind in ("registered", *WRAPPED, *SHARDED)}


class Network(torch.nn.Module):
    """Embedding, two layers that may share weights, and two outputs, of which one may go unused."""

    def __init__(self, features):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(9, 4, sparse="sparse" in features)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        if "tied" in features:
            self.second.weight = self.first.weight
        self.side, self.last = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.side.requires_grad_("frozen" not in features)
        self.double()

    def forward(self, ids, uses_side):
        x = self.second(self.first(self.embedding(ids).mean(1)).tanh()).tanh()
        return self.last(x) + self.side(x) if uses_side else self.last(x)


class Training:
    """A network with an optimizer; ``ranks``: those whose batches it has."""

    def __init__(self, kind, features, ranks):
        self.kind, self.features, self.ranks = kind, features, ranks
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in features)
        self.network = Network(features)
        self.make()

    def make(self):
        """Make the optimizer anew, as after layers have become trainable."""
        parameters, options = self.network.parameters(), {"lr": 0.5, "momentum": 0.5 * ("momentum" in self.features)}
        passes = 1 + ("accumulate" in self.features)
        self.registration = None
        if self.kind in SHARDED:
            how = SHARDED[self.kind] | {"backward_passes_per_step": passes}
            self.optimizer = optim.ShardedOptimizer(parameters, torch.optim.SGD, **how, **options)
            return
        self.optimizer = torch.optim.SGD(parameters, **options)
        if self.kind == "registered":
            self.registration = mpinn.register_async_backward(self.network, frequency=passes)
        elif self.kind in WRAPPED:
            how = WRAPPED[self.kind] | {"backward_passes_per_step": passes}
            self.optimizer = optim.DistributedOptimizer(self.optimizer, self.network, **how)

    def again(self):
        """Make the optimizer anew, with its state."""
        state = copy.deepcopy(self.optimizer.state_dict())
        if self.kind in SHARDED or self.kind in WRAPPED:
            self.optimizer.remove()
        elif self.registration is not None:
            self.registration.remove()
        self.make()
        self.optimizer.load_state_dict(state)

    def step(self, step, ranks, divisor):
        """Train on the batches of these ranks, whose losses are divided by so many."""
        self.optimizer.zero_grad()
        for part in range(1 + ("accumulate" in self.features)):
            losses = [self.loss(step, part, rank) for rank in ranks]
            self.scaler.scale(sum(losses) / divisor).backward()
            if self.registration is not None:
                self.registration.synchronize()
        if self.kind == "synchronized":
            mpinn.synchronize_gradients(self.network)
        if "clip" in self.features:
            self.scaler.unscale_(self.optimizer)
            getattr(self.optimizer, "clip_grad_norm_", self.clip)(0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, most):
        """Clip as torch does, which cannot take the norm of sparse gradients."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm = torch.stack([x.to_dense().norm() for x in gradients]).norm()
        for x in gradients:
            x *= (most / (norm + 1e-6)).clamp(max=1.0)

    def loss(self, step, part, rank):
        ids = torch.randint(0, 9, (5, 3), generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
        uses_side = "unused" not in self.features or step == 3 or (step == 1 and rank == 0)
        return cross_entropy(self.network(ids, uses_side), ids[:, 0] % 3)


def count_of(rank, features):
    """The steps of a rank in each half."""
    return STEPS // 2 - ("join" in features and rank % 2)


def half(mpi, training, number):
    """Two steps of this rank, or of one process with the batches of all ranks that have some."""
    is_alone = training.kind == "one process"
    joins = "join" in training.features and not is_alone
    target = training.optimizer if training.kind in WRAPPED or training.kind in SHARDED else training.network
    parts = [training.scaler] if training.scaler.is_enabled() else []
    parts += [training.optimizer] if joins and target is training.network else []
    with torchmpi_py.join(target, *parts) if joins else contextlib.nullcontext():
        for step in range(STEPS // 2):
            present = [rank for rank in range(mpi.size()) if step < count_of(rank, training.features)]
            ranks = present if is_alone else [mpi.rank()] if mpi.rank() in present else []
            if ranks:
                training.step(2 * number + step, ranks, len(ranks))


def run(mpi, kind, features):
    """Train in both halves. Returns the network, None where a feature was refused with its remedy."""
    try:
        training = Training(kind, features, [mpi.rank()])
        half(mpi, training, 0)
    except (TypeError, ValueError) as error:
        if not any(REFUSED.get((feature, kind), "nothing") in str(error) for feature in features):
            raise
        return None
    if "frozen" in features:
        training.network.side.requires_grad_(True)
        if ("frozen", kind) in REFUSED:
            with pytest.raises(RuntimeError, match=REFUSED["frozen", kind]):
                half(mpi, training, 1)
            training.network.zero_grad(set_to_none=True)
            training.again()
    if "resume" in features:
        parts = copy.deepcopy([training.network.state_dict(), training.optimizer.state_dict()])
        scaler = training.scaler
        training = Training(kind, features - {"frozen"}, [mpi.rank()])
        training.scaler, training.features = scaler, features
        training.network.load_state_dict(parts[0])
        training.optimizer.load_state_dict(parts[1])
    half(mpi, training, 1)
    return training.network


def check(mpi, kind, features):
    """Compare a run with that of one process. Returns whether a feature was refused."""
    ours = run(mpi, kind, features)
    is_refused = any((feature, kind) in REFUSED for feature in features - {"frozen"})
    assert (ours is None) == is_refused, (kind, features)
    if ours is None:
        return True
    alone = run(mpi, "one process", features)
    tolerance = 1e-2 if "BF16" in kind else 1e-12
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=tolerance), (kind, features, name, (p - q).abs().max().item())
    mpinn.check_with_allreduce(ours)
    return False


def test_pairs(mpi):
    """Each pair of features with two kinds of reducers, each kind with pairs of its own."""
    refused = 0
    for number, pair in enumerate(itertools.combinations(FEATURES, 2)):
        for kind in (KINDS[number % len(KINDS)], KINDS[(number + 3) % len(KINDS)]):
            refused += check(mpi, kind, set(pair))
    assert refused > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_pairs(mpi):
    refused = [check(mpi, kind, set(pair)) for kind in KINDS for pair in itertools.combinations(FEATURES, 2)]
    assert len(refused) == 360
    assert sum(refused) == 36


@pytest.mark.slow
@pytest.mark.timeout(900)
@hypothesis.settings(derandomize=True, deadline=None, max_examples=300, phases=[hypothesis.Phase.generate])
@hypothesis.given(kind=strategies.sampled_from(KINDS), features=strategies.sets(strategies.sampled_from(FEATURES)))
def test_many_features_together(mpi, kind, features):
    """The same draws on every rank; nothing is shrunk, because the other ranks would not follow."""
    check(mpi, kind, features)
