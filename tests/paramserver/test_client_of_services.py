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


@pytest.mark.parametrize("way", ["requests", "replies"])
def test_after_an_error_there_are_no_further_requests(way):
    links = types.SimpleNamespace(requests=Link(), replies=Link())
    client = Client(links)
    if way == "replies":
        first = client.ask(1, READ, torch.zeros(4))
        links.replies.error = MemoryError("no room")
        assert client.advance()
        assert isinstance(first.error, MemoryError)
        assert first.is_complete
    else:
        links.requests.error = MemoryError("no room")
        with pytest.raises(MemoryError):
            client.ask(1, READ, torch.zeros(4))
    assert client.is_idle
    links.requests.error = links.replies.error = None
    with pytest.raises(ParameterServerError, match=r"an earlier request .* failed \(MemoryError\('no room'\)\)"):
        client.ask(1, READ, torch.zeros(4))
    assert client.is_idle
