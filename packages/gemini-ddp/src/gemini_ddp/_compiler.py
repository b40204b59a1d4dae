"""Keeping a compiler away while it could not be right."""

from __future__ import annotations

from typing import ClassVar

import torch


class Uncompiled:
    """Lets compiled functions of this process run as they were written, while any object of this class holds them so.

    What a recorded pass reads is to be seen operation by operation, which a compiled graph does not show. And what
    was recorded so must be recomputed so, for a graph saves other tensors.
    """

    _holders: ClassVar[int] = 0
    _stance: ClassVar[torch.compiler.set_stance | None] = None

    def __init__(self) -> None:
        self._holds = False

    @torch.compiler.disable
    def hold(self) -> None:
        """Begin; does nothing once begun."""
        if not self._holds:
            self._holds = True
            if Uncompiled._holders == 0:
                Uncompiled._stance = torch.compiler.set_stance("force_eager")
            Uncompiled._holders += 1

    @torch.compiler.disable
    def release(self) -> None:
        """End, for the last holder; does nothing once ended."""
        if self._holds:
            self._holds = False
            Uncompiled._holders -= 1
            if Uncompiled._holders == 0 and Uncompiled._stance is not None:
                Uncompiled._stance.__exit__(None, None, None)

    def __del__(self) -> None:
        self.release()
