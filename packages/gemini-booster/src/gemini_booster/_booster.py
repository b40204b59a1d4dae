"""The booster: the few lines that a user adds to a training loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gemini_booster import _checkpoint, _lora
from gemini_booster._gemini_ddp import GeminiDDP
from gemini_booster._launch import group_of
from gemini_booster._optimizer import GeminiOptimizer
from gemini_booster._plugin import GeminiPlugin

# What boost hands back as it came keeps its type; None stays None.
_CriterionT = TypeVar("_CriterionT", bound=Callable[..., Tensor] | None)
_DataLoaderT = TypeVar("_DataLoaderT", bound=Iterable[object] | None)
_SchedulerT = TypeVar("_SchedulerT", bound=LRScheduler | None)


class Booster:
    """Wraps what a training loop has and saves what it made.

    Args:
        plugin: the settings; by default those of ``GeminiPlugin()``.
    """

    def __init__(self, *, plugin: GeminiPlugin | None = None) -> None:
        if plugin is not None and not isinstance(plugin, GeminiPlugin):
            raise TypeError(f"plugin must be a GeminiPlugin, got {type(plugin).__name__}.")
        self.plugin = GeminiPlugin() if plugin is None else plugin

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: _CriterionT = ...,
        dataloader: _DataLoaderT = ...,
        lr_scheduler: _SchedulerT = ...,
    ) -> tuple[GeminiDDP, GeminiOptimizer, _CriterionT, _DataLoaderT, _SchedulerT]: ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: None = None,
        criterion: _CriterionT = ...,
        dataloader: _DataLoaderT = ...,
        lr_scheduler: _SchedulerT = ...,
    ) -> tuple[GeminiDDP, None, _CriterionT, _DataLoaderT, _SchedulerT]: ...

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: object = None,
        dataloader: object = None,
        lr_scheduler: object = None,
    ) -> tuple[GeminiDDP, GeminiOptimizer | None, object, object, object]:
        """Return model, optimizer, criterion, dataloader and learning-rate scheduler, ready for training.

        Args:
            model: an unmodified module, possibly built under `gemini_lazy.LazyInitContext`.
            optimizer: any element-wise optimizer built on the model's parameters.
            criterion: returned as it is.
            dataloader: returned as it is; `GeminiPlugin.prepare_dataloader` makes one for each rank.
            lr_scheduler: returned as it is: it acts on the parameter groups that both optimizers share.

        Raises:
            ValueError: the model or the optimizer cannot be used; the model is as it was. See `GeminiDDP` and
                `GeminiOptimizer` for what else they may raise.
        """
        if optimizer is not None:
            self.plugin.check_optimizer(optimizer, model)
        wrapped = self.plugin.wrap_model(model)
        boosted = None if optimizer is None else self.plugin.wrap_optimizer(optimizer, wrapped)
        return wrapped, boosted, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Run backward from a scalar loss, multiplied by the loss scale where the precision needs one."""
        _boosted(optimizer).backward(loss)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Keep the gradients of the backwards inside on each rank; the next backward outside reduces their sum.

        Plain repeated backwards accumulate as well: each is reduced, and the sum lies in shards. This sends fewer bytes
        and takes the memory of a full gradient, in the working dtype. Every rank enters and leaves alike.

        Args:
            model: what `boost` returned.
            optimizer: has no effect; it is here because other boosters ask for it.
        """
        del optimizer
        with _wrapped(model).no_sync():
            yield

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str],
        *,
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Save the model's full state; every rank calls it, rank 0 writes.

        Files are put in place once all are written: an error leaves an older checkpoint as it was.

        Args:
            model: what `boost` returned.
            checkpoint: with ``shard`` a folder, that ``from_pretrained`` of a transformers model loads; otherwise a
                file.
            shard: write files of limited size with an index.
            prefix: put before the files' numbers (sharded only).
            size_per_shard: limit of a file in MiB; a larger tensor has a file of its own.
            use_safetensors: safetensors instead of ``torch.save``.
            dtype: of floating parameters in the files. None saves the working parameters as they are;
                ``torch.float32`` saves the master weights exactly, which training in 16 bits needs in order to go on
                bit for bit.

        Raises:
            OSError: rank 0 could not write; the other ranks raise a RuntimeError that says so.
            ValueError: a setting is out of its range or does not suit the file's name, a file is where a folder should
                be or the reverse, or the folder holds other weights, which loaders would take: a single file, or those
                of the other format.
        """
        _checkpoint.save_model(
            _wrapped(model),
            checkpoint,
            shard=shard,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            dtype=dtype,
        )

    def load_model(self, model: nn.Module, checkpoint: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load what `save_model`, plain torch or transformers saved: a file, or a folder; every rank calls it.

        The format is told by the files' content, not by their names.
        """
        _checkpoint.load_model(_wrapped(model), checkpoint, strict=strict)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | os.PathLike[str] | None = None,
        lora_config: object = None,
    ) -> nn.Module:
        """Return a model with adapters that train while the rest is frozen: give it to an optimizer, then to `boost`.

        Frozen parameters are sharded and offloaded like the others, and take no gradients and no optimizer states.

        Args:
            model: a module that is not wrapped yet.
            pretrained_dir: a folder of saved adapters, which are to be trained on.
            lora_config: a ``peft.LoraConfig``, or another configuration of PEFT, for new adapters.

        Raises:
            ImportError: PEFT is not installed.
            ValueError: the model is wrapped, or not exactly one of folder and configuration is given.
        """
        return _lora.enable_lora(model, pretrained_dir, lora_config)

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: str | os.PathLike[str], *, use_safetensors: bool = False
    ) -> None:
        """Save the adapters alone, as PEFT does: ``peft.PeftModel.from_pretrained`` loads them.

        Every rank calls it, rank 0 writes. Of the model, only the adapters are gathered.

        Args:
            model: what `boost` returned.
            checkpoint: a folder.
            use_safetensors: safetensors instead of ``torch.save``.

        Raises:
            OSError: rank 0 could not write; the other ranks raise a RuntimeError that says so.
            ValueError: the model has no adapters, or ``checkpoint`` is a file.
        """
        _lora.save_lora_as_pretrained(_wrapped(model), checkpoint, use_safetensors=use_safetensors)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: str | os.PathLike[str]) -> None:
        """Save the optimizer's state in torch's format, and the loss scaler's; every rank calls it, rank 0 writes."""
        _checkpoint.save_optimizer(_boosted(optimizer), checkpoint)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: str | os.PathLike[str]) -> None:
        """Load what `save_optimizer` saved, on any number of ranks; every rank calls it."""
        _checkpoint.load_optimizer(_boosted(optimizer), checkpoint)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Save a scheduler's state; every rank calls it, rank 0 writes."""
        _checkpoint.save_on_rank_0(lr_scheduler.state_dict(), checkpoint, group_of(self.plugin.process_group))

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | os.PathLike[str]) -> None:
        """Load a scheduler's state."""
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))

    def execute_pipeline(self) -> NoReturn:
        """Raise: there is no pipeline parallelism here."""
        raise NotImplementedError("Gemini has no pipeline parallelism; call the model and booster.backward instead.")


def _boosted(optimizer: torch.optim.Optimizer) -> GeminiOptimizer:
    if not isinstance(optimizer, GeminiOptimizer):
        raise TypeError(f"optimizer must be the one that boost returned, got {type(optimizer).__name__}.")
    return optimizer


def _wrapped(model: nn.Module) -> GeminiDDP:
    if not isinstance(model, GeminiDDP):
        raise TypeError(f"model must be the one that boost returned, got {type(model).__name__}.")
    return model
