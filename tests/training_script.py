"""A typical training program, in PyTorch alone. ``test_in_place.py`` runs it unchanged."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.value, self.spread, self.label, self.rate, self.topic, self.kind = (nn.Linear(32, 8) for _ in range(6))

    def forward(self, x):
        x = self.body(x)
        return self.value(x), self.spread(x), self.label(x), self.rate(x), self.topic(x), self.kind(x)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.huber = nn.HuberLoss(delta=0.5)
        self.gaussian = nn.GaussianNLLLoss(full=True)
        self.poisson = nn.PoissonNLLLoss()
        self.topic = nn.KLDivLoss(reduction="batchmean", log_target=True)
        self.label = nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.5, 2.0, 8))
        self.margin = nn.SoftMarginLoss()
        self.kind = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, 8), label_smoothing=0.1)
        self.likelihood = nn.NLLLoss(ignore_index=7)

    def forward(self, predicted, batch):
        value, spread, label, rate, topic, kind = predicted
        losses = [
            F.mse_loss(value, batch["value"]),
            F.l1_loss(input=value, target=batch["value"], reduction="sum") / value.numel(),
            F.smooth_l1_loss(value, batch["value"], reduction="none", beta=0.5).mean(),
            F.binary_cross_entropy(torch.sigmoid(label), batch["label"], batch["importance"]),
            F.margin_ranking_loss(value[:, :4], value[:, 4:], torch.ones_like(value[:, 4:]), margin=0.1),
            self.huber(value, batch["value"]),
            self.gaussian(value, batch["value"], F.softplus(spread)),
            self.poisson(rate, batch["count"]),
            self.topic(F.log_softmax(topic, -1), batch["topic"]),
            self.label(label, batch["label"]),
            self.margin(label, 2 * batch["label"] - 1),
            self.kind(kind, batch["kind"]),
            self.likelihood(F.log_softmax(kind, -1), batch["kind"]),
            F.cross_entropy(topic, batch["topic"].exp()),
            F.cross_entropy(kind, batch["kind"], reduction="none").mean(),
        ]
        return sum(losses), len(losses)


model, criterion = Model().to(device), Criterion().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history, calls = [], 0
for _ in range(STEPS):
    x = torch.randn(24, 16).to(device)
    batch = {
        "value": x[:, :8].sin() + x[:, 8:],
        "label": (x[:, :8] > 0).float(),
        "count": torch.poisson(x[:, 8:].abs().cpu()).to(device),
        "topic": F.log_softmax(x[:, :8], -1),
        "kind": x[:, :8].argmax(1),
        "importance": torch.rand(8).to(device),
    }
    optimizer.zero_grad(set_to_none=True)
    loss, count = criterion(model(x), batch)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    calls += count
