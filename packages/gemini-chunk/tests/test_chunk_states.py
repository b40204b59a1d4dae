"""The table of tensor states: what it allows, and that anything else changes nothing."""

import itertools

import pytest
import torch

from gemini_chunk import TensorInfo, TensorState, TensorStateError

S = TensorState
LEGAL = {
    (S.FREE, S.HOLD),
    (S.HOLD, S.FREE),
    (S.FREE, S.COMPUTE),
    (S.COMPUTE, S.FREE),
    (S.HOLD, S.COMPUTE),
    (S.COMPUTE, S.HOLD),
    (S.COMPUTE, S.HOLD_AFTER_BWD),
    (S.HOLD_AFTER_BWD, S.COMPUTE),
    (S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE),
    (S.READY_FOR_REDUCE, S.HOLD),
}


@pytest.mark.parametrize(("start", "end"), list(itertools.product(S, S)))
def test_only_the_transitions_of_the_table_are_possible(start: TensorState, end: TensorState) -> None:
    info = TensorInfo("layer.weight", torch.zeros(2), torch.Size([2]), 0, 2, state=start)
    if (start, end) in LEGAL:
        info.to(end)
        assert info.state is end
    else:
        with pytest.raises(TensorStateError, match=rf"layer\.weight.*{start.name}.*{end.name}"):
            info.to(end)
        assert info.state is start
