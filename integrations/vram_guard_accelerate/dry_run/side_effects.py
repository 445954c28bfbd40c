"""Side effects of a script, kept from happening in a dry run: what it writes, saves, logs and pushes goes nowhere."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from vram_guard.forks.side_effects import CHANGES
from vram_guard.language import _
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

#: Variables that move a cache of Hugging Face's libraries away from HF_HOME.
CACHES = ("HF_DATASETS_CACHE", "HF_EVALUATE_CACHE", "HF_METRICS_CACHE", "HF_MODULES_CACHE")

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


def discard_file_writes() -> None:
    """From ``prepare`` on: what is opened for writing is thrown away, and no file is made, moved or removed.

    But for the caches of Hugging Face's libraries, which read back what they wrote: metrics, data sets that are mapped.
    """
    import torch

    in_cache = below_caches()
    for module, names in CHANGES.items():
        for name in names:
            wrap(module, name, partial(_nothing_outside, in_cache))
    builtins.open = io.open = _opened(io.open, in_cache)
    wrap(pathlib.Path, "touch", _nothing)
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps the functions of `os` and `io` there
    if accessor is not None:
        accessor.open = staticmethod(io.open)
        for name in CHANGES[os]:
            if hasattr(accessor, name):
                setattr(accessor, name, staticmethod(getattr(os, name)))
    wrap(torch, "save", _nothing)
    for name in ("save", "savez", "savez_compressed", "savetxt"):
        wrap(sys.modules.get("numpy"), name, _nothing, optional="numpy" not in sys.modules)
    for library in ("safetensors.torch", "safetensors.numpy"):
        for name, answer in SAFETENSORS.items():
            wrap(sys.modules.get(library), name, partial(_nothing, answer=answer), optional=True)
    for cls in _classes():
        for name in SAVING:
            if name in vars(cls):
                wrap(cls, name, _nothing)


def below_caches() -> Callable[[Any], bool]:
    """A function that is true for paths in the caches of Hugging Face's libraries."""
    from huggingface_hub import constants

    named = (constants.HF_HOME, *(os.environ.get(name, "") for name in CACHES))
    folders = tuple(os.path.realpath(name) + os.sep for name in named if name)

    def is_below(path: Any) -> bool:
        try:
            return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(folders)
        except (TypeError, ValueError):
            return False

    return is_below


def for_programs() -> tuple[Path, ...]:
    """Where programs that a script starts before it trains may write: devices, caches, and temporary files."""
    from huggingface_hub import constants

    home = Path.home()
    caches = [os.environ.get("XDG_CACHE_HOME") or home / ".cache", home / ".triton", constants.HF_HOME]
    named = [os.environ[name] for name in CACHES if os.environ.get(name)]
    temporary = Path(tempfile.gettempdir()).resolve()
    own = [] if Path.cwd().is_relative_to(temporary) else [temporary]  # the user works there
    return tuple(map(Path, ("/dev", "/proc", *caches, *named, *own)))


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


def _nothing(_original: Any, *_args: Any, answer: Any = None, **_kwargs: Any) -> Any:
    """In place of a function: does nothing."""
    return answer


def _nothing_outside(allowed: Callable[[Any], bool], original: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of a function: does nothing, except where every path that it is given is allowed."""
    paths = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, bytes, os.PathLike))]
    inside = kwargs.get("dir_fd") is not None  # a step of rmtree, which is allowed itself
    return original(*args, **kwargs) if inside or (paths and all(map(allowed, paths))) else None


def _made_repository(_original: Any, *args: Any, **kwargs: Any) -> Any:
    name = kwargs.get("repo_id") or next((value for value in args if isinstance(value, str)), "repository")
    return SimpleNamespace(repo_id=name, url=name, __str__=lambda: name)


def _opened(original: Callable[..., Any], allowed: Callable[[Any], bool]) -> Callable[..., Any]:
    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        writes = isinstance(mode, str) and any(sign in mode for sign in "wax+")
        if writes and not (isinstance(file, int) or allowed(file)):
            return original(os.devnull, "wb" if "b" in mode else "w", *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    return opened
