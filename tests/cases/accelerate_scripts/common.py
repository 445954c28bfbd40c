"""What the scripts share: a small network whose activations outweigh its weights, data, and what tests compare."""

import atexit
import os
import sys

import torch
from torch import nn

from vram_guard.watch.process_groups import end_process_groups


def end_process_groups_at_exit() -> None:
    """End a rank that was launched as written without SIGABRT after its work (PyTorch's issue 190489).

    A launch that changes the script does this itself, and is left to it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "vram_guard_accelerate._run_script" not in sys.modules:
        atexit.register(end_process_groups)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean(1))


class WithLoss(nn.Module):
    """Returns its own loss, as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, pixels, labels=None):
        logits = self.network(pixels)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def dataset(samples: int, positions: int = 256):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, positions, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 10, (samples,), generator=generator))


def write(accelerator, path, **facts) -> None:
    """What a run came to, from the first process; and that the script came to its end."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        how = {"processes": accelerator.num_processes, "precision": accelerator.mixed_precision}
        torch.save({**how, "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), **facts}, path)


def weights(accelerator, *models):
    return [
        {name: value.detach().clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
        for model in models
    ]
