"""What is trained side by side: models, batches and settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import torch
import transformers
from torch import Tensor, nn

logging.getLogger("transformers").setLevel(logging.ERROR)

Precision = Literal["fp32", "bf16"]

_SEQUENCES = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with its batches, trained by every system.

    Attributes:
        family: whose blocks the model has.
        layers: blocks.
        width: hidden size.
        vocabulary: tokens.
        seq_len: tokens of a sequence.
        chunk_m: chunk size of ours, in units of 2**20 elements.
        rounds: steps of each system that are measured, unless ``limit_s`` comes before.
        limit_s: seconds for the measured steps of all systems together, of which each takes five at least.
        world_size: ranks; they share four sequences a step, but each has one at least.
        precision: what forward and backward compute in.
        checkpointing: whether blocks are recomputed in backward.
    """

    family: Literal["gpt2", "llama"]
    layers: int
    width: int
    vocabulary: int = 8192
    seq_len: int = 32
    chunk_m: float = 1.0
    rounds: int = 60
    limit_s: float = 45.0
    world_size: int = 2
    precision: Precision = "fp32"
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """How tables call it."""
        extras: list[str] = [] if self.precision == "fp32" else [self.precision]
        extras += ["recompute"] if self.checkpointing else []
        extras += [] if self.world_size == 2 else ["1 rank" if self.world_size == 1 else f"{self.world_size} ranks"]
        return " ".join([f"{self.family} {self.layers}x{self.width}", *extras])

    def model(self) -> nn.Module:
        """Return the model, with the same values on every rank and for every system."""
        torch.manual_seed(0)
        model: nn.Module = self._gpt2() if self.family == "gpt2" else self._llama()
        if self.checkpointing:
            assert isinstance(model, transformers.PreTrainedModel)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def _gpt2(self) -> transformers.PreTrainedModel:
        model: transformers.PreTrainedModel = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=self.vocabulary,
                n_positions=self.seq_len,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self._heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
        return model

    def _llama(self) -> transformers.PreTrainedModel:
        model: transformers.PreTrainedModel = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.width,
                intermediate_size=4 * self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self._heads,
                num_key_value_heads=self._heads,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
        return model

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters in fp32, each counted once."""
        with torch.device("meta"):
            return sum(param.nbytes for param in self.model().parameters())

    @property
    def _heads(self) -> int:
        return max(4, self.width // 64)

    def batch(self, rank: int, step: int) -> Tensor:
        """Return token ids, shape ``(sequences, seq_len)``, unlike on every rank and in every step."""
        generator = torch.Generator().manual_seed(10_000 * step + rank)
        shape = (max(1, _SEQUENCES // self.world_size), self.seq_len)
        return torch.randint(self.vocabulary, shape, generator=generator)


_TINY = Case(family="gpt2", layers=2, width=128, vocabulary=2048, seq_len=64, chunk_m=0.25, limit_s=20.0)
_DEEP = Case(family="gpt2", layers=48, width=256, limit_s=50.0)
_LLAMA = Case(family="llama", layers=8, width=512, seq_len=64, limit_s=50.0)
_WIDE = Case(family="gpt2", layers=12, width=768, chunk_m=2.0, limit_s=80.0)

# All fifteen minutes are shared out: the four workloads see every system and have their bytes counted.
WORKLOADS = (_TINY, _DEEP, _LLAMA, _WIDE)
BF16 = tuple(replace(case, precision="bf16", limit_s=case.limit_s / 2) for case in (_TINY, _DEEP, _LLAMA))
ONE_RANK = tuple(replace(case, world_size=1, limit_s=case.limit_s / 4) for case in WORKLOADS)
QUICK = (replace(_TINY, limit_s=8.0), replace(_DEEP, layers=24, limit_s=20.0))
ALL = (
    *WORKLOADS,
    replace(_DEEP, checkpointing=True, limit_s=25.0),
    *BF16,
    *ONE_RANK,
    replace(_TINY, world_size=4, limit_s=8.0),
    replace(_DEEP, world_size=4, limit_s=25.0),
)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean next-token loss."""
    loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, Tensor)
    return loss
