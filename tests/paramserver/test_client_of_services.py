"""A client whose links to other nodes fail, in one process: no reply is taken for another one's."""

import types

import pytest
import torch

from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver.remote import Client, Kind, ShardRequest

READ = ShardRequest(server=0, shard=1, kind=Kind.READ, num_bytes=16)


class Link:
    """A communicator without messages whose calls fail when it comes to ``errors``: one for each, at first."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def isend(self, *arguments, **options):
        if self.errors and (error := self.errors.pop(0)):
            raise error

    Isend = improbe = isend


def test_after_an_error_of_a_reply_there_are_no_further_requests():
    client = Client(types.SimpleNamespace(requests=Link(), replies=Link(MemoryError("no room"))))
    first = client.ask(1, READ, torch.zeros(4))
    assert client.advance()
    assert isinstance(first.error, MemoryError)
    assert (first.is_complete, client.is_idle) == (True, True)
    with pytest.raises(ParameterServerError, match=r"an earlier request .*no room"):
        client.ask(1, READ, torch.zeros(4))


def test_a_request_that_was_not_sent_is_not_waited_for():
    client = Client(types.SimpleNamespace(requests=Link(MemoryError("no room")), replies=Link()))
    with pytest.raises(MemoryError):
        client.ask(1, READ, torch.zeros(4))
    assert client.is_idle
    assert not client.ask(1, READ, torch.zeros(4)).is_complete
    assert not client.is_idle


def test_a_request_that_was_sent_in_part():
    client = Client(types.SimpleNamespace(requests=Link(None, None, MemoryError("no room")), replies=Link()))
    large = torch.zeros(3 << 20)  # 12 MiB, in pieces
    with pytest.raises(MemoryError):
        client.ask(1, READ._replace(kind=Kind.RESTORE, num_bytes=large.nbytes), large)
    with pytest.raises(ParameterServerError, match="an earlier request"):
        client.ask(1, READ, torch.zeros(4))
