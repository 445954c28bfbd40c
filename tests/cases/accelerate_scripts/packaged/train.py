"""``python -m packaged.train OUT``."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from .network import Network


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 400, 64))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    for (x,) in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        found = {"processes": accelerator.num_processes, "precision": accelerator.mixed_precision}
        weights = {name: value.detach() for name, value in accelerator.unwrap_model(model).state_dict().items()}
        torch.save({**found, "package": __package__, "weights": [weights]}, sys.argv[1])


if __name__ == "__main__":
    main()
