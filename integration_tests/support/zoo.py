"""The model zoo: what people train, in small, with the plain PyTorch run that each is held against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import models
from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_search import ChunkConfiguration, ChunkSpec, TensorSlot
from zoo_models import LAYERS, WIDTH, Recomputing, Recurrent, ResNet, Tied, UNet

STEPS = 3
LR = 0.01  # small steps, for with large ones rounding of three ranks' sums grows tenfold a step

Inputs = dict[str, Tensor]
Recompute = bool | None
"""Whether activation checkpoints are re-entrant; None is without them."""

RECOMPUTE: tuple[Recompute, ...] = (None, False, True)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the zoo.

    Attributes:
        build: makes it; its values depend on torch's seed alone, and nothing in it is random later.
        inputs: what it is called with, unlike for every rank and step, the batch in dimension 0.
        loss: calls the model with its inputs.
        joins: whether the mean loss of two batches is the loss of both together.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]
    joins: bool = True

    def make(self, recompute: Recompute = None) -> nn.Module:
        """Return the same model on every rank and in every call, with activation checkpoints or without."""
        torch.manual_seed(7)
        model = self.build()
        if recompute is None:
            return model
        if isinstance(model, transformers.PreTrainedModel):
            model.activation_checkpointing_enable({"use_reentrant": recompute})
        else:
            for child in model.modules():
                if isinstance(child, Recomputing):
                    child.use_reentrant = recompute
        return model


# -- models of transformers -------------------------------------------------------------------------------------------


def _build_qwen3() -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=models.VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=2 * WIDTH,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def _build_clip() -> nn.Module:
    block = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 2 * WIDTH,
    }
    text = {**block, "vocab_size": models.VOCABULARY, "max_position_embeddings": models.SEQ_LEN}
    text |= {"bos_token_id": 0, "eos_token_id": models.VOCABULARY - 1, "pad_token_id": 1}
    vision = {**block, "image_size": models.IMAGE_SIZE, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model: nn.Module = transformers.CLIPModel(config)
    return model


def _clip_inputs(rank: int, step: int) -> Inputs:
    pixels = models.inputs_of("vit", rank, step)["pixel_values"]
    return {"input_ids": models.batch(rank, step), "pixel_values": pixels}


def _own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    loss = model(**inputs).loss
    assert isinstance(loss, Tensor)
    return loss


def _clip_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    loss = model(**inputs, return_loss=True).loss
    assert isinstance(loss, Tensor)
    return loss


def _family(kind: str) -> Entry:
    return Entry(
        build=partial(models.build_model, kind, layers=LAYERS, width=WIDTH),
        inputs=partial(models.inputs_of, kind),
        loss=_own_loss,
    )


# -- models of our own -------------------------------------------------------------------------------------------------


def _classify(model: nn.Module, inputs: Inputs) -> Tensor:
    return F.cross_entropy(model(inputs["pixel_values"]), inputs["labels"])


def _restore(model: nn.Module, inputs: Inputs) -> Tensor:
    return F.mse_loss(model(inputs["pixel_values"]), inputs["pixel_values"].flip(-1))


def _predict(model: nn.Module, inputs: Inputs) -> Tensor:
    logits = model(inputs["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


_words = partial(models.inputs_of, "gpt2")
_images = partial(models.inputs_of, "vit")

ZOO: dict[str, Entry] = {
    **{kind: _family(kind) for kind in ("gpt2", "llama", "bert", "t5", "vit", "whisper", "mixtral", "mamba")},
    "qwen3": Entry(build=_build_qwen3, inputs=_words, loss=_own_loss),
    # The loss compares the texts with the images of one batch.
    "clip": Entry(build=_build_clip, inputs=_clip_inputs, loss=_clip_loss, joins=False),
    # BatchNorm takes the mean over one batch.
    "resnet": Entry(build=ResNet, inputs=_images, loss=_classify, joins=False),
    "unet": Entry(build=UNet, inputs=_images, loss=_restore),
    "rnn": Entry(build=Recurrent, inputs=_words, loss=_predict),
    "tied": Entry(build=Tied, inputs=_words, loss=_predict),
}


# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What plain PyTorch makes of a model.

    Attributes:
        losses: by step, then by rank.
        gradients: by step; the mean of what each rank's batch gives.
        joint: by step; what the joint batch gives, where batches may be joined.
        state: at the end, by rank, for buffers are each rank's own.
    """

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    joint: list[dict[str, Tensor]] = field(default_factory=list)
    state: list[dict[str, Tensor]] = field(default_factory=list)


def train_plainly(entry: Entry, world_size: int, recompute: Recompute) -> Reference:
    """Train with SGD on the mean of the gradients that each rank's batch gives, as data parallelism does."""
    reference = Reference()
    replicas = [entry.make(recompute) for _ in range(world_size)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=LR) for replica in replicas]
    for step in range(STEPS):
        batches = [entry.inputs(rank, step) for rank in range(world_size)]
        if entry.joins:
            whole = copy.deepcopy(replicas[0])
            entry.loss(whole, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).backward()
            reference.joint.append(models.full_gradients(whole))
        losses = [entry.loss(replica, batch) for replica, batch in zip(replicas, batches, strict=True)]
        for loss in losses:
            loss.backward()
        mean_gradients(replicas)
        reference.losses.append([loss.item() for loss in losses])
        reference.gradients.append(models.full_gradients(replicas[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reference.state.extend(replica.state_dict() for replica in replicas)
    return reference


def mean_gradients(replicas: Sequence[nn.Module]) -> None:
    """Give every replica the mean of all replicas' gradients; one that is missing everywhere stays so."""
    for params in zip(*(replica.parameters() for replica in replicas), strict=True):
        present = [param.grad for param in params if param.grad is not None]
        if present:
            mean = torch.stack(present).sum(0) / len(replicas)
            for param in params:
                param.grad = mean.clone()


def configuration(module: nn.Module, world_size: int, *, whole: bool) -> ChunkConfiguration:
    """Return chunks of one trainable parameter each, the smallest there are, or one chunk of all; both are sharded."""
    sizes = [(name, param.numel()) for name, param in module.named_parameters() if param.requires_grad]
    groups = [sizes] if whole else [[size] for size in sizes]
    chunks = []
    for group in groups:
        offsets = accumulate((numel for _, numel in group), initial=0)
        slots = tuple(TensorSlot(name, offset, numel) for (name, numel), offset in zip(group, offsets, strict=False))
        used = sum(numel for _, numel in group)
        chunks.append(ChunkSpec(numel=-(-used // world_size) * world_size, tensors=slots))
    return ChunkConfiguration(
        chunks=tuple(chunks), chunk_numel=max(chunk.numel for chunk in chunks), world_size=world_size
    )


def gradient_error(model: GeminiDDP, wanted: Mapping[str, Tensor]) -> float:
    """Return how far this rank's shards of the reduced gradients are from those wanted; one not wanted is zero.

    It is relative to the largest gradient.
    """
    error, compared = 0.0, 0
    for chunk in model.chunk_manager.chunks:
        for part in chunk.slices if chunk.trainable else ():
            mine = wanted.get(part.info.name, torch.zeros(part.info.shape)).flatten()[part.in_tensor]
            found = torch.zeros_like(mine) if chunk.gradient is None else chunk.gradient[part.in_shard]
            distance = float((found - mine).abs().max()) if mine.numel() else 0.0
            assert math.isfinite(distance), part.info.name
            error, compared = max(error, distance), compared + part.numel
    assert compared > 0
    return error / models.largest(value for value in wanted.values() if value.numel())


def check_against(entry: Entry, reference: Reference, model: GeminiDDP, rank: int, *, exact: bool) -> None:
    """Train a wrapped model and compare each step's loss and reduced gradients, and the state at the end.

    With ``exact``, all but the gradients of joint batches are equal bit for bit.
    """
    tolerance = 0.0 if exact else 1e-6
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
    for step in range(STEPS):
        loss = entry.loss(model, entry.inputs(rank, step))
        wanted = reference.losses[step][rank]
        assert abs(loss.item() - wanted) <= tolerance * abs(wanted), f"step {step}: loss"
        optimizer.backward(loss)
        error = gradient_error(model, reference.gradients[step])
        assert error <= tolerance, f"step {step}: gradients are off by {error:.1e}"
        if entry.joins:
            error = gradient_error(model, reference.joint[step])
            assert error <= 1e-6, f"step {step}: gradients of the joint batch are off by {error:.1e}"
        assert not any(chunk.is_gathered for chunk in model.chunk_manager.chunks), f"step {step}: not at rest"
        optimizer.step()
    state = model.state_dict()
    assert list(state) == list(reference.state[rank])
    for name, value in reference.state[rank].items():
        error = float((state[name] - value).abs().max()) if value.numel() else 0.0
        assert error <= tolerance * max(1.0, float(value.abs().max())), f"{name} ends off by {error:.1e}"
