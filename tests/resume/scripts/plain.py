"""Scripts without batches: L-BFGS on sequences, and a graph network."""

import numpy as np
import torch
from torch import nn

import safeckpt


class Sequence(nn.Module):
    """Two LSTM cells that go through a sequence, and on from its end."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)])
        self.linear = nn.Linear(8, 1)

    def forward(self, x, future=0):
        states = [(torch.zeros(len(x), 8, dtype=x.dtype), torch.zeros(len(x), 8, dtype=x.dtype)) for _ in self.cells]
        outputs = []
        for place in range(x.shape[1] + future):
            hidden = x[:, place : place + 1] if place < x.shape[1] else outputs[-1]
            for index, cell in enumerate(self.cells):
                states[index] = cell(hidden, states[index])
                hidden = states[index][0]
            outputs.append(self.linear(hidden))
        return torch.cat(outputs, dim=1)


def train_sines(directory):
    """L-BFGS in double precision, which calls a closure several times a step, and a prediction after each."""
    np.random.seed(0)
    torch.manual_seed(0)
    starts = np.random.randint(-40, 40, 8).reshape(8, 1)
    waves = torch.from_numpy(np.sin((np.arange(20) + starts) / 4.0))
    model = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, history_size=5)
    predictions = []
    with safeckpt.CheckpointManager(directory, {"model": model, "optimizer": optimizer}, save_every=2) as manager:
        manager.restore()
        for step in range(manager.step + 1, 11):

            def closure():
                optimizer.zero_grad()
                loss = criterion(model(waves[2:, :-1]), waves[2:, 1:])
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            with torch.no_grad():
                predictions.append(model(waves[:2, :-1], future=5).sum().item())
            manager.end_step(step, loss=loss)
    return predictions


class GraphConvolution(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(wide, out))
        self.bias = nn.Parameter(torch.zeros(out))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, edges):
        return torch.sparse.mm(edges, x @ self.weight) + self.bias


class Gcn(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.first = GraphConvolution(features, 8)
        self.second = GraphConvolution(8, classes)

    def forward(self, x, edges):
        x = nn.functional.dropout(self.first(x, edges).relu(), 0.5, self.training)
        return self.second(x, edges)


def _normalized(pairs, nodes):
    pairs = torch.cat([pairs, pairs.flip(0), torch.arange(nodes).expand(2, -1)], dim=1)
    degree = torch.zeros(nodes).index_add_(0, pairs[0], torch.ones(pairs.shape[1]))
    weights = (degree[pairs[0]] * degree[pairs[1]]).rsqrt()
    return torch.sparse_coo_tensor(pairs, weights, (nodes, nodes), check_invariants=True).coalesce()


def train_graph(directory):
    """Nodes of a graph, all at once; edges are dropped with a generator of the script's own; the best is remembered."""
    torch.manual_seed(42)
    nodes, classes = 60, 3
    labels = torch.arange(nodes) % classes
    x = nn.functional.one_hot(labels, classes) + 0.8 * torch.randn(nodes, classes)
    pairs = torch.stack([torch.randint(nodes, (240,)), torch.randint(nodes, (240,))])
    pairs = pairs[:, (labels[pairs[0]] == labels[pairs[1]]) | (torch.rand(240) < 0.2)]
    splits = dict(zip(("train", "val", "test"), torch.randperm(nodes).split(20), strict=True))
    model = Gcn(classes, classes)
    optimizer = torch.optim.Adam(
        [{"params": model.first.parameters(), "weight_decay": 5e-4}, {"params": model.second.parameters()}], lr=0.02
    )
    chance = torch.Generator().manual_seed(7)
    best = {"val": 0.0, "test": 0.0, "epoch": 0}

    @torch.no_grad()
    def test():
        model.eval()
        right = model(x, _normalized(pairs, nodes)).argmax(dim=1) == labels
        return {name: right[rows].float().mean().item() for name, rows in splits.items()}

    components = {"model": model, "optimizer": optimizer, "chance": chance, "best": best}
    with safeckpt.CheckpointManager(directory, components, save_every=5) as manager:
        manager.restore()
        for epoch in range(manager.step + 1, 31):
            model.train()
            kept = pairs[:, torch.rand(pairs.shape[1], generator=chance) > 0.2]
            optimizer.zero_grad()
            out = model(x, _normalized(kept, nodes))
            loss = nn.functional.cross_entropy(out[splits["train"]], labels[splits["train"]])
            loss.backward()
            optimizer.step()
            right = test()
            if right["val"] > best["val"]:
                best.update(val=right["val"], test=right["test"], epoch=epoch)
            manager.end_step(epoch, loss=loss)
    return best
