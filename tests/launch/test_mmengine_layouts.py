"""FlexibleRunner's FSDPStrategy: one rank predicted, and a plan applied in two real processes (gloo, CPU)."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import two_ranks

pytest.importorskip("mmengine")
torch = pytest.importorskip("torch")

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both ranks; the second one has less memory, which counts for both."""
    return two_ranks.answers("mmengine_sharded_script.py", tmp_path_factory.mktemp("ranks"), limit=200)


@pytest.mark.torch_since(2, 6)
def test_one_rank_is_predicted_as_the_strategy_divides_the_model(answers: Any) -> None:
    first, second = (answer["plain"] for answer in answers)
    assert {**first, "gpus": None} == second  # rank 0 plans, and keeps the timeline
    assert first["gpus"] == 2
    # This rank's parameters are half of the model's, and AdamW keeps two numbers of each.
    assert first["breakdown"]["optimizer_states"] == pytest.approx(8 * answers[0]["weights"], rel=0.02)


@pytest.mark.torch_since(2, 6)
def test_the_plan_of_the_smaller_gpu_is_applied_and_trains_the_same(answers: Any) -> None:
    for answer in answers:
        assert answer["split"]["splits"] == 2
        assert answer["split"]["usable"] == answer["plain"]["reserved"] - 1
        assert answer["difference"] < 1e-5  # AdamW divides by roots of sums that round differently
        plain, split = answer["losses"]
        assert split == pytest.approx(plain, abs=1e-6)


@pytest.mark.torch_since(2, 6)
def test_a_validation_by_itself_is_predicted_with_the_weights_of_one_rank(answers: Any) -> None:
    first, second = (answer["validated"] for answer in answers)
    assert first == second
    assert not [note for note in first["notes"] if "followed" in note]
    assert first["metrics"]
    # Half of the model's weights, before the first layer is gathered.
    assert 4 * answers[0]["weights"] <= first["phases"]["setup"] < 8 * answers[0]["weights"]
    assert first["phases"]["validation"] > 4 * answers[0]["weights"]


@pytest.mark.torch_since(2, 6)
def test_accumulated_batches_keep_whole_gradients(answers: Any) -> None:
    """``OptimWrapper`` runs all but the last under FSDP's ``no_sync``, which reduces nothing."""
    plain, twice = (sum(answers[0][name]["breakdown"].values()) for name in ("plain", "twice"))
    assert twice - plain > answers[0]["weights"] * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # MMEngine's own, of its first import
def test_the_layout_travels_without_its_strategy() -> None:
    from mmengine._strategy import FSDPStrategy

    from vram_guard_mmengine import _layouts

    strategy = FSDPStrategy.__new__(FSDPStrategy)  # without what it sets up for processes
    strategy.model_wrapper = None
    found = _layouts.layout_of(SimpleNamespace(strategy=strategy, world_size=4))
    assert found is not None
    assert (found.gpus, found.dimensions) == (4, {"shard": 4})
    assert vars(pickle.loads(pickle.dumps(found)).apply) == {}
    assert _layouts.layout_of(SimpleNamespace(world_size=4)) is None
    strategy.model_wrapper = {"cpu_offload": True}
    offloaded = _layouts.layout_of(SimpleNamespace(strategy=strategy, world_size=4))
    assert offloaded is not None
    assert (found.offload, offloaded.offload) == (False, True)
