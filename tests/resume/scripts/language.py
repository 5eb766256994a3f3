"""Language models: nanoGPT's loop with a batch fetched ahead, and low-rank adapters on a frozen base."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt

VOCABULARY = 32
BLOCK = 16


def tokens(count=2000):
    """Text that has something to learn: each token follows from the two before it, with noise."""
    generator = torch.Generator().manual_seed(5)
    text = torch.zeros(count, dtype=torch.long)
    noise = torch.randint(0, 3, (count,), generator=generator)
    for place in range(2, count):
        text[place] = (3 * text[place - 1] + text[place - 2] + noise[place]) % VOCABULARY
    return text


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.inner(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1 * self.training, is_causal=True)
        return self.outer(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A decoder whose embedding and output share their weights."""

    def __init__(self, width=16, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, targets):
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_nano_gpt(directory):
    """Random blocks of a long text, four micro-batches a step, the next batch fetched during the backward pass."""
    torch.manual_seed(1337)
    steps, accumulation, warmup, every = 24, 4, 4, 6
    text = tokens()
    splits = {"train": text[:1600], "val": text[1600:]}
    model = Gpt()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )

    def get_batch(split):
        data = splits[split]
        starts = torch.randint(len(data) - BLOCK, (8,))
        return (
            torch.stack([data[start : start + BLOCK] for start in starts]),
            torch.stack([data[start + 1 : start + 1 + BLOCK] for start in starts]),
        )

    def rate(step):
        if step < warmup:
            return 1e-2 * (step + 1) / warmup
        return 1e-3 + 0.5 * (1e-2 - 1e-3) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        means = {split: torch.stack([model(*get_batch(split)) for _ in range(2)]).mean().item() for split in splits}
        model.train()
        return means

    ahead = {"X": None, "Y": None}
    best = {"val": float("inf")}
    components = {"model": model, "optimizer": optimizer, "ahead": ahead, "best": best}
    estimates = []
    with safeckpt.CheckpointManager(directory, components, save_every=3) as manager:
        if manager.restore() is None:
            ahead["X"], ahead["Y"] = get_batch("train")
        while manager.step < steps:
            for group in optimizer.param_groups:
                group["lr"] = rate(manager.step)
            if manager.step % every == 0:
                estimate = estimate_loss()
                best["val"] = min(best["val"], estimate["val"])
                estimates.append((manager.step, estimate))
            for _ in range(accumulation):
                loss = model(ahead["X"], ahead["Y"]) / accumulation
                ahead["X"], ahead["Y"] = get_batch("train")
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            manager.end_step(manager.step + 1, loss=loss.item() * accumulation)
    return estimates


class LowRank(nn.Module):
    """A frozen linear layer with an update of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x)))


class Adapted(nn.Module):
    """A pretrained model with adapters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)  # stands for the pretrained weights
        self.model = Gpt()
        self.model.requires_grad_(False)
        for block in self.model.blocks:
            block.attention.inner = LowRank(block.attention.inner)
            block.attention.outer = LowRank(block.attention.outer)

    def forward(self, x, targets):
        return self.model(x, targets)


class AdaptersOnly(Adapted):
    """Saves the adapters without the base, as PEFT's models do."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if ".up." not in name and ".down." not in name]:
            del state[name]
        return state


def _adapt(directory, model):
    torch.manual_seed(1)
    text = tokens(600)
    blocks = text[: len(text) // (BLOCK + 1) * (BLOCK + 1)].view(-1, BLOCK + 1)
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(blocks), batch_size=6, shuffle=True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=18)
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        manager.restore()
        for _ in loader.epochs(3):
            for (block,) in loader:
                loss = model(block[:, :-1], block[:, 1:])
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                manager.end_step(manager.step + 1, loss=loss)
    return [parameter.sum().item() for parameter in model.parameters()]


def train_low_rank(directory):
    """Adapters are trained, and the frozen base is in the checkpoint."""
    return _adapt(directory, Adapted())


def train_low_rank_alone(directory):
    """Adapters are trained, and the frozen base is not in the checkpoint."""
    return _adapt(directory, AdaptersOnly())
