"""A DCGAN (Radford et al. 2015) that generates handwritten digits: two networks, updated alternately."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from hpctrain import TorchTask

NOISE = 16


class Generator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4, bias=False),
            nn.Flatten(0),
        )

    def forward(self, image):
        return self.main(image)


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


criterion = nn.BCEWithLogitsLoss()


def step(ctx, batch):
    net_g, net_d = ctx.models["g"], ctx.models["d"]
    # the discriminator: real images, then fake ones
    output = net_d(batch["x"])
    error_real = criterion(output, torch.ones_like(output))
    ctx.backward(error_real, "d")
    fake = net_g(batch["noise"])
    output = net_d(fake.detach())
    error_fake = criterion(output, torch.zeros_like(output))
    ctx.backward(error_fake, "d")
    ctx.update("d")
    # the generator: fake images should be classified as real
    output = net_d(fake)
    error_g = criterion(output, torch.ones_like(output))
    ctx.backward(error_g, "g")
    ctx.update("g")


def add_noise(sample, rng):
    return {**sample, "noise": rng.standard_normal((NOISE, 1, 1), np.float32)}


def task():
    images = torch.from_numpy(load_digits().images[:900, None] / 8 - 1).float()
    net_g, net_d = Generator(), Discriminator()
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    return TorchTask(
        model={"g": net_g, "d": net_d},
        optimizer={"d": optimizer_d, "g": optimizer_g},
        step=step,
        train=TensorDataset(images),
        transform=add_noise,
    )
