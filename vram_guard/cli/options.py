"""The options that several commands offer: each has its flags, its values and its help here, and nowhere else."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from vram_guard.budget import Budget
from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked


def listed(words: str | Iterable[str] | None) -> list[str]:
    """``a,b`` as a list, or the words of an option of several values; none where it is not given."""
    given = [words] if isinstance(words, str) else words or ()
    return [name.strip() for word in given for name in word.split(",") if name.strip()]


def whole_number(name: str, text: str) -> int:
    """A whole number from an option.

    Raises:
        InvalidInputError: it is none, or below 1.
    """
    option = "--" + name.replace("_", "-")
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 30):
        raise InvalidInputError(
            _("{option} must be a whole number of at least 1, not {text}", option=option, text=repr(text)[:40])
        )
    from vram_guard.step import checked_count

    return checked_count(option, int(text))


class _Option(NamedTuple):
    """Without a metavar: a switch. Of choices the first is the default."""

    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    several: bool = False
    """With commas, or given again."""
    bare: bool = False
    """It may stand without a value too."""


_OPTIONS: Final[dict[str, _Option]] = {
    "allow": _Option("A,B", marked("what a plan may change where it does not fit"), several=True),
    "batch": _Option("N", marked("batch size")),
    "budget": _Option("AMOUNT", marked('memory that PyTorch may reserve, such as "24GiB"')),
    "bytes-per-element": _Option("N", marked("4 in float32, 2 in half precision")),
    "checkpointing": _Option("", marked("the model's own gradient checkpointing is on (transformers, diffusers)")),
    "config": _Option("FILE", marked("the training config, YAML")),
    "cudnn": _Option("FILE", marked("libcudnn.so.9 to ask for workspaces; ask: the installed one; off: none")),
    "device": _Option("N", marked("CUDA device of this machine whose free memory counts (0, cuda:1)")),
    "dtype": _Option(
        "TYPE", marked("type of the weights: float32, float16, bfloat16 (default: as stored, or as a config.json says)")
    ),
    "frozen": _Option("NAMES", marked("frozen components; one that is trained too is held twice"), several=True),
    "gpu": _Option("NAME", marked('GPU by name, such as "RTX 4090" (default: the GPU of this machine)')),
    "gpu-memory": _Option("SIZE", marked('memory of the GPU: 24 is 24 GB, "24GiB" or "24G", "80GB"')),
    "height": _Option("N", marked("height of the input")),
    "hidden-dim": _Option("N", marked("channels between the layers")),
    "input": _Option(
        "SHAPE", marked("a plain model's input without the batch: 3x224x224; 512:int64 for tokens; several with commas")
    ),
    "json": _Option("", marked("answer as JSON")),
    "lora": _Option(
        "A=1,B=2", marked("train LoRA alone, built by peft: r=16,alpha=32,target=q_proj+v_proj"), bare=True
    ),
    "lr-rule": _Option(
        "", marked("rule that scales learning rates with the batch"), ("linear", "sqrt", "none", "auto")
    ),
    "margin": _Option("SHARE", marked("share of the budget to leave free")),
    "model": _Option(
        "MODEL",
        marked(
            "module:function of a step or a model, a config.json, a published architecture such as llama-3-8b, or a "
            "model of transformers, timm or torchvision by its name"
        ),
    ),
    "model-path": _Option("DIR", marked("local model folder of diffusers or transformers")),
    "num-frames": _Option("N", marked("frames of one sample as the model receives it")),
    "optimizer": _Option("NAME", marked("adamw, adamw-8bit (bitsandbytes) or sgd (default: adamw)")),
    "precision": _Option("P", marked("32-true, bf16-mixed (or bf16), 16-mixed (or fp16), bf16-true, 16-true")),
    "qlora": _Option("A=1,B=2", marked("LoRA, and the weights beside it in 4 bits by bitsandbytes"), bare=True),
    "num-layers": _Option("N", marked("number of layers")),
    "quick": _Option("", marked("the rule of thumb alone: no model is built")),
    "seq-length": _Option(
        "N", marked("time steps or tokens (default: 1; of a text model by name its context, 512 at most)")
    ),
    "threshold": _Option("SHARE", marked("share of the GPU for activations (default: 0.7; cautious: 0.6)")),
    "train": _Option("NAME", marked("the component to train")),
    "verbose": _Option("", marked("print the whole report: tables, reasons, alternatives")),
    "width": _Option("N", marked("width of the input")),
}

#: Other spellings of an option; it is known to the program by its first.
_ALIASES: Final = {
    "batch": ("--batch-size",),
    "device": ("--device-id",),
    "model": ("--step",),
    "verbose": ("-v",),
}

#: How large a sample is, and how a model that is built by its name is trained.
SIZES: Final = ("height", "width", "num-frames", "seq-length", "input")
WEIGHTS: Final = ("precision", "dtype", "lora", "qlora", "checkpointing", "optimizer")
#: What the rule of thumb asks for, and the model of which it is asked.
NETWORK: Final = (*SIZES, "hidden-dim", "num-layers", "bytes-per-element", "threshold", "model", *WEIGHTS, "quick")
#: What is asked about a folder with a model.
FOLDER: Final = ("model-path", "train", "frozen")
#: How much memory there is: a card's, PyTorch's part, what is free here; and the share to leave free.
DEVICE: Final = ("gpu", "budget", "gpu-memory", "device", "margin")


def add_options(parser: Any, *names: str, **settings: Any) -> None:
    """Add options of this table to a parser or a group of one.

    Args:
        parser: of a command.
        names: of the options, without dashes.
        settings: of argparse's ``add_argument`` for all of them, such as ``type`` or ``required``.
    """
    for name in names:
        option = _OPTIONS[name]
        kind: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {"action": "store_true"}
        if option.choices:
            kind = {"choices": option.choices, "default": option.choices[0]}
        if option.several:
            kind |= {"action": "list"}
        if option.bare:
            kind |= {"nargs": "?", "const": ""}
        flags = (f"--{name}", *_ALIASES.get(name, ()))
        parser.add_argument(*flags, **{"help": _(option.help), **kind, **settings})


def add_config(parser: Any, said: str = "") -> None:
    """Add a config that is named either way: ``CONFIG`` or ``--config FILE``.

    Args:
        parser: of a command.
        said: the help of ``CONFIG``; "": that of ``--config``.
    """
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", default=argparse.SUPPRESS, help=said or _(_OPTIONS["config"].help)
    )
    add_options(parser, "config")


def asked_budget(options: argparse.Namespace, **amounts: Any) -> Budget:
    """What PyTorch may use, by the options :data:`DEVICE`.

    Args:
        options: of a command.
        amounts: in their place where given: ``budget``, ``gpu``, ``gpu_memory``.

    Raises:
        InvalidInputError, NoDeviceError, DeviceQueryError: as :meth:`vram_guard.Budget.resolve`.
    """
    given = amounts or {"budget": options.budget, "gpu": options.gpu, "gpu_memory": options.gpu_memory}
    device = options.device
    which = int(device) if device is not None and device.isdigit() and device.isascii() else device
    return Budget.resolve(**given, margin=options.margin, device=which)
