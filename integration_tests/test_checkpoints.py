"""Checkpoints load on other world sizes, in plain torch and in transformers, and a resumed run is exact."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from gemini_booster import Booster, GeminiPlugin, _checkpoint
from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_optim import HybridAdam
from models import SEQ_LEN, VOCABULARY, batch, build_model, largest, lm_loss, seeded_model
from ranks import run_ranks

SMALL_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.004, "search_range_m": 0.004, "hidden_dim": 32}
KINDS = ["gpt2", "llama", "plain"]
FORMATS: dict[str, dict[str, Any]] = {
    "model.bin": {},
    "model.safetensors": {"use_safetensors": True},
    "shards_bin": {"shard": True, "size_per_shard": 0.02},
    "shards_safe": {"shard": True, "size_per_shard": 0.02, "use_safetensors": True, "prefix": None},
}


class Tied(nn.Module):
    """A module of nobody's library: a tie, buffers of several dtypes, one of them not saved, and a frozen weight."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.norm = nn.BatchNorm1d(64)
        self.scale = nn.Parameter(torch.randn(64), requires_grad=False)
        self.head = nn.Linear(64, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(SEQ_LEN) > 0.5)
        self.register_buffer("steps", torch.randint(100, ()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm((self.embed(ids) * self.scale).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


def new_model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Tied() if kind == "plain" else build_model(kind)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    if isinstance(model, GeminiDDP) and isinstance(model.unwrap(), Tied):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return lm_loss(model, ids)


def trained(kind: str, rank: int, world_size: int, plugin: GeminiPlugin, steps: int = 2) -> GeminiDDP:
    module = new_model(kind, seed=7)
    model, optimizer, *_ = Booster(plugin=plugin).boost(module, HybridAdam(module.parameters(), lr=1e-2))
    assert optimizer is not None
    for step in range(steps):
        optimizer.backward(loss_of(model, batch(rank, step)))
        optimizer.step()
    return model


def save_all(rank: int, world_size: int, folder: str) -> None:
    plugin = GeminiPlugin(precision="fp32", **SMALL_CHUNKS)
    for kind in KINDS:
        model = trained(kind, rank, world_size, plugin)
        for name, settings in FORMATS.items():
            Booster(plugin=plugin).save_model(model, Path(folder, kind, name), **settings)
        state = model.state_dict()
        assert list(state) == list(model.unwrap().state_dict(keep_vars=True))
        if rank == 0:
            torch.save(state, Path(folder, kind, "expected.pt"))


def load_all(rank: int, world_size: int, folder: str) -> None:
    plugin = GeminiPlugin(precision="fp32", offload_optim_frac=1.0, **SMALL_CHUNKS)
    booster = Booster(plugin=plugin)
    for kind in KINDS:
        wanted = torch.load(Path(folder, kind, "expected.pt"), weights_only=True)
        for name in FORMATS:
            model, *_ = booster.boost(new_model(kind, seed=rank + 50))
            assert not torch.equal(next(iter(model.state_dict().values())), next(iter(wanted.values())))
            booster.load_model(model, Path(folder, kind, name))
            state = model.state_dict()
            assert state.keys() == wanted.keys()
            assert all(torch.equal(state[entry], wanted[entry]) for entry in wanted), (kind, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that two ranks wrote, in all formats."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        (folder / kind).mkdir()
    run_ranks(save_all, 2, str(folder))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoints_of_two_ranks_load_strictly_on_other_worlds(saved: Path, world_size: int) -> None:
    run_ranks(load_all, world_size, str(saved))


def expected(saved: Path, kind: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(saved / kind / "expected.pt", weights_only=True)
    return state


def assert_holds(module: nn.Module, wanted: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_files_load_strictly_into_the_plain_module(saved: Path, kind: str) -> None:
    module = new_model(kind, seed=1)
    module.load_state_dict(torch.load(saved / kind / "model.bin", weights_only=True), strict=True)
    assert_holds(module, expected(saved, kind))
    module = new_model(kind, seed=2)
    if kind == "plain":  # nobody would tie it again, so the format that cannot share holds both
        module.load_state_dict(load_file(saved / kind / "model.safetensors"), strict=True)
    else:
        load_model(module, saved / kind / "model.safetensors", strict=True)
    assert_holds(module, expected(saved, kind))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("folder", ["shards_bin", "shards_safe"])
def test_a_sharded_folder_loads_with_from_pretrained(saved: Path, kind: str, folder: str) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(saved / kind / folder, output_loading_info=True)
    assert isinstance(model, PreTrainedModel)
    assert_holds(model, expected(saved, kind))
    assert not any(info.get(problem) for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = batch(0, 5)
    plain = new_model(kind, seed=1)
    plain.load_state_dict(expected(saved, kind))
    assert torch.equal(lm_loss(model.train(), ids), lm_loss(plain.train(), ids))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_index_tells_the_files_and_the_bytes(saved: Path, kind: str) -> None:
    for folder, suffix in (("shards_bin", ".bin"), ("shards_safe", ".safetensors")):
        (index_file,) = (saved / kind / folder).glob("*.index.json")
        index = json.loads(index_file.read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1
        stem = "pytorch_model" if suffix == ".bin" else "model"
        assert files == [f"{stem}-{number + 1:05d}{suffix}" for number in range(len(files))]
        held: dict[str, Tensor] = {}
        total = 0
        for file in files:
            path = saved / kind / folder / file
            part = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
            nbytes = sum(value.nbytes for value in part.values())
            assert nbytes <= 0.02 * 2**20 or len(part) == 1
            total += nbytes
            held |= part
        assert {name: index["weight_map"][name] for name in held} == index["weight_map"]
        assert index["metadata"]["total_size"] == total


def check_failures(rank: int, world_size: int, folder: str) -> None:
    plugin = GeminiPlugin(precision="fp32", **SMALL_CHUNKS)
    booster = Booster(plugin=plugin)
    old, new = trained("gpt2", rank, world_size, plugin, steps=1), trained("gpt2", rank, world_size, plugin, steps=2)
    optimizer = GeminiOptimizer(HybridAdam(new.parameters()), new)
    for name, settings in FORMATS.items():
        booster.save_model(old, Path(folder, name), **settings)
    booster.save_optimizer(optimizer, Path(folder, "optimizer"))
    before = contents(Path(folder))
    writes = 0

    def fill_disk(_: object, path: Path, **__: object) -> None:
        nonlocal writes
        writes += 1
        path.write_bytes(b"half of what should be here")
        if path.parent == Path(folder) or writes % 2 == 0:  # of shards, the second
            raise OSError(errno.ENOSPC, "No space left on device")

    kind: type[Exception] = RuntimeError if rank else OSError
    message = "Rank 0 could not save: OSError: .*No space left" if rank else "No space left"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", fill_disk)
        patch.setattr(_checkpoint, "save_file", fill_disk)
        for name, settings in FORMATS.items():
            with pytest.raises(kind, match=message):
                booster.save_model(new, Path(folder, name), **settings)
        with pytest.raises(kind, match=message):
            booster.save_optimizer(optimizer, Path(folder, "optimizer"))
    if rank == 0:
        assert contents(Path(folder)) == before
        assert writes == 2 + 2 * 2 + 1
    with pytest.raises(ValueError, match=r"With shard=False the checkpoint is a file; .* is a folder"):
        booster.save_model(new, Path(folder, "shards_bin"))
    with pytest.raises(ValueError, match=r"With shard=True the checkpoint is a folder; .* is a file"):
        booster.save_model(new, Path(folder, "model.bin"), shard=True)
    # The model and the ranks are as before: a later save succeeds, and fewer shards leave no stale ones behind.
    booster.save_model(new, Path(folder, "shards_bin"), shard=True, size_per_shard=0.05)
    files = {path.name for path in Path(folder, "shards_bin").glob("*.bin")}
    index = json.loads(Path(folder, "shards_bin", "pytorch_model.bin.index.json").read_text())
    assert files == set(index["weight_map"].values())
    booster.load_model(old, Path(folder, "shards_bin"))
    assert all(torch.equal(old.state_dict()[name], value) for name, value in new.state_dict().items())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failed_save_is_raised_on_every_rank_and_leaves_the_old_checkpoint(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_failures, world_size, str(tmp_path))


def check_loading_errors(rank: int, world_size: int, folder: str) -> None:
    plugin = GeminiPlugin(precision="fp32", **SMALL_CHUNKS)
    booster = Booster(plugin=plugin)
    model = trained("plain", rank, world_size, plugin)
    before = model.state_dict()
    if rank == 0:
        state = {**before, "stray": torch.ones(1)}
        del state["scale"]
        torch.save(state, Path(folder, "unlike.bin"))
        Path(folder, "empty").mkdir()
    torch.distributed.barrier()
    with pytest.raises(RuntimeError, match=r"missing: scale\n.*unexpected: stray"):
        booster.load_model(model, Path(folder, "unlike.bin"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    booster.load_model(model, Path(folder, "unlike.bin"), strict=False)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        booster.load_model(model, Path(folder, "absent.bin"))
    with pytest.raises(FileNotFoundError, match="holds 0 index files, and neither"):
        booster.load_model(model, Path(folder, "empty"))


@pytest.mark.distributed
def test_a_checkpoint_that_does_not_fit_says_so(tmp_path: Path) -> None:
    run_ranks(check_loading_errors, 2, str(tmp_path))


class Counting(nn.Linear):
    """A module with an extra state, a tensor or something else."""

    def __init__(self, as_tensor: bool, seen: int = 0) -> None:
        super().__init__(4, 4)
        self.as_tensor = as_tensor
        self.seen = seen

    def get_extra_state(self) -> object:
        return torch.zeros(self.seen) if self.as_tensor else {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = len(state) if self.as_tensor else state["seen"]


def check_extra_states(rank: int, world_size: int, folder: str) -> None:
    booster = Booster(plugin=GeminiPlugin(precision="bf16"))
    for as_tensor in (False, True):

        def wrapped(seen: int, as_tensor: bool = as_tensor) -> GeminiDDP:
            torch.manual_seed(seen)
            return booster.boost(nn.Sequential(Counting(as_tensor, seen), nn.Linear(4, 4)))[0]

        saved = wrapped(5)
        for name, settings in FORMATS.items():
            for dtype in (None, torch.float32):
                place = Path(folder, f"{as_tensor} {dtype} {name}")
                if settings.get("use_safetensors") and not as_tensor:
                    with pytest.raises(ValueError, match=r"holds tensors only, .*: 0\._extra_state\. Save with"):
                        booster.save_model(saved, place, dtype=dtype, **settings)
                    assert not place.exists()
                    continue
                booster.save_model(saved, place, dtype=dtype, **settings)
                other = wrapped(1)
                booster.load_model(other, place)
                assert other.unwrap()[0].seen == 5  # type: ignore[index]
                assert torch.equal(other.state_dict()["0.weight"], saved.state_dict()["0.weight"])
        plain = Path(folder, f"plain {as_tensor}.bin")
        if rank == 0:
            torch.save(nn.Sequential(Counting(as_tensor, 7), nn.Linear(4, 4)).state_dict(), plain)
        torch.distributed.barrier()
        booster.load_model(saved, plain)
        assert saved.unwrap()[0].seen == 7  # type: ignore[index]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_extra_states_of_modules_go_there_and_back(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_extra_states, world_size, str(tmp_path))


OTHER_WEIGHTS = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
]


def check_other_weights(rank: int, world_size: int, folder: str) -> None:
    plugin = GeminiPlugin(precision="fp32", **SMALL_CHUNKS)
    booster = Booster(plugin=plugin)
    model = trained("gpt2", rank, world_size, plugin, steps=1)
    for name in OTHER_WEIGHTS:
        place = Path(folder, name)
        if rank == 0:
            place.mkdir()
            (place / name).write_text("older")
        for use_safetensors in (False, True):
            if name == f"{'model.safetensors' if use_safetensors else 'pytorch_model.bin'}.index.json":
                continue  # the one that is replaced
            refusal = f"holds other weights, {name}, and .* Save to another folder, or remove these files first"
            with pytest.raises(ValueError, match=refusal):
                booster.save_model(model, place, shard=True, use_safetensors=use_safetensors)
        if rank == 0:
            assert [path.name for path in place.iterdir()] == [name]
        booster.save_model(model, place, shard=True, prefix="mine")  # loaded by the name of its index
    for _ in range(2):  # into its own folder, as often as one likes
        booster.save_model(model, Path(folder, "own"), shard=True)
        booster.load_model(model, Path(folder, "own"))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_with_other_weights_is_refused_on_every_rank(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_other_weights, world_size, str(tmp_path))


# -- resuming ---------------------------------------------------------------------------------------------------------

ROWS = 6


def rows_of(rank: int, world_size: int, step: int) -> Tensor:
    """Return this rank's part of a batch that is the same for worlds of 1, 2 and 3."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (ROWS, SEQ_LEN), generator=generator).tensor_split(world_size)[rank]


class Run:
    """A training run that can be saved and continued."""

    def __init__(self, precision: str, *, seed: int, adam: bool = True, **settings: Any) -> None:
        plugin = GeminiPlugin(
            precision=precision,  # type: ignore[arg-type] # one of the three
            max_norm=0.8,
            initial_scale=2**7,
            growth_interval=4,
            hysteresis=1,
            **SMALL_CHUNKS,
            **settings,
        )
        torch.manual_seed(seed)
        module = build_model("gpt2")
        decayed = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
        optimizer = HybridAdam(groups, lr=1e-2) if adam else torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.booster = Booster(plugin=plugin)
        self.model, boosted, _, _, self.scheduler = self.booster.boost(module, optimizer, lr_scheduler=scheduler)
        assert boosted is not None
        self.optimizer = boosted

    def train(self, rank: int, world_size: int, steps: range, *, overflow_at: int | None = None) -> list[float]:
        losses = []
        for step in steps:
            loss = lm_loss(self.model, rows_of(rank, world_size, step))
            losses.append(loss.item())
            self.booster.backward(loss * float("inf") if step == overflow_at else loss, self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def save(self, folder: Path, dtype: torch.dtype | None = torch.float32) -> None:
        self.booster.save_model(self.model, folder / "model.safetensors", use_safetensors=True, dtype=dtype)
        self.booster.save_optimizer(self.optimizer, folder / "optimizer.bin")
        self.booster.save_lr_scheduler(self.scheduler, folder / "scheduler.bin")

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, folder / "model.safetensors")
        self.booster.load_optimizer(self.optimizer, folder / "optimizer.bin")
        self.booster.load_lr_scheduler(self.scheduler, folder / "scheduler.bin")

    def masters(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_master_values(torch.float32)}


def check_resume(rank: int, world_size: int, folder: str) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        whole = Run(precision, seed=7)
        overflow_at = 1 if precision == "fp16" else None
        wanted = whole.train(rank, world_size, range(6), overflow_at=overflow_at)
        begun = Run(precision, seed=7)
        losses = begun.train(rank, world_size, range(3), overflow_at=overflow_at)
        begun.save(Path(folder, precision))
        resumed = Run(precision, seed=99 + rank, offload_optim_frac=1.0)
        resumed.load(Path(folder, precision))
        if precision == "fp16":
            assert resumed.optimizer.loss_scale == 2**6
        losses += resumed.train(rank, world_size, range(3, 6))
        assert losses == wanted, precision
        assert resumed.optimizer.loss_scale == whole.optimizer.loss_scale
        masters = resumed.masters()
        assert all(torch.equal(masters[name], value) for name, value in whole.masters().items())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_resume, world_size, str(tmp_path))


def check_rounding(rank: int, world_size: int, folder: str) -> None:
    run = Run("bf16", seed=7)
    run.train(rank, world_size, range(2))
    masters, working = run.masters(), run.model.state_dict()
    run.save(Path(folder, "working"), dtype=None)
    run.save(Path(folder, "half"), dtype=torch.float16)
    run.save(Path(folder, "master"), dtype=torch.float32)
    for name, dtype in (("working", torch.bfloat16), ("half", torch.float16), ("master", torch.float32)):
        stored = load_file(Path(folder, name, "model.safetensors"))
        for entry, value in stored.items():
            assert value.dtype == dtype
            assert torch.equal(value, masters[entry].to(dtype)), (name, entry)
        run.load(Path(folder, name))
        loaded = run.masters()
        exact = all(torch.equal(loaded[entry], value) for entry, value in masters.items())
        assert exact == (name == "master")
        if name != "half":
            assert all(torch.equal(run.model.state_dict()[entry], value) for entry, value in working.items())
    with pytest.raises(ValueError, match=r"dtype must be a floating dtype, .*got torch.int8"):
        run.save(Path(folder, "wrong"), dtype=torch.int8)


@pytest.mark.distributed
def test_saved_dtype_decides_whether_master_weights_survive(tmp_path: Path) -> None:
    run_ranks(check_rounding, 2, str(tmp_path))


def start_run(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Save runs after three steps; return the losses of what would have come after."""
    later = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = Run(precision, seed=7, adam=precision != "fp32")
        run.train(rank, world_size, range(3))
        run.save(Path(folder, precision))
        later[precision] = run.train(rank, world_size, range(3, 6))
        if rank == 0 and precision == "fp32":
            torch.save(run.model.state_dict(), Path(folder, "after.pt"))
        elif precision == "fp32":
            run.model.state_dict()
    return later


def continue_run(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    later = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = Run(precision, seed=50 + rank, adam=precision != "fp32")
        run.load(Path(folder, precision))
        stored = load_file(Path(folder, precision, "model.safetensors"))
        masters = run.masters()
        assert all(torch.equal(masters[name], value) for name, value in stored.items())
        state = run.optimizer.state_dict(only_rank_0=False)
        saved = torch.load(Path(folder, precision, "optimizer.bin"), weights_only=True)
        assert state["param_groups"] == saved["param_groups"]
        assert state["loss_scaler"] == saved["loss_scaler"]
        assert state["state"].keys() == saved["state"].keys()
        for number, entry in saved["state"].items():
            assert all(
                torch.equal(state["state"][number][name], value) for name, value in entry.items() if value is not None
            )
        later[precision] = run.train(rank, world_size, range(3, 6))
        if precision == "fp32":
            after = torch.load(Path(folder, "after.pt"), weights_only=True)
            ours = run.model.state_dict()
            scale = largest(iter(after.values()))
            assert all((ours[name] - value).abs().max() <= 1e-6 * scale for name, value in after.items())
    return later


@pytest.mark.distributed
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    means = {}
    for world_size in (2, 1, 3):
        found = run_ranks(start_run if world_size == 2 else continue_run, world_size, str(tmp_path))
        means[world_size] = {p: torch.tensor([ranks[p] for ranks in found]).mean(0) for p in found[0]}
    for precision, tolerance in (("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 2e-2)):  # 16-bit sums differ in their order
        for world_size in (1, 3):
            torch.testing.assert_close(means[world_size][precision], means[2][precision], rtol=tolerance, atol=0)


def check_foreign(rank: int, world_size: int, folder: str) -> None:
    """What plain torch saved, loads; what we saved loads into plain torch's optimizer."""
    plain = seeded_model("gpt2")
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    lm_loss(plain, batch(0, 0)).backward()
    theirs.step()
    if rank == 0:
        torch.save(theirs.state_dict(), Path(folder, "theirs.pt"))
    torch.distributed.barrier()
    module = seeded_model("gpt2")
    booster = Booster(plugin=GeminiPlugin(precision="fp32", **SMALL_CHUNKS))
    _, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters(), lr=1.0))
    assert optimizer is not None
    booster.load_optimizer(optimizer, Path(folder, "theirs.pt"))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    booster.save_optimizer(optimizer, Path(folder, "ours.pt"))
    saved = torch.load(Path(folder, "ours.pt"), weights_only=True)
    saved.pop("loss_scaler")
    theirs.load_state_dict(saved)
    for param, state in theirs.state.items():
        assert state["exp_avg"].shape == param.shape
        assert state["exp_avg"].any()


@pytest.mark.distributed
def test_optimizer_state_travels_from_and_to_plain_torch(tmp_path: Path) -> None:
    run_ranks(check_foreign, 2, str(tmp_path))
