"""A client whose links to other nodes fail, in one process: no reply is taken for another one's."""

import types

import pytest
import torch

from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver.remote import Client, Kind, ShardRequest

READ = ShardRequest(server=0, shard=1, kind=Kind.READ, num_bytes=16)


class Link:
    """A communicator whose messages fail while ``error`` is set; it delivers ``messages``."""

    def __init__(self):
        self.error, self.messages = None, []

    def isend(self, *arguments):
        if self.error:
            raise self.error

    def improbe(self, tag, status):
        if self.error:
            raise self.error
        return self.messages.pop(0) if self.messages else None


@pytest.fixture
def links():
    return types.SimpleNamespace(requests=Link(), replies=Link())


def test_after_an_error_there_are_no_further_requests(links):
    client, memory = Client(links), torch.zeros(4)
    first = client.ask(1, READ, memory)
    links.replies.error = MemoryError("no room")
    assert client.advance()
    assert isinstance(first.error, MemoryError)
    assert first.is_complete
    assert client.is_idle
    links.replies.error = None
    with pytest.raises(ParameterServerError, match=r"an earlier request .* failed \(MemoryError\('no room'\)\)"):
        client.ask(1, READ, memory)
    assert client.is_idle


def test_a_request_that_was_not_sent_is_not_waited_for(links):
    client = Client(links)
    links.requests.error = MemoryError("no room")
    with pytest.raises(MemoryError):
        client.ask(1, READ, torch.zeros(4))
    assert client.is_idle
    links.requests.error = None
    assert not client.ask(1, READ, torch.zeros(4)).is_complete
    assert not client.is_idle


def test_a_request_that_was_sent_in_part(links):
    links.requests.Isend = lambda *arguments: links.requests.isend()
    sent = iter([None, None, MemoryError("no room")])

    def isend(*arguments):
        if error := next(sent):
            raise error

    links.requests.isend = isend
    client, large = Client(links), torch.zeros(3 << 20)  # 12 MiB, in pieces
    with pytest.raises(MemoryError):
        client.ask(1, READ._replace(kind=Kind.RESTORE, num_bytes=large.nbytes), large)
    with pytest.raises(ParameterServerError, match="an earlier request"):
        client.ask(1, READ, torch.zeros(4))
