"""Parameters on the host in scripts: Accelerate's FSDP2, predicted on symbolic tensors, and for real over gloo."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
if sys.platform == "win32":
    pytest.skip("a dry run copies its process (fork)", allow_module_level=True)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    pytest.skip("FSDP2 is public since torch 2.6", allow_module_level=True)

import accelerate_cases as cases

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard_accelerate.apply import fsdp

SHARDED = cases.SHARDED
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
MIB = 2**20
#: Less than the weights with their optimizer states, enough for what FSDP2 has on the GPU at a time.
BUDGET = "90MiB"
#: The same for several processes: collectives run on streams of their own, each with segments of its own.
BUDGET_OF_SEVERAL = "128MiB"
NAMED = ("offload_parameters",)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Everything that is asked of dry runs here, answered in one process."""
    asked = tmp_path_factory.mktemp("sharded") / "asked"

    def ask(name: str, loop: str, *more: object, **settings: Any) -> None:
        settings = {"budget": BUDGET, "allow": NAMED, **settings}
        # The steps alone are compared with those of our own technique: the loop's weights are gathered when it ends.
        cases.request(asked / name, SHARDED, loop, "--out", "never.pt", *more, whole_job=False, **settings)

    for ranks in (1, 2, 8):
        ask(f"clipping{ranks}", "clipping", ranks=ranks, budget=BUDGET if ranks == 1 else BUDGET_OF_SEVERAL)
    ask("accumulating", "accumulating", budget="106MiB")
    ask("mixed", "clipping", allow=("precision", *NAMED), budget="66MiB")
    ask("checkpointed", "clipping", "--batch_size", 1024, "--samples", 2048, budget="122MiB",
        allow=("checkpoint", "accumulate", *NAMED))  # fmt: skip
    for name in ("listed_before", "tied", "averaging", "two_models", "apart", "values"):
        ask(name, name)
    ask("by_default", "clipping", allow=("precision", "accumulate", "checkpoint", "offload", "foreach"))
    ask("optimizer", "clipping", allow=("offload_optimizer",))
    ask("in_a_loop", "clipping", allow=("foreach",), budget="150MiB")
    ask("little_host", "clipping", host_budget="100MiB", ranks=2, budget=BUDGET_OF_SEVERAL)
    ask("frozen", "frozen", ranks=2, budget="107MiB")
    ask("transformers", "transformers")
    ask("checkpoints", "transformers", "--checkpointing", budget="80MiB")
    ask("trainer", "trainer", "--output_dir", asked.parent / "trainer")
    for ranks in (2, 8):
        ask(f"configured{ranks}", "configured", ranks=ranks, budget="1GiB", allow=("slices", "checkpoint", *NAMED))
    trainer = (cases.TRAINER, "--output_dir", asked.parent / "flag", "--out", "never.pt", "--report_to", "none")
    sharded = '{"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "cpu_ram_efficient_loading": false}'
    cases.request(asked / "whole", *trainer, ranks=2, allow=("slices",))
    flags = ("--fsdp", "full_shard auto_wrap", "--fsdp_config", sharded)
    cases.request(asked / "flag", *trainer, *flags, ranks=2, allow=("slices",))
    return cases.dry_runs(asked)


def planned(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer
    assert answer["fits"], answer["text"]
    assert answer["launch_plan"]["recipe"]["parameters_on_host"], answer["text"]
    return answer["plan"]["estimate"]


def test_what_is_known_of_the_optimizer_and_of_shards_is_said(answers: Any) -> None:
    assert answers["in_a_loop"]["launch_plan"]["recipe"]["optimizer"] == "for-loop"
    small = "the optimizer: 3 steps of small weights were run, and their updates are equal"
    assert small in answers["in_a_loop"]["notes"], answers["in_a_loop"]["notes"]
    on_host = "parameters on the host: the same numbers are gathered and reduced"
    assert any(note.startswith(on_host) for note in answers["clipping1"]["notes"])


def test_a_script_is_sharded_as_our_own_technique_shards_it(answers: Any) -> None:
    """Accelerate's functions on the script's model, and ours on the same model, allocate the same."""
    from vram_guard.simulate import estimate
    from vram_guard.techniques import Recipe

    step = cases.wide_step(recipe=Recipe(parameters_on_host=BLOCKS))
    ours, found = estimate(step, 4), planned(answers["clipping1"])
    # The loop loads a batch while the last one is still held.
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved
    assert found["host_peak"] == pytest.approx(ours.host_peak, abs=1024)
    for category in ("parameters", "gradients", "optimizer_states", "workspace", "buffers"):
        assert found["breakdown"][category] == ours.breakdown[category], category
    before = answers["clipping1"]["plan"]["before"]
    assert found["peak_allocated"] < before["peak_allocated"] / 3
    assert answers["clipping1"]["launch_plan"]["sharding"]["wrapped"] == ["Block"]


def test_more_processes_hold_less_each_on_the_host(answers: Any) -> None:
    alone, two, eight = (planned(answers[f"clipping{ranks}"]) for ranks in (1, 2, 8))
    assert two["host_peak"] == pytest.approx(alone["host_peak"] / 2, rel=0.01)
    # Before it is sharded, every process has the model: 24 MiB and what is sharded of it already.
    assert 24 * MIB < eight["host_peak"] < 29 * MIB
    # Whole gradients of a block lie on the GPU until they are reduced, with more than one process in a buffer of it.
    assert alone["peak_allocated"] < two["peak_allocated"] < alone["peak_allocated"] + 9 * MIB
    assert any("saved in shards, or not at all (sharded.py, line" in note for note in answers["clipping2"]["notes"])
    assert not any("saved in shards" in note for note in answers["clipping1"]["notes"])
    slow, fast = answers["clipping1"]["plan"]["slowdown"], answers["clipping8"]["plan"]["slowdown"]
    assert fast < slow


def test_accumulation_keeps_whole_gradients_on_the_gpu(answers: Any) -> None:
    """``accumulate()`` means ``set_requires_gradient_sync(False)``: nothing is reduced, so nothing is carried away."""
    found = planned(answers["accumulating"])
    assert found["breakdown"]["gradients"] > 24 * MIB > planned(answers["clipping1"])["breakdown"]["gradients"]


def test_bf16_is_accelerates_own_policy_and_that_is_said(answers: Any) -> None:
    found, whole = planned(answers["mixed"]), planned(answers["clipping1"])
    assert answers["mixed"]["launch_plan"]["precision"] == "bf16"
    assert found["peak_allocated"] < whole["peak_allocated"]
    assert any("no autocast" in note for note in answers["mixed"]["notes"])


def test_checkpointing_goes_with_it_and_slices_do_not(answers: Any) -> None:
    planned(answers["checkpointed"])
    orders = answers["checkpointed"]["launch_plan"]
    assert orders["recipe"]["checkpoint"]
    assert orders["batch_size"] == 1024


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("listed_before", "listed before Accelerator.prepare"),
        ("tied", "would separate tied weights"),
        ("averaging", "mixed torch.Tensor and DTensor"),
        ("two_models", "takes one model, and the script prepares 2"),
        ("apart", "a model and optimizer must be passed together"),
        ("values", "do not support `clip_grad_value_`"),
    ],
)
def test_what_fsdp2_would_change_is_refused_with_the_reason(answers: Any, name: str, says: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert not answer["changed"]
    assert any("parameters on the host are not possible" in note and says in note for note in answer["notes"])


def test_weights_that_are_not_trained_are_carried_too(answers: Any) -> None:
    found, all_trained = planned(answers["frozen"]), planned(answers["clipping2"])
    assert found["peak_allocated"] < all_trained["peak_allocated"]
    assert found["host_peak"] < 0.75 * all_trained["host_peak"]  # no gradients and states of them


def test_it_is_used_only_where_it_is_named(answers: Any) -> None:
    answer = answers["by_default"]
    assert not answer["fits"]
    assert "FSDP2" not in answer["text"]
    assert any("parameters on the host were not tried" in note for note in answer["notes"])


def test_the_optimizer_alone_is_refused_by_name(answers: Any) -> None:
    assert any("only together with the parameters" in note for note in answers["optimizer"]["notes"])


def test_what_the_host_lacks_is_not_promised(answers: Any) -> None:
    answer = answers["little_host"]
    assert not answer["fits"]
    # Two processes share the machine's.
    assert "of host memory, of which 50.00 MiB are available" in " ".join(answer["text"].split())


@pytest.mark.parametrize("name", ["transformers", "checkpoints", "trainer"])
def test_models_of_transformers_with_tied_embeddings_are_followed(answers: Any, name: str) -> None:
    planned(answers[name])
    assert answers[name]["launch_plan"]["sharding"]["wrapped"] == ["GPT2Block"]


# --- a launch that shards by itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_launch_with_fsdp2_is_predicted_as_it_is_configured(answers: Any, ranks: int) -> None:
    """Accelerate's functions over pretended processes, and ``fully_shard`` on the same blocks, allocate the same."""
    from vram_guard import Parallel
    from vram_guard.simulate import estimate

    step = cases.wide_step(parallel=Parallel(gpus=ranks, kind="fsdp2", blocks=BLOCKS))
    answer, ours = answers[f"configured{ranks}"], estimate(step, 4)
    assert "error" not in answer, answer
    assert not answer["changed"]
    found = answer["plan"]["before"]
    for category in ("parameters", "gradients", "optimizer_states", "workspace", "buffers"):
        assert found["breakdown"][category] == ours.breakdown[category], category
    # The loop loads a batch while the last one is still held.
    assert found["peak_allocated"] == pytest.approx(ours.peak_allocated, abs=2048)
    assert found["peak_reserved"] == ours.peak_reserved
    assert found["peak_allocated"] < answers["clipping1"]["plan"]["before"]["peak_allocated"]


def test_what_would_change_how_it_is_sharded_is_refused(answers: Any) -> None:
    notes = answers["configured2"]["notes"]
    assert any("parameters on the host are not possible" in note and "--fsdp_offload_params" in note for note in notes)


def test_trainers_own_flag_is_followed(answers: Any) -> None:
    """``--fsdp``, which the Trainer refuses in a process that is alone."""
    whole, sharded = (answers[name] for name in ("whole", "flag"))
    assert "error" not in sharded, sharded
    found, all_of_it = (one["plan"]["before"]["breakdown"]["optimizer_states"] for one in (sharded, whole))
    # Two moments of each weight, in blocks of 512 bytes.
    assert 0.5 * all_of_it < found < 0.75 * all_of_it


FSDP2 = (
    *("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false", "--num_processes", "2"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"),
    *("--fsdp_state_dict_type", "FULL_STATE_DICT", *cases.QUIET),
)


def test_accelerates_options_of_fsdp2_are_read(monkeypatch: Any) -> None:
    from vram_guard_accelerate.cli.arguments import parsed
    from vram_guard_accelerate.cli.target import target_of

    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    target = target_of(parsed([*FSDP2, "--budget", "1GiB", str(SHARDED), "clipping"]))
    assert (target.ranks, target.simple) == (2, False)
    expected = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    assert {name: target.environment.get(name) for name in expected} == expected


def test_a_real_launch_with_fsdp2_is_predicted_changed_and_trains(tmp_path: Any) -> None:
    """Two processes over gloo, whose gathered weights the launch would have kept."""
    keeps = ("--budget", "240MiB", *FSDP2, "--fsdp_reshard_after_forward", "false")
    done = cases.launch(*keeps, SHARDED, "clipping", "--depth", 8, "--out", tmp_path / "out.pt", cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "launched with --fsdp_reshard_after_forward true" in " ".join(done.stderr.split())
    found = torch.load(tmp_path / "out.pt")
    assert (found["fsdp"], found["processes"], found["kinds"]) == (True, 2, ["DTensor"])
    assert found["groups"] == [(True, False)] * 8
    assert found["variables"]["FSDP_RESHARD_AFTER_FORWARD"] == "true"


# --- for real ---------------------------------------------------------------------------------------------------------

LOOPS = ("clipping", "accumulating")
ONE = ("--num_processes", "1", *cases.QUIET)
GUARD = ("--budget", BUDGET, "--margin", "0", "--allow", "offload_parameters")


@pytest.fixture(scope="module", params=[1, 2], ids=["one_process", "two_processes"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same loops as written and under FSDP2, planned by the launcher, or by the first of two processes."""
    folder = tmp_path_factory.mktemp("real")
    processes = ONE if request.param == 1 else cases.TWO
    alone = (*GUARD, *processes)
    guard = ("--budget", BUDGET_OF_SEVERAL, *GUARD[2:])
    guarded = alone if request.param == 1 else (*processes, "-m", "vram_guard_accelerate", *guard)
    found = []
    for name, given, how in (("written", processes, {"ACCELERATE_USE_CPU": "true"}), ("sharded", guarded, {})):
        (folder / name).mkdir()
        own = name == "sharded" and request.param == 1
        more = ("--own_seed",) if request.param == 2 else ()
        done = cases.launch(*given, SHARDED, "several", "--out", folder / name, *more, cache=folder / "cache",
                            guarded=own, **how)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append({loop: torch.load(folder / name / f"{loop}.pt") for loop in LOOPS})
        for loop in LOOPS:
            found[-1][loop]["saved"] = [torch.load(folder / name / f"{loop}_checkpoint.pt")]
    return *found, request.param


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_rates_and_losses_are_those_of_the_script_as_written(runs: Any, loop: str) -> None:
    """Two processes begin with weights of their own: those of the first count, as DistributedDataParallel has it."""
    written, sharded, processes = runs[0][loop], runs[1][loop], runs[2]
    assert (written["fsdp"], sharded["fsdp"]) == (False, True)
    assert written["processes"] == sharded["processes"] == processes
    assert cases.difference(written, sharded) < 1e-6
    assert written["rates"] == sharded["rates"]
    assert sharded["losses"] == pytest.approx(written["losses"], rel=1e-5)
    assert sharded["norms"] == pytest.approx(written["norms"], rel=1e-4)
    assert sharded["kinds"] == ["DTensor"]
    assert sharded["held"] * processes == pytest.approx(written["held"], rel=0.001)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_model_that_saves_itself_is_saved_whole(runs: Any, loop: str) -> None:
    """``save_pretrained(path, is_main_process=...)``, which no shard of a model survives otherwise."""
    (saved,), (whole,) = runs[1][loop]["saved"], runs[1][loop]["weights"]
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert list(saved) == list(whole)
    assert all(torch.equal(saved[name], whole[name]) for name in whole)


def test_accelerates_own_variables_arrive(runs: Any) -> None:
    variables = runs[1]["clipping"]["variables"]
    assert variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
    assert variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    for name, value in fsdp.ON_HOST.variables.items():
        assert name == "FSDP_AUTO_WRAP_POLICY" or variables.get(name, value) == value
    assert not runs[0]["clipping"]["variables"]


def test_a_process_that_is_alone_gets_a_rank() -> None:
    alone: dict[str, str] = {}
    fsdp.ON_HOST.announce(alone)
    assert alone["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in alone
    assert (alone["RANK"], alone["LOCAL_RANK"], alone["WORLD_SIZE"]) == ("0", "0", "1")
    second = {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4"}
    replace(fsdp.ON_HOST, wrapped=("Block", "Other")).announce(second)
    assert (second["RANK"], second["WORLD_SIZE"]) == ("3", "4")
    assert second["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block,Other"


def test_where_accelerate_does_not_shard_nothing_is_prepared() -> None:
    from accelerate import Accelerator

    with (
        pytest.raises(UnsupportedTechniqueError),
        fsdp.sharding(Accelerator(cpu=True), [torch.nn.Linear(2, 2)], fsdp.ON_HOST),
    ):
        pytest.fail("it was prepared")


def test_a_launch_on_the_cpu_is_refused_before_any_work(tmp_path: Any) -> None:
    done = cases.launch(*GUARD, *cases.ONE, SHARDED, "clipping", "--out", tmp_path / "never.pt", cache=tmp_path)
    assert done.returncode == 2
    assert "--cpu and --allow offload_parameters contradict each other" in done.stderr


def test_lines_that_would_save_shards_are_found(tmp_path: Any) -> None:
    from vram_guard_accelerate.apply.sharded_saving import lines_that_save_shards

    script = tmp_path / "train.py"
    script.write_text(
        "model.save_pretrained(out)\n"
        "model.save_pretrained(out, is_main_process=main)\n"
        "model.save_pretrained(out, state_dict=accelerator.get_state_dict(model))\n"
        "torch.save(unwrap(model).state_dict(), out)\n",
        encoding="utf-8",
    )
    assert lines_that_save_shards(str(script)) == [1, 4]
    script.write_text("not python at all(", encoding="utf-8")
    assert lines_that_save_shards(str(script)) == lines_that_save_shards(str(tmp_path / "gone.py")) == []


def test_blocks_are_named_by_their_classes_also_where_they_are_checkpointed() -> None:
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    plain = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3)), "head": nn.Linear(2, 2)})
    assert fsdp.wrapped_classes(plain, ("layers.0", "layers.1", "head")) == ("Layer", "Linear")
    wrapped = nn.ModuleDict({"layers": nn.ModuleList(checkpoint_wrapper(Layer()) for _ in range(3))})
    assert fsdp.wrapped_classes(wrapped, ("",)) == ("Layer",)
    assert fsdp.wrapped_classes(nn.Linear(2, 2), ("",)) == ()
    assert fsdp.wrapped_classes(plain, ()) == ()


def test_several_processes_are_in_the_way_only_where_nobody_shards() -> None:
    from vram_guard.techniques import Recipe, incompatible

    recipe = Recipe(parameters_on_host=BLOCKS)
    assert "supports one process" in incompatible(recipe, ranks=2)
    assert incompatible(recipe, ranks=2, sharded=True) == ""
    assert "GradScaler" in incompatible(recipe, ranks=2, sharded=True, precision="16-mixed")
    on_host = Recipe(optimizer_on_host=True)
    assert incompatible(on_host, ranks=2, sharded=True) == incompatible(on_host, ranks=2) != ""
