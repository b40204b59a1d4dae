"""Each collaborator fits the Protocol that it is passed as: mypy is the test of what the functions here say.

One function for each pair, and a test that no Protocol of an ``interfaces.py`` was forgotten.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from types import ModuleType

import pytest

import gemini_chunk
import gemini_ddp.interfaces
import gemini_ddp.testing
import gemini_optim.interfaces
import gemini_optim.testing
import gemini_placement
import gemini_placement.interfaces
import gemini_placement.testing
from gemini_booster._gemini_ddp import _Planner
from gemini_booster.zero import GeminiDDP
from gemini_chunk import Chunk, ChunkManager

# -- gemini-ddp: a store that holds parameters, and a planner ---------------------------------------------------------


def chunk_manager_serves_ddp(store: ChunkManager) -> gemini_ddp.interfaces.ChunkStore[Chunk]:
    return store


def plain_store_serves_ddp(
    store: gemini_ddp.testing.PlainStore,
) -> gemini_ddp.interfaces.ChunkStore[gemini_ddp.testing.PlainChunk]:
    return store


def boosters_planner_serves_ddp(planner: _Planner[Chunk]) -> gemini_ddp.interfaces.Planner[Chunk]:
    return planner


def placements_plan_serves_ddp(plan: gemini_placement.Plan[Chunk]) -> gemini_ddp.interfaces.Plan[Chunk]:
    return plan


def placements_step_serves_ddp(step: gemini_placement.PlanStep[Chunk]) -> gemini_ddp.interfaces.Step[Chunk]:
    return step


# -- gemini-placement: facts about chunks, a recorded step, and what a policy is --------------------------------------


def chunk_serves_placement(chunk: Chunk) -> gemini_placement.ChunkFacts:
    return chunk


def paper_chunk_serves_placement(chunk: gemini_placement.testing.PaperChunk) -> gemini_placement.ChunkFacts:
    return chunk


def ddps_trace_serves_placement(trace: gemini_ddp.interfaces.Trace[Chunk]) -> gemini_placement.Trace[Chunk]:
    return trace


def ddps_access_serves_placement(access: gemini_ddp.interfaces.Access[Chunk]) -> gemini_placement.Access[Chunk]:
    return access


def placements_trace_serves_ddp(trace: gemini_placement.Trace[Chunk]) -> gemini_ddp.interfaces.Trace[Chunk]:
    return trace


def placements_access_serves_ddp(access: gemini_placement.Access[Chunk]) -> gemini_ddp.interfaces.Access[Chunk]:
    return access


def static_policy_serves_placement(
    policy: gemini_placement.StaticPlacementPolicy,
) -> gemini_placement.PlacementPolicy:
    return policy


def auto_policy_serves_placement(policy: gemini_placement.AutoPlacementPolicy) -> gemini_placement.PlacementPolicy:
    return policy


def tier_names_agree(name: gemini_chunk.TierName) -> gemini_placement.TierName:
    return name


def tier_names_agree_both_ways(name: gemini_placement.TierName) -> gemini_chunk.TierName:
    return name


# -- gemini-optim: a sharded model ------------------------------------------------------------------------------------


def gemini_ddp_serves_optim(model: GeminiDDP) -> gemini_optim.interfaces.ShardedModel:
    return model


def shard_of_gemini_ddp_serves_optim(model: GeminiDDP) -> gemini_optim.interfaces.OptimShard:
    return model.shards[0]


def slice_of_gemini_ddp_serves_optim(model: GeminiDDP) -> gemini_optim.interfaces.ParamSlice:
    return model.shards[0].slices[0]


def plain_model_serves_optim(model: gemini_optim.testing.PlainModel) -> gemini_optim.interfaces.ShardedModel:
    return model


INTERFACES = [gemini_ddp.interfaces, gemini_optim.interfaces, gemini_placement.interfaces]


def is_protocol(value: object) -> bool:
    return inspect.isclass(value) and bool(getattr(value, "_is_protocol", False))


def protocols(module: ModuleType) -> set[type]:
    """Return the Protocols that a module defines."""
    return {value for value in vars(module).values() if is_protocol(value) and value.__module__ == module.__name__}


def served() -> set[object]:
    """Return the Protocols that the functions of this module return."""
    functions = [value for value in vars(sys.modules[__name__]).values() if inspect.isfunction(value)]
    hints = [typing.get_type_hints(function).get("return") for function in functions]
    return {typing.get_origin(hint) or hint for hint in hints if is_protocol(typing.get_origin(hint) or hint)}


@pytest.mark.parametrize("interfaces", INTERFACES, ids=lambda module: module.__name__)
def test_every_protocol_of_a_package_has_a_function_here(interfaces: ModuleType) -> None:
    wanted = protocols(interfaces)
    assert wanted
    assert wanted <= served(), [protocol.__name__ for protocol in wanted - served()]


def test_every_package_that_asks_something_is_looked_at() -> None:
    found = []
    for name in ("booster", "chunk", "ddp", "lazy", "optim", "placement", "search"):
        try:
            found.append(importlib.import_module(f"gemini_{name}.interfaces"))
        except ModuleNotFoundError:
            continue
    assert found == INTERFACES


def test_protocols_have_methods_and_read_only_properties_only() -> None:
    for module in INTERFACES:
        for protocol in protocols(module):
            members = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
            assert members or protocol.__mro__[1] is not object, protocol
            attributes = getattr(protocol, "__annotations__", {})
            assert not attributes, f"{protocol.__name__} has plain attributes: {list(attributes)}"
            for name, value in members.items():
                assert inspect.isfunction(value) or (isinstance(value, property) and value.fset is None), name
                described = value.fget if isinstance(value, property) else value
                assert inspect.getdoc(described), f"{protocol.__name__}.{name} says nothing of itself"
