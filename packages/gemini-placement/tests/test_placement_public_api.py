"""The public surface: a change to it must be made here too."""

import inspect
import sys

import gemini_placement
import gemini_placement.testing

SIGNATURES = {
    "StaticPlacementPolicy": (
        "(*, shard_param_frac: 'float' = 1.0, offload_optim_frac: 'float' = 0.0, "
        "offload_param_frac: 'float' = 0.0, disk_optim_frac: 'float' = 0.0, disk_param_frac: 'float' = 0.0, "
        "max_prefetch: 'int' = 0, max_fetch: 'int' = 0, max_held: 'int' = 0) -> None"
    ),
    "AutoPlacementPolicy": (
        "(*, warmup_non_model_data_ratio: 'float' = 0.8, steady_cuda_cap_ratio: 'float' = 0.9, "
        "gpu_margin_mem_ratio: 'float' = 1.0, max_prefetch: 'int' = 0, max_fetch: 'int' = 0) -> None"
    ),
    "ChunkPlacement": "(*, keep_gathered: 'bool', param_tier: 'TierName', optim_tier: 'TierName') -> None",
    "MemStats": "(*, accesses: 'tuple[AccessStats, ...]') -> None",
    "AccessStats": (
        "(*, phase: 'Phase', params: 'tuple[str, ...]', non_model_bytes: 'int', module: 'str' = '', "
        "within: 'tuple[str, ...]' = (), gradients: 'tuple[str, ...]' = (), ends: 'tuple[tuple[str, int], ...]' = ()) "
        "-> None"
    ),
}


def test_public_names_and_signatures_are_as_stated() -> None:
    assert gemini_placement.__all__ == [
        "Access",
        "AccessStats",
        "AutoPlacementPolicy",
        "ChunkAccess",
        "ChunkFacts",
        "ChunkPlacement",
        "ChunkTrace",
        "MemStats",
        "Phase",
        "Placement",
        "PlacementError",
        "PlacementPolicy",
        "Plan",
        "PlanStep",
        "StaticPlacementPolicy",
        "TierName",
        "Trace",
        "__version__",
    ]
    found = {name: str(inspect.signature(getattr(gemini_placement, name))) for name in SIGNATURES}
    assert found == SIGNATURES


def test_package_needs_the_standard_library_only() -> None:
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("gemini_placement")}
    modules = [module for name, module in loaded.items() if name != "gemini_placement.tracer"]
    imported = {
        value.__module__.partition(".")[0]
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert imported <= sys.stdlib_module_names | {"gemini_placement"}
