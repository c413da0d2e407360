"""Activations sent to another rank, whose gradients come back: what a pipeline of stages is made of.

``send`` on one rank meets ``recv`` on another. Each message has a number, counted by its two ranks, and the gradient
comes back under the same number: stages may run the backward passes of several messages in any order. Gradients that
come early are kept until their backward pass asks for them.

A message is a header, which says dtype and shape, and the values; sends do not wait for their receiver.
"""

from __future__ import annotations

import collections
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from torchmpi_py.collectives import verbs
from torchmpi_py.core import compiling
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.handles import Handle
from torchmpi_py.core.tensors import check_rank, check_tensor, flat_copy
from torchmpi_py.nn.functional import own_communicator
from torchmpi_py.runtime import process

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]  # a header has an index into this
_MAX_DIMS = 10
_FIELDS = 6  # of a header, before the shape: kind, number, dtype, whether a gradient comes back, whether on a GPU, dims
_ACTIVATION, _GRADIENT = 1, 2  # kinds of messages


def _empty_header() -> Tensor:
    return torch.empty(_FIELDS + _MAX_DIMS, dtype=torch.int64, device="cpu")


class Peer:
    """The messages that this rank exchanges with another one of ``comm``."""

    def __init__(self, comm: Communicator, rank: int) -> None:
        self.comm = comm
        self.rank = rank
        self.num_sent = 0
        self._lock = threading.Lock()  # a message is sent in two parts
        self.under_way: list[Handle[Any]] = []  # sends
        self.activations: collections.deque[tuple[int, bool, Tensor]] = collections.deque()  # that came before a recv
        self.gradients: dict[int, Tensor] = {}  # that came before their backward pass, by number

    def send_activation(self, x: Tensor, needs_gradient: bool) -> int:
        """Start a message, and return its number."""
        with self._lock:
            number = self.num_sent
            self.num_sent += 1
            self._send(_ACTIVATION, number, x, needs_gradient)
        return number

    def send_gradient(self, number: int, dy: Tensor) -> None:
        """Send the gradient of an activation back."""
        with self._lock:
            self._send(_GRADIENT, number, dy, False)

    def _send(self, kind: int, number: int, x: Tensor, needs_gradient: bool) -> None:
        """Start a message; its buffers are kept until it is complete."""
        header = _empty_header().zero_()
        fields = [kind, number, _DTYPES.index(x.dtype), needs_gradient, x.is_cuda, x.dim(), *x.shape]
        header[: len(fields)] = torch.tensor(fields, dtype=torch.int64, device="cpu")
        self.under_way = [handle for handle in self.under_way if not handle.done()]
        for part in (header, flat_copy(x)):  # the program may change x
            self.under_way.append(verbs.send_async(part, self.rank, comm=self.comm))

    def take(self) -> None:
        """Receive the next message, and keep it."""
        header = verbs.recv(_empty_header(), self.rank, comm=self.comm).tolist()
        kind, number, dtype, needs_gradient, is_cuda, dims = header[:_FIELDS]
        device = process.device() if is_cuda else torch.device("cpu")
        x = torch.empty(header[_FIELDS : _FIELDS + dims], dtype=_DTYPES[dtype], device=device)
        verbs.recv(x, self.rank, comm=self.comm)
        if kind == _ACTIVATION:
            self.activations.append((number, bool(needs_gradient), x))
        else:
            self.gradients[number] = x

    def activation(self) -> tuple[int, bool, Tensor]:
        """The next activation: its number, whether the sender waits for the gradient, and the values."""
        while not self.activations:
            self.take()
        return self.activations.popleft()

    def gradient(self, number: int) -> Tensor:
        """The gradient of the activation with this number that was sent."""
        while number not in self.gradients:
            self.take()
        return self.gradients.pop(number)


_peers: WeakKeyDictionary[Communicator, dict[int, Peer]] = WeakKeyDictionary()


def send(x: Tensor, destination: int, *, comm: Communicator | None = None) -> Tensor:
    """Send ``x`` to ``destination``, which receives it with ``nn.recv``. Returns a zero: the *link*.

    ``link.backward()`` waits for the gradient that the backward pass of ``destination`` sends, and goes on with it
    through this rank's part of the network; the gradient of the link itself does not count, so a scaled loss is scaled
    once, by the rank that has it. The link takes one backward pass, and so does what ``recv`` returns. If ``x``
    requires no gradient, neither does the link. ``x`` may be changed at once.

    Messages between two ranks arrive in the order of the calls; their backward passes may come in any order. The first
    call of ``send`` or ``recv`` on a communicator (default: the current level) is collective: every rank of it calls
    one of the two. ``x`` lies on the CPU or on ``mpi.device()``.

    Raises TypeError and ValueError as ``mpi.send``; a second backward pass is a RuntimeError.
    """
    peer = _peer("send", "destination", destination, comm)
    check_tensor("nn.send", "x", x)
    if x.dtype not in _DTYPES or x.dim() > _MAX_DIMS:
        raise ValueError(
            f"nn.send: x is {x.dtype} of {x.dim()} dims; {len(_DTYPES)} plain dtypes and 10 dims can travel"
        )
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    number = peer.send_activation(x, needs_gradient)
    link: Tensor = _Sent.apply(x, peer, number)  # type: ignore[no-untyped-call]
    return link


def recv(source: int, *, comm: Communicator | None = None) -> Tensor:
    """What ``source`` sends with ``nn.send``: a new tensor of that dtype, shape and kind of device.

    It requires a gradient if the sender's does, and gradients are enabled here. Then its backward pass sends the
    gradient to ``source``, which waits for it: the result has to be part of this rank's loss, or of what this rank
    sends on. See ``send``.
    """
    peer = _peer("recv", "source", source, comm)
    number, needs_gradient, x = peer.activation()
    if not (needs_gradient and torch.is_grad_enabled()):
        return x
    anchor = torch.empty(0, requires_grad=True)
    y: Tensor = _Received.apply(anchor, [x], peer, number)  # type: ignore[no-untyped-call]
    return y


class _Sent(Function):
    """From an activation that was sent to a zero; backward, to the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peer: Peer, number: int) -> Tensor:
        ctx.peer, ctx.number = peer, number
        return torch.zeros((), device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_link: Tensor) -> tuple[Tensor | None, ...]:
        _check_first(ctx, "the link that nn.send has returned")
        return ctx.peer.gradient(ctx.number), None, None


class _Received(Function):
    """From nothing to an activation that has come; backward, its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, activation: list[Tensor], peer: Peer, number: int) -> Tensor:
        ctx.peer, ctx.number = peer, number
        return activation[0]  # in a list: no input, and no view of one, so that a layer may work in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _check_first(ctx, "what nn.recv has returned")
        ctx.peer.send_gradient(ctx.number, dy)
        return None, None, None, None


def _check_first(ctx: Any, what: str) -> None:
    """RuntimeError in a second backward pass: one gradient travels for each activation."""
    if getattr(ctx, "is_done", False):
        raise RuntimeError(
            f"a second backward pass through {what}: one gradient is sent back for each message. Add the losses up, "
            "and call backward() once"
        )
    ctx.is_done = True


def _peer(verb: str, name: str, rank: int, comm: Communicator | None) -> Peer:
    given = resolve(comm)
    rank = check_rank(f"nn.{verb}", name, rank, given.size)
    own = own_communicator(given)
    peers = _peers.setdefault(given, {})
    if rank not in peers:
        peers.setdefault(rank, Peer(own, rank))  # two threads may come at once
    return peers[rank]


compiling.leave_alone(send, recv)
