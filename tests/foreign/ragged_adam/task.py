"""ragged_adam: two layers, Adam, and an epoch whose last batch is smaller."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def digits():
    data = load_digits()
    return TensorDataset(torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target))


def train_one_epoch(model, dataset, batch_size):
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)  # the last batch holds what is left
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    x, y = dataset.tensors
    return (model(x).argmax(1) == y).float().mean().item()
