"""The stand-in for ``p.grad`` while the gradient is being reduced, or while only another rank has the gradient.

The stand-in is a tensor without memory. Programs can read its shape, dtype and device. Every use of its values raises
RuntimeError: clipping, norms, GradScaler, hooks, and the addition of a second gradient by autograd.

Two alternatives were rejected. If ``p.grad`` were None, ``clip_grad_norm_`` would silently skip the gradient. If
``p.grad`` were a view of the bucket, ``clip_grad_norm_`` would change values that are being sent. ``zero_grad()`` works
with the stand-in, because setting ``p.grad`` to None drops the stand-in.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class AbsentGradient(torch.Tensor):
    """A stand-in for a gradient that is being reduced."""

    place = "being reduced: call synchronize() on the registration or optimizer after backward(), before clipping"

    @classmethod
    def why(cls) -> str:
        """Return the text of the error, with the possible causes and their remedies."""
        return (
            f"this gradient cannot be read or changed now, because it is {cls.place}. If backward() ran again before "
            "synchronize() or step() to accumulate, use frequency= or backward_passes_per_step=. For activation "
            "checkpointing, use checkpoint(..., use_reentrant=False). Register a hook that changes gradients before "
            "you create the registration or the optimizer. Before you drop a DistributedOptimizer, call "
            "its remove(). After a backward() that raised, call zero_grad(set_to_none=True)"
        )

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> AbsentGradient:
        """Create a stand-in with the parameter's shape, dtype and device."""
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError for every computation of torch, including autograd's additions."""
        raise RuntimeError(cls.why())

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError for access that bypasses torch's dispatcher."""
        raise RuntimeError(self.why())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __array__ = __dlpack__ = data_ptr = numpy = share_memory_ = tolist = _refuse
    data = property(_refuse, _refuse)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"
