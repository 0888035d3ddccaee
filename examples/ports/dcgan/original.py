"""A DCGAN (Radford et al. 2015) that generates handwritten digits: two networks, updated alternately."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def main():
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().images[:900, None] / 8 - 1).float()
    loader = DataLoader(TensorDataset(images), batch_size=60)
    net_g, net_d = Generator(), Discriminator()
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    step = 0
    for epoch in range(2):
        for (real,) in loader:
            # the discriminator: real images, then fake ones
            net_d.zero_grad()
            output = net_d(real)
            error_real = criterion(output, torch.ones_like(output))
            error_real.backward()
            noise = torch.randn(len(real), NOISE, 1, 1)
            fake = net_g(noise)
            output = net_d(fake.detach())
            error_fake = criterion(output, torch.zeros_like(output))
            error_fake.backward()
            optimizer_d.step()
            # the generator: fake images should be classified as real
            net_g.zero_grad()
            output = net_d(fake)
            error_g = criterion(output, torch.ones_like(output))
            error_g.backward()
            optimizer_g.step()
            step += 1
            print(f"step {step} loss_d {error_real.item() + error_fake.item():.8f} loss_g {error_g.item():.8f}")
        print(f"epoch {epoch + 1}")


if __name__ == "__main__":
    main()
