"""What is read of a script's source, its loop and its launch, in this process: nothing is followed here."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("FSDP2 is public since torch 2.6", allow_module_level=True)

from torch import nn  # noqa: E402 - what is tested has to be there
from torch.utils.data import DataLoader  # noqa: E402

from vram_guard_accelerate._settings import Settings  # noqa: E402
from vram_guard_accelerate._sharding_change import ShardingChange  # noqa: E402
from vram_guard_accelerate.dry_run import _periodic_branches, _script_source  # noqa: E402
from vram_guard_accelerate.dry_run.loop_profile import epoch_of  # noqa: E402
from vram_guard_accelerate.planning import prediction  # noqa: E402
from vram_guard_accelerate.relaunch.candidates import RelaunchCandidates  # noqa: E402
from vram_guard_accelerate.relaunch.divisible import why_not_divided  # noqa: E402

# --- loops in the source -----------------------------------------------------------------------------------------

#: Answers of candidates that are not asked for: what a run and what the graph shows.
UNASKED: Any = (lambda: None, lambda: "")

SCRIPT = """\
import itertools

def train(loader, epochs):
    best = 0
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            with open(batch) as loss:
                loss.read()
            if step % 2 == 0:
                best = step
        while True:
            best += 1
            if best > 3:
                break
        else:
            best = 1
    first, (second, best) = 1, (2, 3)
    def inner():
        for never in loader:
            pass
    return best

@staticmethod
@property
def train_twice(loader):
    while loader:
        for one in loader:
            if one:
                continue
    print(1)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    (tmp_path / "script.py").write_text(SCRIPT)
    return compile(SCRIPT, str(tmp_path / "script.py"), "exec")


def codes(code: Any) -> dict[str, Any]:
    return {one.co_name: one for one in code.co_consts if inspect.iscode(one)}


def test_the_function_of_a_code_is_found_below_its_decorators(tree: Any, tmp_path: Path) -> None:
    for name, line in (("train", 3), ("train_twice", 25)):
        found: Any = _script_source.function_of(codes(tree)[name])
        assert (found.name, found.lineno) == (name, line)
    assert isinstance(_script_source.function_of(tree), ast.Module)
    missing = compile("def train(): ...", str(tmp_path / "missing.py"), "exec")
    assert _script_source.function_of(codes(missing)["train"]) is None
    other = compile("\n\n\n\n\ndef train(): ...", str(tmp_path / "script.py"), "exec")
    assert _script_source.function_of(codes(other)["train"]) is None, "another line: the file was edited"


def test_loops_around_a_line_are_those_of_the_same_function(tree: Any) -> None:
    node: Any = _script_source.function_of(codes(tree)["train"])
    lines = {
        line: [one.lineno for one in _script_source.loops_around(node, line)] for line in (4, 5, 8, 11, 14, 17, 19)
    }
    assert lines == {4: [], 5: [5], 8: [5, 6], 11: [5, 11], 14: [5, 11], 17: [], 19: []}


def test_where_a_name_is_first_assigned(tree: Any) -> None:
    node: Any = _script_source.function_of(codes(tree)["train"])
    found = {name: _script_source.assigned_at(node, name) for name in ("best", "second", "loader", "never")}
    assert found == {"best": 4, "second": 17, "loader": None, "never": None}


def test_the_line_at_which_a_function_goes_on_after_a_statement(tree: Any) -> None:
    node: Any = _script_source.function_of(codes(tree)["train"])
    outer, inner, endless = (
        next(one for one in ast.walk(node) if isinstance(one, (ast.For, ast.While)) and one.lineno == line)
        for line in (5, 6, 11)
    )
    after = [_script_source.line_after(node, one) for one in (outer, inner, endless)]
    assert after == [17, 11, 16], "after a while with an else: that"
    (reads,) = inner.body[0].body  # type: ignore[attr-defined]
    assert _script_source.line_after(node, inner.body[0]) == 9
    assert _script_source.line_after(node, reads) is None, "a with ends there"
    assert _script_source.line_after(node, inner.body[1]) == 6, "the next round"
    assert _script_source.line_after(node, inner.body[1].body[0]) == 6  # type: ignore[attr-defined]
    assert _script_source.line_after(node, node.body[-1]) is None


def test_a_round_begins_at_the_loops_line_or_at_its_first_statement(tree: Any) -> None:
    node: Any = _script_source.function_of(codes(tree)["train"])
    twice: Any = _script_source.function_of(codes(tree)["train_twice"])
    loops = {one.lineno: one for one in ast.walk(node) if isinstance(one, (ast.For, ast.While))}
    begins = _script_source.begins_round
    assert begins(loops[6], 6, 9)
    assert not begins(loops[6], 7, 6)
    assert begins(loops[11], 12, 13), "while True has no line of its own"
    assert not begins(loops[11], 13, 12)
    around = twice.body[0]
    assert begins(around, 27, 26)
    assert not begins(around, 27, 28), "the loop inside goes on"


# --- branches that come now and then -----------------------------------------------------------------------------


def branch(source: str) -> Any:
    """The only branch of a loop, as its function has it."""
    node: Any = ast.parse(source).body[0]
    loops = [one for one in ast.walk(node) if isinstance(one, (ast.For, ast.While))]
    found = _periodic_branches.branches_in(node, _script_source.loops_around(node, loops[-1].lineno), "train.py")
    return next(iter(found.values()), None)


def frame(**names: Any) -> FrameType:
    """Of a function that has these names."""
    made: Any = SimpleNamespace(f_globals={}, f_locals=names)
    return made  # type: ignore[no-any-return]


NESTED = """
def train(loader):
    for epoch in range(epochs):
        for batch in loader:
            if {test}:
                {body}
            if step {at} limit:
                break
"""


@pytest.mark.parametrize(
    ("test", "body", "period"),
    [
        ("step % 500 == 0", "save()", 500),
        ("step % every == every - 1", "save()", 20),
        ("not step % every", "save()", 20),
        ("step % 4 == 0 and step % every == 0 and main", "save()", 20),
        ("step % unknown == 0", "save()", None),
        ("step % 4 == 0 and step % unknown == 0", "save()", None),
        ("step % 0 == 0", "save()", None),
        ("step % 500", "save()", -1),  # in all rounds but some
        ("step % 500 != 0", "save()", -1),
        ("step / 500 == 0", "save()", -1),
        ("-(step % 500)", "save()", -1),
        ("step % 500 == 0", "continue", -1),  # leaves a round out
    ],
)
def test_a_branch_says_how_often_it_comes(test: str, body: str, period: int | None) -> None:
    found = branch(NESTED.format(test=test, body=body, at=">="))
    if period == -1:
        assert found is None
        return
    assert (found.where, found.node.lineno, [one.lineno for one in found.loops]) == ("train.py, line 5", 5, [3, 4])
    assert _periodic_branches.period_of(found, frame(every=20)) == period


@pytest.mark.parametrize(
    ("names", "length", "comes"),
    [
        ({"epochs": 2, "limit": 10**6}, 250, True),
        ({"epochs": 2, "limit": 10**6}, 249, False),
        ({"epochs": 2, "limit": 499}, 1000, False),
        ({"epochs": 2, "limit": 500}, 1000, True),
        ({"epochs": 2}, None, True),  # nothing is known of the loader
        ({"limit": 10}, 1000, False),
        ({}, 1, True),
    ],
)
def test_a_branch_whose_round_is_beyond_the_end_does_not_come(names: dict[str, int], length: Any, comes: bool) -> None:
    found = branch(NESTED.format(test="step % 500 == 0", body="save()", at=">="))
    loader = object() if length is None else range(length)
    assert _periodic_branches.may_come(found, frame(**names), loader) == comes


@pytest.mark.parametrize(("at", "comes"), [(">=", False), (">", False), ("==", False), ("<", True), ("!=", True)])
def test_only_a_limit_at_which_a_loop_ends_is_one(at: str, comes: bool) -> None:
    found = branch(NESTED.format(test="step % 500 == 0", body="save()", at=at))
    assert _periodic_branches.may_come(found, frame(epochs=2, limit=10), range(1000)) == comes


def test_a_single_loop_is_over_something_else_than_the_loader() -> None:
    found = branch("def train():\n    for step in range(1, last):\n        if step % 5 == 0:\n            save()\n")
    for last, comes in ((5, False), (6, True), ("unknown", True)):
        assert _periodic_branches.may_come(found, frame(last=last), range(1)) == comes


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ("step % 500 == 0", True),
        ("step % 500 == 0 and main", False),
        ("step % 500 == 0 or main", True),
        ("not step % 500 and not main", True),
        ("step % 500 == 0 and unknown", None),
    ],
)
def test_what_else_a_branch_tests_is_known_of_the_frame(test: str, value: bool | None) -> None:
    found = branch(NESTED.format(test=test, body="save()", at=">="))
    assert _periodic_branches.comes_besides(found, frame(step=3, main=False)) is value


# --- the loader --------------------------------------------------------------------------------------------------


def test_an_epoch_is_as_long_as_the_loader_and_its_sampler_say() -> None:
    data: Any = range(10)
    assert epoch_of(DataLoader(data, 4)) == (3, 10)
    assert epoch_of(DataLoader(data, 4, drop_last=True)) == (2, 10)
    assert epoch_of(DataLoader(data, batch_sampler=[[0, 1], [2]])) == (2, None)
    assert epoch_of(iter(data)) == (None, None)
    unknown: Any = torch.utils.data.BatchSampler(iter(data), 4, False)  # type: ignore[arg-type]
    assert epoch_of(SimpleNamespace(batch_sampler=unknown, __len__=None)) == (None, None)


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
    found = RelaunchCandidates(first(**settings), facts, Settings.of({"allow": allowed}), *UNASKED)
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
    candidates = RelaunchCandidates(script, look, Settings.of({"allow": allowed}), *UNASKED)
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
    candidates = RelaunchCandidates(first(), look, Settings.of({"allow": ("shard",)}), *UNASKED)
    assert candidates._divided(ShardingChange()) == []
    assert ["(scale)" in note for note in candidates.notes] == [True]
