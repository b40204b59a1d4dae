"""Which tensors of a chunk are in use, and whether backward sees the values that forward saw."""

from __future__ import annotations

from gemini_chunk._errors import ChunkError
from gemini_chunk._layout import Layout
from gemini_chunk._states import TensorInfo, TensorState


class UsedLayout(Layout):
    """A chunk's tensors with the scopes that use them.

    Attributes:
        users: tensors in use.
        generation: counts the changes of the tensors' values.
    """

    users = 0
    generation = 0
    _debug = False
    _visible = False

    def begin_use(self, info: TensorInfo) -> None:
        """Keep the chunk gathered until `end_use`; calls nest.

        Raises:
            ChunkError: the chunk is not gathered.
        """
        if not self._visible:
            raise ChunkError(f"{info.name!r} cannot be used: {self.name} is not gathered.")
        if info.users == 0:
            if info.state is not TensorState.READY_FOR_REDUCE:
                info.state = TensorState.COMPUTE  # legal from all others; thousands of tensors pass here in a step
            self.users += 1
        info.users += 1

    def end_use(self, info: TensorInfo, *, in_backward: bool) -> None:
        """Undo one `begin_use`.

        Args:
            info: the tensor.
            in_backward: whether its gradient is to come; of no meaning for a frozen chunk.

        Raises:
            ChunkError: there was no `begin_use`; in debug mode also if the values changed between forward and backward.
        """
        if info.users == 0:
            raise ChunkError(f"The use of {info.name!r} ended more often than it began.")
        if self._debug:
            self._check_generation(info, in_backward)
        info.users -= 1
        if info.users == 0:
            self.users -= 1
            if info.state is TensorState.COMPUTE:
                after = in_backward and self.trainable
                info.state = TensorState.HOLD_AFTER_BWD if after else TensorState.HOLD

    def _check_generation(self, info: TensorInfo, in_backward: bool) -> None:
        if not in_backward:
            info.forward_generation = self.generation
        elif info.forward_generation not in (None, self.generation):
            raise ChunkError(
                f"{info.name!r} was changed between the forward that used it and this backward: {self.name} is at "
                f"generation {self.generation}, forward saw {info.forward_generation}. Step or load after backward."
            )

    def _used_names(self) -> list[str]:
        return [info.name for info in self.tensors if info.users]
