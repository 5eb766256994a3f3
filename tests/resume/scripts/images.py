"""Image classification, as timm and the vision references write it."""

import copy
import math
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import safeckpt


class Digits(Dataset):
    """The digits, each moved and with noise."""

    def __init__(self, size=256):
        digits = load_digits()
        self.images = torch.tensor(digits.images[:size] / 16, dtype=torch.float32)
        self.labels = torch.tensor(digits.target[:size])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = (random.randint(-1, 1), int(np.random.randint(-1, 2)))
        image = torch.roll(self.images[index], shift, (0, 1)) + 0.05 * torch.randn(8, 8)
        return image[None], self.labels[index]


class RepeatedAugmentation(Sampler):
    """Draws each image three times in a row, and a third of all images in an epoch."""

    def __init__(self, dataset, repeats=3):
        self.dataset = dataset
        self.repeats = repeats
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        return iter(order.repeat_interleave(self.repeats)[: len(self)].tolist())

    def __len__(self):
        return len(self.dataset)


class Mixup:
    """Mixes every batch with itself in another order."""

    def __init__(self, alpha, classes):
        self.alpha = alpha
        self.classes = classes

    def __call__(self, images, labels):
        share = float(np.random.beta(self.alpha, self.alpha))
        order = torch.randperm(len(images))
        targets = nn.functional.one_hot(labels, self.classes).float()
        return share * images + (1 - share) * images[order], share * targets + (1 - share) * targets[order]


class ModelEma(nn.Module):
    """A moving average of a model's weights and buffers."""

    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(mine * self.decay + theirs * (1 - self.decay) if mine.is_floating_point() else theirs)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(8 * 16, 10),
    )  # fmt: skip


def train_with_recipe(directory):
    """AMP, a moving average, warm-up, mixup, label smoothing, clipping, repeated augmentation."""
    torch.manual_seed(0)
    epochs, warmup = 4, 5
    dataset = Digits()
    loader = safeckpt.ResumableLoader(DataLoader(dataset, batch_size=32, sampler=RepeatedAugmentation(dataset)))
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    total = epochs * len(loader)

    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    ema = ModelEma(model, decay=0.9)
    mixup = Mixup(0.8, classes=10)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    components = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema, "loader": loader,
    }  # fmt: skip
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for _ in loader.epochs(epochs):
            model.train()
            for images, labels in loader:
                mixed, targets = mixup(images, labels)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = criterion(model(mixed), targets)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                ema.update(model)
                manager.end_step(manager.step + 1, loss=loss)
    return [tensor.sum().item() for tensor in ema.state_dict().values()]


class EarlyStopping:
    """Keeps the weights with the lowest loss, and says when there was no better one for a while."""

    def __init__(self, patience):
        self.patience = patience
        self.counter = 0
        self.best_loss = None
        self.best_weights = None
        self.early_stop = False

    def __call__(self, loss, model):
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss = loss
            self.best_weights = copy.deepcopy(model.state_dict())
            self.counter = 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


def train_keeping_the_best_model(directory):
    """Validates after every epoch and ends with the best weights, which were in memory."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(images[:160], labels[:160]), 32, shuffle=True))
    validation = DataLoader(TensorDataset(images[160:400], labels[160:400]), 60)
    model = convolutional()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    stopping = EarlyStopping(patience=2)
    components = {"model": model, "optimizer": optimizer, "loader": loader, "stopping": vars(stopping)}
    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        manager.restore()
        for _ in loader.epochs(12):
            model.train()
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
            model.eval()
            with torch.no_grad():
                loss = sum(nn.functional.cross_entropy(model(x), y).item() for x, y in validation)
            stopping(loss, model)
            if stopping.early_stop:
                break
    model.load_state_dict(stopping.best_weights)
    return [stopping.best_loss, *(weight.sum().item() for weight in model.parameters())]
