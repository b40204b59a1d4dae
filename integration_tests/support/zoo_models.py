"""Models of the zoo that are no language models: convolutions with skip connections, recurrence, ties, a GAN."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from models import VOCABULARY

WIDTH = 16
LAYERS = 2


class Recomputing(nn.Module):
    """A model whose blocks may run under activation checkpoints."""

    use_reentrant: bool | None = None

    def run(self, block: nn.Module, *args: Tensor) -> Tensor:
        """Call a block, within a checkpoint where there is to be one."""
        if self.use_reentrant is None:
            result = block(*args)
        else:
            result = checkpoint(block, *args, use_reentrant=self.use_reentrant)
        assert isinstance(result, Tensor)
        return result


class _Residual(nn.Module):
    """Two convolutions with BatchNorm, and a third one on the way around them where the shape changes."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        changes = stride > 1 or inner != outer
        self.around = nn.Conv2d(inner, outer, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the same number of images."""
        return F.relu(self.body(x) + self.around(x), inplace=True)


class ResNet(Recomputing):
    """Classifies images, shape ``(batch, 3, height, width)``, in two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([_Residual(8, 8, 1), _Residual(8, WIDTH, 2), _Residual(WIDTH, WIDTH, 1)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return logits, shape ``(batch, 2)``."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = self.run(block, x)
        return torch.as_tensor(self.head(x.mean((2, 3))))


def _convolutions(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.SiLU())


class UNet(Recomputing):
    """Predicts an image from an image; what each level saw on the way down comes back on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 8, WIDTH)
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths[1:]))
        self.merge = nn.ModuleList(_convolutions(2 * a, a) for a in widths[1:-1])
        self.out = nn.Conv2d(widths[1], 3, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return images of the same shape."""
        skips: list[Tensor] = []
        x = pixel_values
        for block in self.down:
            # torch's re-entrant checkpoints need an input that requires gradients.
            x = self.run(block, F.max_pool2d(x, 2)) if skips else block(x)
            skips.append(x)
        for up, merge, skip in zip(reversed(self.up), reversed(self.merge), reversed(skips[:-1]), strict=True):
            x = self.run(merge, torch.cat([up(x), skip], 1))
        return torch.as_tensor(self.out(x))


class _FirstOutput(nn.Module):
    """A recurrent network without its last state."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape ``(batch, time, width)``."""
        return torch.as_tensor(self.network(x)[0])


class Recurrent(Recomputing):
    """A language model of two LSTM layers, a GRU and a cell that is called at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = _FirstOutput(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True))
        self.gru = _FirstOutput(nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True))
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, shape ``(batch, time, vocabulary)``."""
        x = self.run(self.gru, self.run(self.lstm, self.embed(input_ids)))
        states = [x[:, 0]]
        for position in range(x.shape[1]):
            states.append(self.cell(x[:, position], states[-1]))
        return torch.as_tensor(self.head(torch.stack(states[1:], 1)))


class Tied(Recomputing):
    """A tied head, a weight that is used by a function as well as by its owner, and one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, shape ``(batch, time, vocabulary)``."""
        x = self.embed(input_ids)
        for block in (*self.blocks, self.blocks[0]):
            x = self.run(block, x)
        x = F.linear(self.mix(x).tanh(), self.mix.weight.T, self.mix.bias)
        return torch.as_tensor(self.head(x)) + F.linear(x, self.embed.weight * 0.5)


class Generator(nn.Module):
    """Makes images, shape ``(batch, 3, 16, 16)``, from noise, shape ``(batch, WIDTH)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * 4 * 8)
        self.grow = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        return torch.tanh(self.grow(self.first(noise).view(-1, 8, 4, 4)))


class Discriminator(nn.Module):
    """Tells real images from others; its weights are under spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2, inplace=True),
            spectral_norm(nn.Conv2d(8, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2, inplace=True),
        )
        self.head = nn.Linear(4 * 4 * 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape ``(batch, 1)``."""
        return torch.as_tensor(self.head(self.body(images).flatten(1)))
