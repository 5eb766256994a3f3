"""Generative models of the digits: a GAN, a VAE, and diffusion."""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt


def digits(size=None):
    return torch.tensor(load_digits().images[:size] / 16, dtype=torch.float32)[:, None]


def train_gan(directory):
    """Two networks, two optimizers, two schedules."""
    torch.manual_seed(999)
    batch_size, latent = 32, 8
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(digits(256)), batch_size, shuffle=True))
    generator = nn.Sequential(
        nn.ConvTranspose2d(latent, 8, 4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 4), nn.Flatten(0),
    )  # fmt: skip
    for module in [*generator.modules(), *discriminator.modules()]:
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
    fixed = torch.randn(4, latent, 1, 1)
    optimizers = {
        "discriminator": torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        "generator": torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }
    schedules = {name: torch.optim.lr_scheduler.StepLR(one, 10, 0.5) for name, one in optimizers.items()}
    criterion = nn.BCEWithLogitsLoss()
    components = {
        "generator": generator,
        "discriminator": discriminator,
        "optimizer_g": optimizers["generator"],
        "optimizer_d": optimizers["discriminator"],
        "schedule_g": schedules["generator"],
        "schedule_d": schedules["discriminator"],
        "loader": loader,
    }
    pictures = []
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for _ in loader.epochs(4):
            for i, (real,) in loader.enumerate():
                discriminator.zero_grad()
                real_loss = criterion(discriminator(real), torch.ones(len(real)))
                real_loss.backward()
                fake = generator(torch.randn(len(real), latent, 1, 1))
                fake_loss = criterion(discriminator(fake.detach()), torch.zeros(len(real)))
                fake_loss.backward()
                optimizers["discriminator"].step()

                generator.zero_grad()
                loss = criterion(discriminator(fake), torch.ones(len(real)))
                loss.backward()
                optimizers["generator"].step()
                for schedule in schedules.values():
                    schedule.step()
                if i % 4 == 0:
                    with torch.no_grad():
                        pictures.append(generator(fixed).sum().item())
                manager.end_step(manager.step + 1, loss=loss + real_loss + fake_loss)
            with torch.no_grad():
                pictures.append(generator(fixed).mean().item())
    return pictures


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 32)
        self.mean = nn.Linear(32, 4)
        self.spread = nn.Linear(32, 4)
        self.outer = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x):
        hidden = torch.relu(self.inner(x.flatten(1)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return self.outer(code), mean, spread


def vae_loss(reconstruction, x, mean, spread):
    error = nn.functional.binary_cross_entropy(reconstruction, x.flatten(1), reduction="sum")
    return error - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())


def train_vae(directory):
    """The example of a VAE: a sum over the epoch, then a test pass and samples, which draw random numbers."""
    torch.manual_seed(1)
    images = digits(320)
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(images[:256]), batch_size=32, shuffle=True))
    test_loader = DataLoader(TensorDataset(images[256:]), batch_size=32, shuffle=False)
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sums = {"train": 0.0}

    def test():
        model.eval()
        with torch.no_grad():
            loss = sum(vae_loss(*_with(model, x)).item() for (x,) in test_loader)
            sample = model.outer(torch.randn(4, 4)).sum().item()
        return loss, sample

    components = {"model": model, "optimizer": optimizer, "loader": loader, "sums": sums}
    epochs = []
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for _ in loader.epochs(4):
            model.train()
            if loader.batch == 0:
                sums["train"] = 0.0
            for (x,) in loader:
                optimizer.zero_grad()
                loss = vae_loss(*_with(model, x))
                loss.backward()
                sums["train"] += loss.item()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
            epochs.append((sums["train"] / len(loader.dataset), *test()))
    return epochs


def _with(model, x):
    reconstruction, mean, spread = model(x)
    return reconstruction, x, mean, spread


class Ema:
    """A moving average that keeps its copies in a dict by name."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.backup = {}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * parameter.detach()

    def apply_to(self, model):
        for name, parameter in model.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.shadow[name]

    def take_back(self, model):
        for name, parameter in model.named_parameters():
            parameter.data = self.backup[name]
        self.backup = {}


class Denoiser(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.time = nn.Embedding(steps, 16)
        self.inner = nn.Linear(64, 16)
        self.outer = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 64))
        betas = torch.linspace(1e-4, 0.2, steps)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))
        self.register_buffer("betas", betas)

    def forward(self, x, t):
        return self.outer(self.inner(x.flatten(1)) + self.time(t)).view_as(x)

    @torch.no_grad()
    def sample(self, count):
        x = torch.randn(count, 1, 8, 8)
        for t in reversed(range(len(self.betas))):
            noise = self(x, torch.full((count,), t))
            x = (x - self.betas[t] / math.sqrt(1 - self.kept[t]) * noise) / math.sqrt(1 - self.betas[t])
            if t > 0:
                x += math.sqrt(self.betas[t]) * torch.randn_like(x)
        return x


def cycle(loader):
    while True:
        yield from loader


class DiffusionTrainer:
    """A trainer with a counter of its own, an endless loader and samples from the averaged weights."""

    def __init__(self, directory, steps):
        self.steps = steps
        self.model = Denoiser(steps=10)
        self.ema = Ema(self.model, decay=0.9)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3, betas=(0.9, 0.99))
        loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(digits(160)), 16, shuffle=True))
        self.batches = cycle(loader)
        self.samples = []
        components = {"model": self.model, "ema": self.ema.shadow, "optimizer": self.optimizer, "loader": loader}
        self.manager = safeckpt.CheckpointManager(directory, components, save_every=4)

    def loss(self, x):
        t = torch.randint(0, len(self.model.betas), (len(x),))
        noise = torch.randn_like(x)
        kept = self.model.kept[t].view(-1, 1, 1, 1)
        return nn.functional.mse_loss(self.model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)

    def train(self):
        self.manager.restore()
        while self.manager.step < self.steps:
            total = 0.0
            for _ in range(2):
                (x,) = next(self.batches)
                loss = self.loss(2 * x - 1) / 2
                total += loss.item()
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update(self.model)
            step = self.manager.step + 1
            if step % 6 == 0:
                self.ema.apply_to(self.model)
                self.model.eval()
                self.samples.append((step, self.model.sample(2).sum().item()))
                self.model.train()
                self.ema.take_back(self.model)
            self.manager.end_step(step, loss=total)
        self.manager.close()
        return self.samples


def train_diffusion(directory):
    """Diffusion with a moving average that is swapped in for samples."""
    torch.manual_seed(0)
    return DiffusionTrainer(directory, steps=24).train()


def train_vae_annealing(directory):
    """A weight of the divergence that goes up and down again with the steps."""
    torch.manual_seed(1)
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(digits(256)), batch_size=32, shuffle=True))
    model = Vae()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    weights = []
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for _ in loader.epochs(4):
            for (x,) in loader:
                beta = min(1.0, (manager.step % 10) / 5)
                reconstruction, mean, spread = model(x)
                error = nn.functional.binary_cross_entropy(reconstruction, x.flatten(1), reduction="sum")
                loss = error - beta * 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                weights.append(beta)
                manager.end_step(manager.step + 1, loss=loss)
            scheduler.step()
    return weights
