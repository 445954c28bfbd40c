"""A sharded model saves itself whole, where a script saves it as it would save any other.

Under FSDP2, ``model.state_dict()`` holds shards, and ``save_pretrained`` cannot write them. In one process a shard is
the whole tensor: whoever asks from outside torch and Accelerate gets that. In several, the shards have to be brought
together by all of them at once: all of them call ``save_pretrained(..., is_main_process=...)``, where it can be done.
What the first process does alone cannot be helped; the script is read for that beforehand.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

#: Who knows what shards are.
_KNOWING = ("torch.", "accelerate.", "vram_guard")


def save_whole(accelerator: Any, model: nn.Module) -> None:
    """From now on the sharded model is saved whole.

    Args:
        accelerator: which prepared the model.
        model: sharded by FSDP2.
    """
    from torch import distributed

    if distributed.get_world_size() == 1:
        model.register_state_dict_post_hook(_whole)
        return
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if "is_main_process" in kwargs and kwargs.get("state_dict") is None:
            kwargs["state_dict"] = accelerator.get_state_dict(model)
        return original(*args, **kwargs)

    vars(model)["save_pretrained"] = save_pretrained


def _whole(_model: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    """After ``state_dict()``, in one process: its own shards are all there is."""
    if _asked_by_library(sys._getframe(1)):  # noqa: SLF001 - who asks is the question
        return
    for name, value in state.items():
        if hasattr(value, "full_tensor"):
            state[name] = value.to_local()


def _asked_by_library(frame: Any) -> bool:
    """True if ``Module.state_dict`` was called by torch's or Accelerate's own code."""
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_KNOWING)


def lines_that_save_shards(script: str) -> list[int]:
    """Lines of a script that would write shards, or hang, where there are several processes.

    Those are ``save_pretrained`` with neither ``state_dict`` nor ``is_main_process``, and ``state_dict()`` itself; not
    all of them speak of the sharded model.

    Args:
        script: the file.
    """
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return sorted(set(_lines(tree)))


def _lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if node.func.attr == "save_pretrained" and not given & {"state_dict", "is_main_process"}:
            yield node.lineno
        if node.func.attr == "state_dict" and not node.args and not node.keywords:
            yield node.lineno
