"""Evaluation in training: on every rank, of the network that the epoch has made."""

import pytest
import torch
from runs import classes, loss_of, train

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, Evaluate


@pytest.mark.mpi
def test_every_rank_evaluates_every_second_epoch_and_the_last(mpi):
    network, iterator = (
        torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.5)),
        DatasetIterator(classes(30), 4),
    )
    seen = {}

    def evaluate(module, epoch):
        assert module is network
        assert not module.training
        assert not torch.is_grad_enabled()
        return AllReduceSGDEngine().test(network=module, criterion=loss_of, iterator=iterator).loss.item()

    def on_update(state):
        assert network.training
        seen[state.epoch + 1] = network[0].weight.detach().clone()

    evaluation, weights = Evaluate(evaluate, every=2), Evaluate(lambda module, _: module[0].weight.detach().clone())
    train(network, iterator, maxepoch=3, on_update=on_update, extensions=[evaluation, weights])
    assert list(evaluation.results) == [2, 3]
    assert weights.results.keys() == seen.keys()
    assert all(torch.equal(weights.results[epoch], seen[epoch]) for epoch in seen)
    with pytest.raises(ValueError, match="every=0"):
        Evaluate(evaluate, every=0)
