"""Both policies keep the contract that any policy must keep."""

from gemini_placement import AutoPlacementPolicy, PlacementPolicy, StaticPlacementPolicy
from gemini_placement.testing import PlacementPolicyContract


class TestStatic(PlacementPolicyContract):
    def make_policy(self) -> PlacementPolicy:
        return StaticPlacementPolicy()


class TestStaticWithPrefetch(PlacementPolicyContract):
    max_prefetch = 2

    def make_policy(self) -> PlacementPolicy:
        return StaticPlacementPolicy(shard_param_frac=0.6, offload_optim_frac=0.5, max_prefetch=2)


class TestStaticOffloaded(PlacementPolicyContract):
    def make_policy(self) -> PlacementPolicy:
        return StaticPlacementPolicy(offload_optim_frac=1.0, offload_param_frac=0.5)


class TestStaticWithFetch(PlacementPolicyContract):
    max_prefetch = 1
    max_fetch = 2

    def make_policy(self) -> PlacementPolicy:
        return StaticPlacementPolicy(offload_optim_frac=1.0, offload_param_frac=0.8, max_prefetch=1, max_fetch=2)


class TestAuto(PlacementPolicyContract):
    def make_policy(self) -> PlacementPolicy:
        return AutoPlacementPolicy()


class TestAutoWithPrefetch(PlacementPolicyContract):
    max_prefetch = 3

    def make_policy(self) -> PlacementPolicy:
        return AutoPlacementPolicy(max_prefetch=3)


class TestAutoWithFetch(PlacementPolicyContract):
    max_fetch = 1

    def make_policy(self) -> PlacementPolicy:
        return AutoPlacementPolicy(max_fetch=1)
