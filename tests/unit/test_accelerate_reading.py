"""What is read of a script's launch, in this process: nothing is followed here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("FSDP2 is public since torch 2.6", allow_module_level=True)

from torch import nn  # noqa: E402 - what is tested has to be there

from vram_guard_accelerate._settings import LaunchSettings  # noqa: E402
from vram_guard_accelerate._sharding_change import ShardingChange  # noqa: E402
from vram_guard_accelerate.planning import prediction  # noqa: E402
from vram_guard_accelerate.relaunch.candidates import RelaunchCandidates  # noqa: E402
from vram_guard_accelerate.relaunch.divisible import why_not_divided  # noqa: E402

# --- the dry run, seen from outside --------------------------------------------------------------------------------


def test_a_dry_run_that_ended_without_an_answer_says_how() -> None:
    assert prediction._how_it_ended(-9) == "the dry run of the script was killed by signal 9"
    assert prediction._how_it_ended(3) == "the dry run of the script ended with exit code 3"
    assert prediction._how_it_ended(0) == "the dry run of the script ended with exit code 0"


def test_a_dry_run_is_no_rank_and_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OF_THE_USER", "kept")
    found = prediction._environment({"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "8"})
    assert not {"RANK", "WORLD_SIZE"} & found.keys()
    assert (found["OF_THE_USER"], found["CUDA_VISIBLE_DEVICES"], found["ACCELERATE_USE_CPU"]) == ("kept", "", "False")
    assert found[prediction.ON_CPU] == "true"
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert prediction._environment({})[prediction.ON_CPU] == "False"


def test_what_a_script_prints_has_a_file_in_any_case(tmp_path: Path) -> None:
    log = prediction._log_beside(tmp_path / "launches" / "key.json")
    assert log == tmp_path / "launches" / "key.log"
    assert log.read_text() == ""
    (tmp_path / "file").write_text("")
    for remembered in (None, tmp_path / "file" / "key.json"):
        other = prediction._log_beside(remembered)
        assert other.is_file()
        assert other.name.startswith("vram-guard-")
        other.unlink()


# --- other launches ------------------------------------------------------------------------------------------------


def first(model: nn.Module | None = None, **settings: Any) -> Any:
    """A script at its first batch."""
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) if model is None else model
    script = {"reads_precision": False, "by_trainer": False, "precision_option": "", "precision_given": False}
    script |= {name: settings.pop(name) for name in [*settings] if name in script}
    shape = SimpleNamespace(ranks=settings.pop("ranks", 2), capability=settings.pop("capability", (8, 0)))
    given = {"root": root, "models": [root], "compiled": False, "precision": "32-true", "accelerator": None,
             "fsdp_plugin": None, "engine": None, "sharded": False, **settings}  # fmt: skip
    return SimpleNamespace(script=SimpleNamespace(**script), shape=shape, **given)


def handler(**settings: Any) -> Any:
    return SimpleNamespace(ddp_handler=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("settings", "advances", "why"),
    [
        ({}, (), ""),
        ({"models": [1, 2]}, (), "takes one model, and the script prepares 2"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, (), "this one is not trained"),
        ({"compiled": True}, (), "torch.compile compiles as a whole"),
        ({"accelerator": handler(comm_hook=SimpleNamespace(value="fp16"))}, (), "comm_hook"),
        ({"accelerator": handler(comm_hook=SimpleNamespace(value="no"))}, (), ""),
        ({"accelerator": handler(comm_hook=None)}, (), ""),
        ({"precision": "16-mixed"}, (), "fp16 is no autocast"),
        ({"precision": "bf16-mixed"}, (), ""),
        ({}, ("a", "b", "c", "d"), "attributes of the model (a, b, c): Distributed"),
        ({"accelerator": handler(broadcast_buffers=True)}, ("a",), "attributes of the model (a): Distributed"),
        ({"accelerator": handler(broadcast_buffers=False)}, ("a",), ""),
    ],
)
def test_a_script_is_not_divided_where_that_would_be_another_training(
    settings: dict[str, Any], advances: tuple[str, ...], why: str
) -> None:
    facts: Any = SimpleNamespace(advances=advances)
    found = why_not_divided(first(**settings), facts)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("settings", "allowed", "mixed", "reserved"),
    [
        ({}, ("precision",), "bf16", False),
        ({"reads_precision": True}, ("precision",), "bf16", True),
        ({"by_trainer": True}, ("precision",), "bf16", True),
        ({"precision_option": "--mixed_precision"}, ("precision",), "bf16", True),
        ({"reads_precision": True}, ("accumulate",), "", False),
        ({"reads_precision": True, "sharded": True}, ("precision",), "", False),
        ({"reads_precision": True, "precision_given": True}, ("precision",), "", False),
        ({"by_trainer": True, "precision_given": True}, ("precision",), "bf16", True),
        ({"precision_option": "--mixed_precision", "precision_given": True}, ("precision",), "bf16", True),
        ({"reads_precision": True, "capability": (7, 0)}, ("precision",), "fp16", True),
        ({"reads_precision": True, "precision": "bf16-mixed"}, ("precision",), "", False),
    ],
)
def test_a_precision_that_the_script_acts_on_is_set_by_another_launch(
    settings: dict[str, Any], allowed: tuple[str, ...], mixed: str, reserved: bool
) -> None:
    facts: Any = SimpleNamespace(advances=())
    found = RelaunchCandidates(first(**settings), facts, LaunchSettings.of({"allow": allowed}))
    assert found._mixed == mixed
    assert found.reserved == ({"precision"} if reserved else set())


def plugin(version: int, reshard: object = True, *, strategy: str = "FULL_SHARD", offload: bool = False) -> Any:
    from torch.distributed.fsdp import ShardingStrategy

    return SimpleNamespace(
        fsdp_version=version, reshard_after_forward=reshard, sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=offload,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "ranks", "allowed", "changes"),
    [
        (None, 2, ("shard",), [{"introduced": True}]),
        (None, 1, ("shard",), []),
        (None, 2, ("reshard",), []),
        (plugin(1, strategy="SHARD_GRAD_OP"), 2, ("reshard",), [{"reshard": True, "strategy": "FULL_SHARD"}]),
        (plugin(1, strategy="SHARD_GRAD_OP"), 2, ("checkpoint",), []),
        (plugin(1), 2, ("reshard",), []),
        (plugin(2, False), 2, ("reshard",), [{"reshard": True}]),
        (plugin(2, True), 2, ("reshard",), []),
        (plugin(2, False), 2, ("checkpoint",), []),
        (plugin(2, False), 2, ("reshard", "offload"), [{"reshard": True}, {"offload": True}]),
        (plugin(2, True), 2, ("offload",), [{"offload": True}]),
    ],
)
def test_a_model_is_divided_otherwise_as_its_plugin_can(
    given: Any, ranks: int, allowed: tuple[str, ...], changes: list[dict[str, Any]]
) -> None:
    look: Any = SimpleNamespace(facts=SimpleNamespace(advances=()))
    script = first(fsdp_plugin=given, ranks=ranks)
    candidates = RelaunchCandidates(script, look, LaunchSettings.of({"allow": allowed}))
    made = candidates._divided(ShardingChange())
    assert [(one.introduced, one.reshard, one.strategy, one.offload) for one in made] == [
        tuple({"introduced": False, "reshard": False, "strategy": "", "offload": False, **change}.values())
        for change in changes
    ]
    if given is not None:
        assert candidates._divided(ShardingChange(introduced=True)) == []
    assert candidates.notes == []


def test_why_a_launch_is_not_divided_is_among_the_notes() -> None:
    look: Any = SimpleNamespace(facts=SimpleNamespace(advances=("scale",)))
    candidates = RelaunchCandidates(first(), look, LaunchSettings.of({"allow": ("shard",)}))
    assert candidates._divided(ShardingChange()) == []
    assert ["(scale)" in note for note in candidates.notes] == [True]
