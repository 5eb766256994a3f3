"""Further shapes of training: recurrent, siamese, fine-tuned, averaged, contrastive, distilled, by curriculum."""

import copy
import math
import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import safeckpt
from tests.resume.scripts.images import Digits, ModelEma, convolutional
from tests.resume.scripts.language import VOCABULARY, tokens


def digits(start, stop):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(images[start:stop] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels[start:stop])
    )


@torch.no_grad()
def accuracy(model, dataloader):
    model.eval()
    right = sum((model(x).argmax(dim=1) == y).sum().item() for x, y in dataloader)
    model.train()
    return right / len(dataloader.dataset)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.2)
        self.decoder = nn.Linear(16, VOCABULARY)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(out)), hidden


def train_word_language_model(directory):
    """Columns of text in order, the hidden state carried over, SGD by hand, a rate that falls with a bad validation."""
    torch.manual_seed(1111)
    length = 10
    text = tokens(1000).view(8, -1).t()
    train_text, val_text = text[:100], text[100:]
    model = Recurrent()
    loader = safeckpt.ResumableLoader(DataLoader(range(0, len(train_text) - 1, length), batch_size=None))
    carried = {"hidden": None, "lr": 5.0, "best": None, "total": 0.0}

    def part(source, start):
        size = min(length, len(source) - 1 - start)
        return source[start : start + size], source[start + 1 : start + 1 + size].reshape(-1)

    def loss_of(x, y, hidden):
        out, hidden = model(x, hidden and tuple(one.detach() for one in hidden))
        return nn.functional.cross_entropy(out.view(-1, VOCABULARY), y), hidden

    @torch.no_grad()
    def evaluate():
        model.eval()
        hidden, total = None, 0.0
        for start in range(0, len(val_text) - 1, length):
            loss, hidden = loss_of(*part(val_text, start), hidden)
            total += loss.item()
        return total

    rates = []
    components = {"model": model, "loader": loader, "carried": carried}
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for _ in loader.epochs(4):
            model.train()
            if loader.batch == 0:
                carried["hidden"], carried["total"] = None, 0.0
            for start in loader:
                model.zero_grad()
                loss, carried["hidden"] = loss_of(*part(train_text, start), carried["hidden"])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(parameter.grad, alpha=-carried["lr"])
                carried["total"] += loss.item()
                manager.end_step(manager.step + 1, loss=loss)
            value = evaluate()
            if carried["best"] is None or value < carried["best"]:
                carried["best"] = value
            else:
                carried["lr"] /= 4.0
            rates.append((value, carried["lr"], carried["total"]))
    return rates


class Pairs(Dataset):
    """Two digits, the same in half of the cases, drawn when asked for."""

    def __init__(self, start, stop):
        self.images, self.labels = digits(start, stop).tensors
        self.rows = {label: (self.labels == label).nonzero().flatten().tolist() for label in range(10)}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index].item()
        same = torch.rand(()).item() < 0.5
        other = label if same else random.choice([one for one in range(10) if one != label])
        return self.images[index], self.images[random.choice(self.rows[other])], float(same)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, a, b):
        return self.head(torch.cat([self.body(a), self.body(b)], dim=1)).squeeze(1)


def train_siamese(directory):
    """Pairs drawn at random by two workers, in training and in the test after each epoch."""
    torch.manual_seed(1)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = safeckpt.ResumableLoader(DataLoader(Pairs(0, 200), batch_size=32, shuffle=True, **workers))
    test_loader = DataLoader(Pairs(200, 300), batch_size=50, **workers)
    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCEWithLogitsLoss()
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    tests = []
    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        manager.restore()
        for _ in loader.epochs(3):
            model.train()
            for a, b, same in loader:
                optimizer.zero_grad()
                loss = criterion(model(a, b), same.float())
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
            model.eval()
            with torch.no_grad():
                tests.append(sum(criterion(model(a, b), same.float()).item() for a, b, same in test_loader))
            scheduler.step()
    return tests


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count


def train_with_plateau(directory):
    """A function for an epoch, meters, updates counted over epochs, warm-up, a plateau schedule, a moving average."""
    torch.manual_seed(0)
    dataset = Digits(160)
    loader = safeckpt.ResumableLoader(DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True))
    validation = DataLoader(digits(200, 320), batch_size=60)
    model = convolutional()
    ema = ModelEma(model, decay=0.9)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    meter = AverageMeter()
    components = {
        "model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler, "loader": loader,
        "meter": vars(meter),
    }  # fmt: skip
    best = safeckpt.Best("top1", mode="max")
    manager = safeckpt.CheckpointManager(directory, components, save_every=2, keep_best=best)

    def train_one_epoch(epoch):
        model.train()
        if loader.batch == 0:
            meter.reset()
        for index, (images, labels) in loader.enumerate():
            update = epoch * len(loader) + index
            if update < 4:
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 * (update + 1) / 4
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            meter.update(loss.item(), len(images))
            manager.end_step(update + 1, loss=loss)
        return meter.sum / meter.count

    results = []
    with manager:
        manager.restore()
        for epoch in loader.epochs(5):
            mean = train_one_epoch(epoch)
            top1 = accuracy(ema.module, validation)
            scheduler.step(top1)
            results.append((epoch, mean, top1, optimizer.param_groups[0]["lr"]))
    return results


def train_fine_tuning(directory):
    """A loop for GLUE: accumulation with a rest at the end of an epoch, a most number of steps, no loader for it."""
    torch.manual_seed(42)
    accumulation, most = 4, 7
    loader = safeckpt.ResumableLoader(DataLoader(digits(0, 160), batch_size=16, shuffle=True))
    validation = DataLoader(digits(160, 260), batch_size=50)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.01},
            {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
        ],
        lr=5e-3,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / most))
    sums = {"loss": 0.0}
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "sums": sums}
    results = []
    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        manager.restore()
        for _ in loader.epochs(3):
            model.train()
            if loader.batch == 0:
                sums["loss"] = 0.0
            for step, (x, y) in loader.enumerate():
                if manager.step >= most:
                    break
                loss = nn.functional.cross_entropy(model(x), y)
                sums["loss"] += loss.item()
                (loss / accumulation).backward()
                if (step + 1) % accumulation == 0 or step == len(loader) - 1:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    manager.end_step(manager.step + 1, loss=loss)
            results.append((sums["loss"] / len(loader), accuracy(model, validation)))
    return results


def train_averaging_at_the_end(directory):
    """Stochastic weight averaging: a second schedule and an average from the third epoch on, batch norm at the end."""
    torch.manual_seed(0)
    loader = safeckpt.ResumableLoader(DataLoader(digits(0, 160), batch_size=32, shuffle=True))
    validation = DataLoader(digits(160, 260), batch_size=50)
    model = convolutional()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = SWALR(optimizer, anneal_strategy="linear", anneal_epochs=2, swa_lr=0.05)
    components = {
        "model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler,
        "swa_scheduler": swa_scheduler, "loader": loader,
    }  # fmt: skip
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for epoch in loader.epochs(5):
            model.train()
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
            if epoch >= 2:
                average.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()
    update_bn(loader, average)
    return accuracy(average, validation)


class Contrast(nn.Module):
    """Momentum contrast: an encoder, its moving average, and a queue of keys in a buffer."""

    def __init__(self, size=64, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.query = nn.Sequential(convolutional(), nn.ReLU(), nn.Linear(10, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, size), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, a, b):
        q = nn.functional.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * self.momentum + theirs.data * (1 - self.momentum)
            order = torch.randperm(len(b))
            k = nn.functional.normalize(self.key(b[order]), dim=1)[order.argsort()]
        positive = (q * k).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], dim=1) / 0.2
        start = int(self.place)
        self.queue[:, start : start + len(k)] = k.T
        self.place[0] = (start + len(k)) % self.queue.shape[1]
        return nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


class TwoCrops(Dataset):
    def __init__(self):
        self.digits = Digits(160)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return self.digits[index][0], self.digits[index][0]


def train_contrastive(directory):
    """Two crops of each image, a queue of keys, a rate that is set at the head of each epoch."""
    torch.manual_seed(0)
    loader = safeckpt.ResumableLoader(DataLoader(TwoCrops(), batch_size=32, shuffle=True, drop_last=True))
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    components = {"model": model, "optimizer": optimizer, "loader": loader}
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        manager.restore()
        for epoch in loader.epochs(4):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 4))
            for a, b in loader:
                loss = model(a, b)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
    return model.queue.sum().item()


def train_distilling(directory):
    """A frozen teacher in eval mode, whose softened answers a student learns, with a projection of its own."""
    torch.manual_seed(3)
    teacher = convolutional().eval().requires_grad_(False)  # stands for one that was trained
    torch.manual_seed(0)
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
    projection = nn.Linear(10, 10)
    loader = safeckpt.ResumableLoader(DataLoader(Digits(160), batch_size=32, shuffle=True))
    optimizer = torch.optim.Adam([*student.parameters(), *projection.parameters()], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
    components = {
        "student": student, "projection": projection, "optimizer": optimizer, "scheduler": scheduler, "loader": loader,
    }  # fmt: skip
    with safeckpt.CheckpointManager(directory, components, save_every=4) as manager:
        manager.restore()
        for _ in loader.epochs(4):
            for x, y in loader:
                with torch.no_grad():
                    soft = (teacher(x) / 4).softmax(dim=1)
                out = student(x)
                loss = 0.5 * nn.functional.cross_entropy(out, y)
                loss = loss + 8 * nn.functional.kl_div(
                    (projection(out) / 4).log_softmax(dim=1), soft, reduction="batchmean"
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                manager.end_step(manager.step + 1, loss=loss)


class Curriculum(Dataset):
    """Digits of more classes with every epoch, the easy ones first."""

    def __init__(self):
        self.images, self.labels = digits(0, 200).tensors
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.rows = (self.labels < 4 + 2 * epoch).nonzero().flatten()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return self.images[row] + 0.05 * torch.randn(1, 8, 8), self.labels[row]


def train_by_curriculum(directory):
    """A dataset that is larger in every epoch."""
    torch.manual_seed(0)
    loader = safeckpt.ResumableLoader(DataLoader(Curriculum(), batch_size=16, shuffle=True))
    model = convolutional()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    components = {"model": model, "optimizer": optimizer, "loader": loader}
    lengths = []
    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        manager.restore()
        for _ in loader.epochs(3):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)
            lengths.append(len(loader))
    return lengths
