"""Which tensors of a chunk are in use, and whether their values are those that the chunk holds."""

from __future__ import annotations

from collections.abc import Sequence

from gemini_chunk._errors import ChunkError
from gemini_chunk._full import accept_writes, refuse_writes, show
from gemini_chunk._layout import Layout
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tensors import same_bits


class UsedLayout(Layout):
    """A chunk's tensors with the scopes that use them.

    Attributes:
        users: tensors in use.
        generation: counts the changes of the tensors' values.
    """

    users = 0
    generation = 0
    _debug = False
    is_gathered = False

    def begin_use(self, infos: Sequence[TensorInfo]) -> None:
        """Keep the chunk gathered until `end_use` of these tensors; calls nest.

        Raises:
            ChunkError: the chunk is not gathered.
        """
        if not self.is_gathered:
            raise ChunkError(f"{[info.name for info in infos]} cannot be used: {self.name} is not gathered.")
        for info in infos:
            if info.users == 0:
                if info.state is not TensorState.READY_FOR_REDUCE:
                    info.state = TensorState.COMPUTE  # legal from all others; thousands of tensors pass here in a step
                self.users += 1
                if self._debug and not self._keeps_writes:
                    info.begun_with = info.view.clone()
            info.users += 1

    def end_use(self, infos: Sequence[TensorInfo], *, in_backward: bool) -> None:
        """Undo one `begin_use` of these tensors.

        Args:
            infos: the tensors.
            in_backward: whether their gradients are to come; of no meaning for a frozen chunk.

        Raises:
            ChunkError: there was no `begin_use`, or a tensor was written to, which does not last: where only a single
                rank has it on the compute device, without master weights, it does. In debug mode writes by way of
                ``.data`` are seen as well, and that values changed between forward and backward. The others' uses end.
        """
        after = TensorState.HOLD_AFTER_BWD if in_backward and self.trainable else TensorState.HOLD
        failed: ChunkError | None = None
        for info in infos:
            try:
                if info.users == 0:
                    raise ChunkError(f"The use of {info.name!r} ended more often than it began.")
                if self._debug:
                    self._check_generation(info, in_backward)
                info.users -= 1
                if info.users == 0:
                    self.users -= 1
                    if info.state is TensorState.COMPUTE:
                        info.state = after
                    tensor = info.tensor
                    is_written = tensor._version != info.version or tensor.data_ptr() != info.address
                    if is_written or info.begun_with is not None:
                        self._settle_write(info)
            except ChunkError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def settle_states(self, *, reduced: bool = False) -> None:
        """Bring tensors that were used in backward and have no gradient to come back to rest.

        Args:
            reduced: those that have one, too: it was reduced, or is given up.
        """
        rest = TensorState.HOLD if self.is_gathered else TensorState.FREE
        for info in self.tensors:
            settles = reduced and info.state is TensorState.READY_FOR_REDUCE
            if info.state is TensorState.HOLD_AFTER_BWD:
                info.to(TensorState.READY_FOR_REDUCE)
                settles = True
            if settles:
                info.state = TensorState.COMPUTE if info.users else rest  # legal, by way of HOLD

    @property
    def _keeps_writes(self) -> bool:
        """Whether what is written to a tensor that is shown lasts."""
        return False

    def _settle_write(self, info: TensorInfo) -> None:
        """Refuse what was written to a tensor, unless it lasts or has changed nothing."""
        begun_with, info.begun_with = info.begun_with, None
        if info.tensor.data_ptr() != info.address:  # some move a weight and leave its value (RNN.flatten_parameters)
            lasts = same_bits(info.tensor, info.view)
            show((info,))
        elif info.tensor._version != info.version:
            lasts = self._keeps_writes
        else:
            lasts = begun_with is None or same_bits(info.view, begun_with)
        accept_writes((info,))
        if not lasts:
            refuse_writes((info,), self.name)

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
