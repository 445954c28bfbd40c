"""Side effects of a script, kept from happening in a dry run: what it saves, logs and pushes goes nowhere.

The files that it writes are another matter, see :mod:`vram_guard.forks.side_effects`.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

from vram_guard.language import _
from vram_guard.limits import ENDS_OF_INPUT
from vram_guard_accelerate._patching import wrap

#: Methods of the Accelerator that write.
ACCELERATOR = ("save", "save_state", "save_model", "init_trackers", "log", "end_training")

#: Methods of the Hub's API that change something there.
HUB = (
    *("create_repo", "delete_repo", "create_commit", "create_branch", "create_tag", "upload_file", "upload_folder"),
    *("upload_large_folder", "delete_file", "delete_folder", "update_repo_settings", "run_as_future"),
)

#: Methods with which the classes of Transformers, Diffusers and PEFT save themselves, some of them not in Python.
SAVING = ("save_pretrained", "save_config", "save_lora_weights", "save_lora_adapter", "save_attn_procs")

#: What safetensors' functions call, in any module that has imported them -> a substitute for the result.
SAFETENSORS: dict[str, Any] = {
    "serialize_file": None,
    "serialize": b"",
    "_flatten": {},
    "_flatten_as_ptr": {},
    "_find_shared_tensors": [],
    "_remove_duplicate_names": {},
}

#: Trackers that scripts call by themselves.
SILENT_ENVIRONMENT = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:///dev/null",
    "CLEARML_OFFLINE_MODE": "1",
    "TQDM_DISABLE": "1",
}


def discard_library_writes() -> None:
    """Before the script starts: the Accelerator, the Hub and models write nothing."""
    from accelerate import Accelerator
    from huggingface_hub import HfApi

    for owner, names in ((Accelerator, ACCELERATOR), (HfApi, HUB)):
        for name in names:
            wrap(owner, name, _nothing, optional=True)
    for owner in (HfApi, sys.modules["huggingface_hub"]):
        wrap(owner, "create_repo", _made_repository, optional=True)


def discard_saving() -> None:
    """From ``prepare`` on: nothing is made of tensors that have no values, as those of a symbolic model."""
    import torch

    wrap(torch, "save", _nothing)
    for library in ("safetensors.torch", "safetensors.numpy"):
        for name, answer in SAFETENSORS.items():
            wrap(sys.modules.get(library), name, partial(_nothing, answer=answer), optional=True)
    for cls in _classes():
        for name in SAVING:
            if name in vars(cls):
                wrap(cls, name, _nothing)


def _classes() -> set[type]:
    """All that there are by now."""
    found, waiting = set(), [object]
    while waiting:
        below = [cls for cls in type.__subclasses__(waiting.pop()) if cls not in found]
        found.update(below)
        waiting += below
    return found


def close_stdin(stopped: Callable[[str], NoReturn]) -> None:
    """No user is there to answer: a script that asks is stopped with an error that says why."""

    def asked(*_args: Any, **_kwargs: Any) -> NoReturn:
        stopped(_("it reads from standard input, where nobody answers during a dry run"))

    stand_in: Any = SimpleNamespace(
        **dict.fromkeys(("read", "readline", "readlines", "__iter__", "__next__"), asked),
        isatty=lambda: False,
        fileno=asked,
        close=lambda: None,
        encoding="utf-8",
        errors="strict",
    )
    sys.stdin = stand_in
    builtins.input = asked
    _open_terminal()


def _open_terminal() -> None:
    """Give the script and its programs a terminal whose size they may ask for; who reads from it finds its end."""
    import fcntl
    import struct
    import termios

    size = shutil.get_terminal_size()
    with contextlib.suppress(OSError):  # the system has none to give: it is as without a terminal
        held, terminal = os.openpty()  # held open until the process ends
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", size.lines, size.columns, 0, 0))
        os.write(held, termios.tcgetattr(terminal)[6][termios.VEOF] * ENDS_OF_INPUT)
        os.dup2(terminal, 0)
        os.close(terminal)
    wrap(os, "get_terminal_size", lambda original, *at: _size_of(original, at, size))


def _size_of(
    original: Callable[..., os.terminal_size], at: tuple[Any, ...], usual: os.terminal_size
) -> os.terminal_size:
    """The size of a terminal; output goes to a file here, which has none."""
    try:
        return original(*at)
    except OSError:
        return usual


def _nothing(_original: Any, *_args: Any, answer: Any = None, **_kwargs: Any) -> Any:
    """In place of a function: does nothing."""
    return answer


def _made_repository(_original: Any, *args: Any, **kwargs: Any) -> Any:
    name = kwargs.get("repo_id") or next((value for value in args if isinstance(value, str)), "repository")
    return SimpleNamespace(repo_id=name, url=name, __str__=lambda: name)
