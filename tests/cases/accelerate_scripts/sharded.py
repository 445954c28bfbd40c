"""Loops over a model whose weights outweigh its activations, divided or not."""

import argparse
import os

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin, set_seed
from common import Block, end_process_groups_at_exit
from gloo import take_for_gpus, zero_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.blocks = nn.ModuleList(Block(512) for _ in range(3))
        self.last = nn.Linear(512, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def data(samples):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator))


def groups_of(block):
    """Whether FSDP2 frees this block's weights after its forward, and keeps them on the host; FSDP1's strategy."""
    if isinstance(block, FullyShardedDataParallel):
        return block.sharding_strategy.name
    group = block._get_fsdp_state()._fsdp_param_group
    return group.post_forward_mesh_info is not None, group.fsdp_params[0].offload_to_cpu


def whole_weights(accelerator, model):
    """A state dict; of FSDP1, torch's own ends real processes on the CPU with a segmentation fault."""
    if not isinstance(model, FullyShardedDataParallel) or "LOCAL_RANK" not in os.environ:
        return accelerator.get_state_dict(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: one.detach().clone() for name, one in (*model.named_parameters(), *model.named_buffers())}


def train(options, accelerator, model=None, before=None, clip=None):
    set_seed(accelerator.process_index if options.own_seed else 0)
    model = model or Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data(options.samples), batch_size=options.batch_size)
    kept = [] if before is None else before(model)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates, losses, norms = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = clip(accelerator, model, kept) if clip else None
                norms.append(0.0 if norm is None else float(norm))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = whole_weights(accelerator, model)
    divided = accelerator.is_fsdp2 or isinstance(model, FullyShardedDataParallel)
    if accelerator.is_main_process:
        variables = {name: value for name, value in os.environ.items() if "FSDP" in name}
        torch.save(
            {
                "weights": [{name: value.detach().clone() for name, value in weights.items()}],
                "rates": rates,
                "losses": losses,
                "norms": norms,
                "fsdp": accelerator.is_fsdp2,
                "kinds": sorted({type(parameter).__name__ for parameter in model.parameters()}),
                "held": sum(
                    parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
                    for parameter in model.parameters()
                ),
                "variables": variables,
                "groups": [groups_of(block) for block in model.blocks] if divided else [],
                "forwards": [
                    type(getattr(block, "_fsdp_wrapped_module", block).forward).__name__
                    for block in getattr(getattr(model, "module", model), "blocks", [])
                ],
                "processes": accelerator.num_processes,
                "precision": accelerator.mixed_precision,
                "zero": zero_of(accelerator),
            },
            options.out,
        )


def by_norm(accelerator, model, _kept):
    return accelerator.clip_grad_norm_(model.parameters(), 0.1)


def compiled(options):
    """Compiled by Accelerate: as a whole, or block by block."""
    plugin = TorchDynamoPlugin(backend=options.backend, use_regional_compilation=options.regions)
    handler = DistributedDataParallelKwargs(bucket_cap_mb=2)
    train(options, Accelerator(dynamo_plugin=plugin, kwargs_handlers=[handler]), clip=by_norm)


def clipping(options):
    train(options, Accelerator(), clip=by_norm)


def in_batches(options):
    """Its own options say how large a batch is, and how many make an optimizer step."""
    train(options, Accelerator(gradient_accumulation_steps=options.gradient_accumulation_steps))


def configured(options):
    """The script itself asks for FSDP."""
    from accelerate import FullyShardedDataParallelPlugin

    first = options.version == 1
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.version,
        sharding_strategy=options.strategy if first else None,
        reshard_after_forward=None if first else options.strategy == "FULL_SHARD",
        backward_prefetch="BACKWARD_PRE" if first else None,
        sync_module_states=options.from_first if first else None,
        use_orig_params=True if first else None,
        cpu_offload=options.on_host,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    steps = options.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=steps, fsdp_plugin=plugin)
    if not options.listed:
        train(options, accelerator, clip=by_norm)
        return

    def clip(accelerator, _model, listed):
        return accelerator.clip_grad_norm_(listed, 0.1)

    train(options, accelerator, before=lambda model: list(model.parameters()), clip=clip)


def two_models(options):
    accelerator = Accelerator()
    one, two = Wide(), Wide()
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    loader = DataLoader(data(options.samples), batch_size=options.batch_size)
    one, two, optimizer, loader = accelerator.prepare(one, two, optimizer, loader)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(one(x) + two(x), y))
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("--out")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--own_seed", action="store_true")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--regions", action="store_true")
    parser.add_argument("--version", type=int, default=2)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--from_first", action="store_true")
    parser.add_argument("--on_host", action="store_true")
    parser.add_argument("--listed", action="store_true", help="it clips what it listed before prepare")
    options = parser.parse_args()
    take_for_gpus()
    globals()[options.loop](options)


if __name__ == "__main__":
    end_process_groups_at_exit()
    main()
