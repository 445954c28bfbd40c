"""A script whose texts are short, but for one."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

LENGTHS = [8] * 150
LENGTHS[97] = 2000


class Texts(Dataset):
    lengths = LENGTHS

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.ones(LENGTHS[index], dtype=torch.long)


def main():
    accelerator = Accelerator()
    model = nn.Sequential(nn.Embedding(4, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, collate_fn=lambda batch: pad_sequence(batch, True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()


main()
