"""Tensor parallelism by a plan: one rank of it in a trace."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from parallel_cases import LENGTH, WORDS, Layer, Net, Transformer, loss, step
from torch import nn

from vram_guard import Parallel, trace
from vram_guard.errors import InvalidInputError, UnsupportedTechniqueError
from vram_guard.simulate import holds_at
from vram_guard.simulate.tracing.run import run_step

pytestmark = pytest.mark.torch_since(2, 6)

WIDTH = 32


class Named(Transformer):
    """Its layers are recognised by their names."""

    _tp_plan = None


def traced(parallel, rank=0, **settings):
    return run_step(step(parallel, **{"model": Transformer, **settings}), 2, (9, 0), rank=rank)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Parallel(4, kind="fsdp2", tensor=4), Transformer),
        (Parallel(4, kind="fsdp2", tensor=4), Named),
        (Parallel(4, kind="fsdp2", tensor=4), lambda: Transformer(tied=True)),
        (Parallel(16, kind="fsdp2", tensor=4, param_dtype="bf16", reduce_dtype="fp32"), Transformer),
        (Parallel(16, kind="hsdp", tensor=2), Transformer),
    ],
    ids=["plan", "names", "tied", "sharded", "hsdp"],
)
def test_batches_of_two_and_three_say_what_seven_takes_event_by_event(layout, model):
    timeline = trace(step(layout, model=model), check_at=7)
    assert timeline.traced == (2, 3, 7)
    assert not timeline.notes
    assert holds_at(run_step(step(layout, model=model), 7, (8, 0)), timeline, 7)


def held(timeline):
    end = timeline.phases[1].start
    return [timeline.blocks[i].size.base for i in timeline.events[:end] if i >= 0 and ~i not in timeline.events[:end]]


def test_a_rank_has_its_part_of_each_layer_that_is_cut():
    whole, cut = Counter(), Counter()
    for name, parameter in Transformer().named_parameters():
        rows = any(part in name for part in ("wo.bias", "w2.bias"))
        (whole if rows or "norm" in name else cut)[parameter.numel() * 4] += 1
    assert Counter(held(traced(Parallel(4, kind="fsdp2", tensor=4)))) == whole + Counter(
        {size // 4: count for size, count in cut.items()}
    )


def test_the_cut_layers_compute_a_rank_s_heads_and_units():
    timeline = traced(Parallel(4, kind="fsdp2", tensor=4))
    hidden = [b for b in timeline.blocks if b.module == "layers.0.feed_forward.w1" and b.category == "activations"]
    assert {b.size.base for b in hidden} == {2 * LENGTH * 2 * WIDTH // 4 * 4}


def test_the_sums_are_added_over_the_dimension_of_the_layers(caplog):
    timeline = traced(Parallel(16, kind="fsdp2", tensor=4))
    assert not caplog.records, "DTensor's advice is for the real training"
    found = Counter(
        (c.name, c.ranks, c.dimension) for c in timeline.collectives if c.step == 2 and c.phase == "forward"
    )
    assert found == {
        ("all_gather_into_tensor", 4, "shard"): 3,  # two layers, and the rest
        ("all_reduce", 4, "tensor"): 5,  # attention and MLP of two layers, and the embedding
        ("all_gather_into_tensor", 4, "tensor"): 1,  # the scores
    }
    gradients = [c for c in timeline.collectives if c.step == 2 and c.phase == "backward" and c.name == "all_reduce"]
    # Of the inputs that the layers of an attention share, and those of an MLP; of the scores; of the norms of heads.
    assert Counter(c.dimension for c in gradients) == {"tensor": 2 * 2 + 1 + 4}


def test_all_layers_are_whole_where_their_weight_is_shared_with_one_that_is_not_cut():
    gathered = {"output": "colwise_gather_output"}

    class Half(Transformer):
        _tp_plan = {k: v for k, v in Transformer._tp_plan.items() if "embeddings" not in k} | gathered

    timeline = traced(Parallel(4, kind="fsdp2", tensor=4), model=lambda: Half(tied=True))
    assert held(timeline).count(WORDS * WIDTH * 4) == 1


def test_a_loss_over_cut_scores_is_computed_in_parallel_and_its_backward_too():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    def apply(model, mesh):
        positions, everywhere = Shard(1), Replicate()
        plan = {
            "tok_embeddings": RowwiseParallel(input_layouts=everywhere, output_layouts=positions),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh["tensor"], plan)
        for layer in model.layers:
            layer.attention.n_heads //= 4
            layer.attention.n_kv_heads //= 4
            layer.attention.q_norm = nn.Identity()
            inner = {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=positions, desired_input_layouts=everywhere),
                **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
                "attention.wo": RowwiseParallel(output_layouts=positions),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=positions, desired_input_layouts=everywhere),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=positions),
                "feed_forward.w3": ColwiseParallel(),
            }
            parallelize_module(layer, mesh["tensor"], inner)
        return model

    def parallel_loss(model, words):
        with loss_parallel():
            return loss(model, words)

    timeline = trace(step(Parallel(4, tensor=4, apply=apply), model=Transformer, loss=parallel_loss), check_at=7)
    assert timeline.traced == (2, 3, 7)
    assert not any(b.bytes_at(2) >= 2 * LENGTH * WORDS * 4 for b in timeline.blocks if b.category == "activations")
    phases = Counter((c.name, c.phase) for c in timeline.collectives if c.step == 2)
    assert phases["reduce_scatter_tensor", "forward"] == 5
    assert phases["all_gather_into_tensor", "forward"] == 5
    # Outside of a trace torch is as before.
    scores = torch.zeros(2, 3, requires_grad=True)
    nn.functional.cross_entropy(scores, torch.zeros(2, dtype=torch.long)).backward()


def test_draws_of_dtensors_are_traced_and_their_generators_are_as_before(monkeypatch):
    from torch.distributed import tensor as distributed
    from torch.distributed.tensor import DTensor, Shard, _random

    def apply(model, mesh):
        part = DTensor.from_local(torch.zeros(4, 4, device="cuda"), mesh["tensor"], [Shard(0)], run_check=False)
        nn.init.trunc_normal_(part)
        assert nn.functional.dropout(part, 0.5).to_local().shape == (4, 4)
        distributed.rand(8, 4, device_mesh=mesh["tensor"], placements=[Shard(0)])
        return model.to_empty(device="cuda")

    for before in (None, object()):
        monkeypatch.setattr(_random, "_rng_tracker", before)
        traced(Parallel(4, tensor=4, apply=apply))
        assert _random._rng_tracker is before
    assert torch.ops.aten.native_dropout.default in DTensor._op_dispatcher._random_ops


def test_what_cannot_be_cut_is_refused_before_any_work():
    def refused(error, match, **settings):
        with pytest.raises(error, match=match):
            traced(Parallel(8, kind="fsdp2", tensor=settings.pop("tensor", 4)), **settings)

    heads = r"tensor=8 does not divide the 4 heads of layers\.0\.attention \(n_kv_heads\)"
    refused(InvalidInputError, heads, tensor=8)
    refused(InvalidInputError, heads, tensor=8, model=Named)

    class Heads(Net):
        """An attention that counts its heads under a plain name."""

        def __init__(self):
            super().__init__()
            self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"})
            self.attention.heads = 2

    refused(InvalidInputError, r"tensor=4 does not divide the 2 heads of attention \(heads\)", model=Heads)
    refused(UnsupportedTechniqueError, r"no attention or MLP .*Parallel\(apply=", model=Net)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(32, 8, 4)
            self.layer.query_key_value = nn.Linear(32, 96)

    refused(UnsupportedTechniqueError, r"layer\.query_key_value holds several layers in one", model=Fused)

    class Torchs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4) for _ in range(2))

    refused(UnsupportedTechniqueError, r"in_proj_weight holds several layers in one", model=Torchs)

    class Relative(Named):
        def __init__(self):
            super().__init__()
            self.layers[0].attention.relative_attention_bias = nn.Embedding(32, 8)

    refused(UnsupportedTechniqueError, r"layers\.0\.attention has a table of positions for all heads", model=Relative)

    class Unknown(Transformer):
        _tp_plan = {"layers.*.feed_forward.w1": "moe_tp_experts"}  # noqa: RUF012

    refused(UnsupportedTechniqueError, r"cuts layers\.0\.feed_forward\.w1 in a way .* moe_tp_experts", model=Unknown)

    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.w1, self.w2, self.w3 = (nn.Linear(30, 30) for _ in range(3))

    refused(InvalidInputError, r"tensor=4 does not divide w1, of out_features 30", model=Odd)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_models_of_transformers_are_cut_by_their_own_plan(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        vocab_size=WORDS,
        tie_word_embeddings=False,
    )

    def hugging_face_loss(model, words):
        return model(input_ids=words, labels=words, use_cache=False).loss

    def traced_with(layout):
        model = getattr(transformers, f"{name}ForCausalLM")
        return traced(layout, model=lambda: model(config), loss=hugging_face_loss)

    one, four = (traced_with(Parallel(n, kind="fsdp2", tensor=n)) for n in (1, 4))
    projected = WIDTH * WIDTH * 4
    assert held(one).count(projected) == 2 * 2  # the queries and the output
    assert held(four).count(projected) == 0
    assert held(four).count(projected // 4) >= 2 * 2
    with pytest.raises(InvalidInputError, match="does not divide the 4 heads"):
        traced_with(Parallel(8, kind="fsdp2", tensor=8))
