"""What ``ZeroOptimizer`` asks of the thing that holds the model.

``gemini_optim.testing.PlainModel`` is a small complete implementation, and ``check_sharded_model`` beside it says
whether another one keeps these promises.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["OptimShard", "ParamSlice", "ShardedModel"]


class ParamSlice(Protocol):
    """A run of one parameter's elements inside this rank's shard."""

    @property
    def param(self) -> nn.Parameter:
        """The parameter that the user gave to the optimizer: the same object, with its full shape."""

    @property
    def start(self) -> int:
        """First element of the run, counted from the start of the shard."""

    @property
    def numel(self) -> int:
        """Elements in the run, at least one."""

    @property
    def param_offset(self) -> int:
        """First element of the run, counted in the flattened parameter."""


class OptimShard(Protocol):
    """This rank's part of one chunk.

    Call order in a training step: ``ShardedModel.backward`` once or more, then ``grad`` and ``master`` any number of
    times, then ``discard``, or ``commit`` and in the end ``wait_commit``. ``new_state`` may be called at any time. What
    fails with an ``OSError`` or a ``RuntimeError`` may be called again.
    """

    @property
    def name(self) -> str:
        """For messages; the same on every rank."""

    @property
    def slices(self) -> Sequence[ParamSlice]:
        """Ordered by ``start`` and disjoint; fixed for life. Empty on a rank whose shard is all padding.

        The slices of all ranks and shards together hold every element of a managed parameter exactly once.
        """

    def grad(self) -> Tensor | None:
        """Return the gradient of the shard, shape ``(shard_numel,)``, in the working dtype.

        It is averaged over ranks and still multiplied by the loss scale. ``step`` may overwrite it in place. None on
        every rank when nothing in this chunk got a gradient since the last ``commit`` or ``discard``.

        Raises:
            RuntimeError: it cannot be given now; or it was lost on its way here, and from then on there is None. In
                that case ``ZeroOptimizer`` drops the gradients of all shards, on every rank.
        """

    def without_gradient(self) -> Collection[nn.Parameter]:
        """Return parameters in this shard of which no rank has a gradient, although others in the chunk have one.

        ``step`` leaves them alone, as torch does where ``grad`` is None; `grad` holds anything in their place.
        """

    def master(self) -> Tensor:
        """Return the master weights, shape ``(shard_numel,)``: contiguous, writable, in fp32 or what is wider.

        They rest on the device where ``new_state`` puts the optimizer states, which may differ from that of ``grad``.
        For an fp32 model they are the working shard itself. A 16-bit model that keeps no master weights may give its
        working shard, too: it is updated in 16 bits, as by torch alone.
        """

    def new_state(self, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Return zeroed memory for optimizer state, shape ``(numel,)``, contiguous, on the device of ``master``.

        Its bytes are accounted in the tier where the states of this chunk rest (accelerator, RAM, memory-mapped
        file). It stays valid for the life of the model, which may carry it elsewhere between steps, together with
        `master`: then ``.data`` of the tensor is other memory with the same values, and views of it are taken anew.
        ``label`` says what it holds, such as ``"exp_avg"``.

        Raises:
            RuntimeError: the tier is full.
            OSError: the disk is full.
        """

    def commit(self) -> None:
        """Cast the changed master weights into the working parameters, and drop the gradient if there is one.

        The cast may be under way when this returns: whatever reads or changes either of them next waits for it.

        Raises:
            RuntimeError: this cannot begin, or that of another shard has failed; then nothing has changed.
        """

    def wait_commit(self) -> None:
        """Return when what ``commit`` began is done.

        Raises:
            RuntimeError: it has failed; the next call tries again, and the master weights are as they were.
        """

    def discard(self) -> None:
        """Drop the gradient; master weights and working parameters stay as they were."""


class ShardedModel(Protocol):
    """A model whose parameters, gradients and master weights are spread over the ranks of a process group."""

    @property
    def shards(self) -> Sequence[OptimShard]:
        """This rank's shards: fixed for life, one per chunk with trainable parameters, in one order on every rank."""

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks that hold the shards; None for a single rank without ``torch.distributed``."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a loss scale: True for fp16."""

    @property
    def is_resident(self) -> bool:
        """Whether master weights, states and gradients stay in one place for life: memory without a limit.

        Then nothing that is there already can be refused or get lost in a step, and ``commit`` leaves nothing under
        way. So shards are updated all at once, and ranks do not wait for each other to hear that none has failed.
        """

    def backward(self, loss: Tensor) -> None:
        """Run backward from ``loss``, a scalar, and finish all reductions before returning."""
