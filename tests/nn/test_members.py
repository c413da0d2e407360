"""A module's modules and parameters are those of torch, in its order."""

import pytest
import torch

from torchmpi_py.nn.members import modules_of, parameters_of


def tied():
    shared = torch.nn.Linear(3, 3)
    network = torch.nn.Sequential(shared, torch.nn.Sequential(torch.nn.ReLU(), shared), torch.nn.Linear(3, 3))
    network[2].weight = shared.weight
    network[2].register_parameter("absent", None)
    network[1].register_module("nobody", None)
    return network


class HeadAlone(torch.nn.Sequential):
    """A network that shows its head alone."""

    def parameters(self, recurse=True):
        return self[1].parameters(recurse)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_they_are_those_of_torch_in_its_order():
    for network in (
        HeadAlone(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        tied(),
        torch.nn.ParameterList([torch.nn.ParameterDict({"a": torch.ones(1)}), torch.ones(2)]),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        torch.nn.TransformerEncoderLayer(4, 2, 8),
        torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())),
        torch.nn.ReLU(),
    ):
        assert list(map(id, modules_of(network))) == list(map(id, network.modules()))
        assert list(map(id, parameters_of(network))) == list(map(id, network.parameters()))
