"""What debug mode adds: a log of what happens to which chunk where in the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Set
from typing import Any, Generic, TypeVar

from torch import Tensor

from gemini_ddp.interfaces import ChunkStore

ChunkT = TypeVar("ChunkT", bound=Hashable)

logger = logging.getLogger("gemini_ddp")


def debug_is_asked_for() -> bool:
    """Whether the environment has ``GEMINI_DEBUG`` set to something other than 0."""
    return os.environ.get("GEMINI_DEBUG", "0") not in ("", "0")


class LoggedStore(Generic[ChunkT]):
    """A store that logs, at level INFO, each call that moves a chunk or a gradient; everything else passes through.

    Args:
        store: does the work.
        rank: named in each line.
        place: tells where in the model this rank is.
    """

    def __init__(self, store: ChunkStore[ChunkT], rank: int, place: Callable[[], str]) -> None:
        self._store = store
        self._rank = rank
        self._place = place

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _log(self, what: str) -> None:
        logger.info("rank %d, %s: %s", self._rank, self._place(), what)

    def start_fetch(self, chunk: ChunkT) -> object:
        """Log and pass on."""
        self._log(f"fetch {chunk}")
        return self._store.start_fetch(chunk)

    def start_gather(self, chunk: ChunkT) -> object:
        """Log and pass on."""
        self._log(f"gather {chunk}")
        return self._store.start_gather(chunk)

    def release(self, chunk: ChunkT) -> None:
        """Log and pass on."""
        self._log(f"release {chunk}")
        self._store.release(chunk)

    def start_reduce(self, chunk: ChunkT) -> object:
        """Log and pass on."""
        self._log(f"reduce {chunk}")
        return self._store.start_reduce(chunk)

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        """Log and pass on."""
        self._log("end of backward, gradients stay local" if keep_local else "end of backward")
        self._store.finish_backward(unused, keep_local=keep_local)
