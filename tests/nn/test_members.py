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


NETWORKS = {
    "head alone": lambda: HeadAlone(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    "tied": tied,
    "recurrent": lambda: torch.nn.LSTM(2, 3, num_layers=2),
    "lists": lambda: torch.nn.ParameterList([torch.nn.ParameterDict({"a": torch.ones(1)}), torch.ones(2)]),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8),
    "scripted": lambda: torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())),
    "empty": lambda: torch.nn.ReLU(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_they_are_those_of_torch_in_its_order(name):
    network = NETWORKS[name]()
    assert list(map(id, modules_of(network))) == list(map(id, network.modules()))
    assert list(map(id, parameters_of(network))) == list(map(id, network.parameters()))
