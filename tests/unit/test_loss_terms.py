"""What a loss is over its batch, read from its graph: real losses of torch, real and symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each import each
from torch.nn import functional

from vram_guard.apply.microbatch import Layout, probe_layout, split
from vram_guard.apply.normalisers import Normaliser
from vram_guard.proof.loss_graph import LossGraph
from vram_guard.proof.samples_apart import SamplesApart, form_over_samples
from vram_guard.step import TrainingStep


def read_off(batch_of: Callable[[int], Any], loss: Callable[[Any], torch.Tensor]) -> Any:
    """What a loss is over the samples of a batch, and why it is none of what is known."""
    forms = []
    for samples in (8, 4):
        batch = batch_of(samples)
        apart = SamplesApart(batch, samples, split(batch, samples, 1))
        with apart:
            found = loss(batch)
        forms.append(apart.form(found))
    return form_over_samples(*forms)


def texts(samples: int) -> dict[str, torch.Tensor]:
    labels = torch.ones(samples, 8, dtype=torch.long)
    return {"input_ids": labels, "labels": labels.clone()}


def sounds(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, 4000), "labels": texts(samples)["labels"]}


def test_losses_of_transformers_are_told_apart() -> None:
    """A language model's mean; CTC, which Wav2Vec2 sums; a mixture of experts, whose balance is neither."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    speech = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    models = {
        "mean": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **size)),
        "checked": transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(vocab_size=64, **size, **speech)),
        None: transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, **size, **experts)),
    }
    for expected, model in models.items():
        batch_of = sounds if expected == "checked" else texts
        found, why = read_off(batch_of, lambda batch, model=model: model.train()(**batch).loss)
        # It asks whether a label is too large, and may go another way.
        assert ("mean" if isinstance(found, Normaliser) else found) == (None if expected == "checked" else expected), (
            why
        )


@torch.library.custom_op("vram_guard_tests::refill", mutates_args=("row",))
def refill(row: torch.Tensor) -> None:
    row.copy_(torch.rand_like(row))


@pytest.mark.parametrize(
    ("write", "known"),
    [(refill, False), (lambda row: torch.ops.fsdp.split_with_sizes_copy(torch.ones(6), [6], out=[row]), True)],
)
def test_what_an_operator_of_another_library_writes_is_seen_in_every_view(write: Any, known: bool) -> None:
    """FSDP2 gathers weights so: into one row, of which its parameters are views."""
    pytest.importorskip("torch.distributed.fsdp")
    batch, weight = torch.randn(8, 3), torch.zeros(2, 3)
    row = weight.view(6)
    apart = SamplesApart(batch, 8, split(batch, 8, 1))
    with apart:
        functional.linear(batch, weight)
        write(row)
        loss = functional.linear(batch, weight).square().mean()
    assert (apart.form(loss).why == "") is known


def shifted_by_transformers(labels: torch.Tensor) -> torch.Tensor:
    return functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)


def without_padding(labels: torch.Tensor) -> torch.Tensor:
    return shifted_by_transformers(labels.masked_fill(labels == 0, -100))


def written_to_by_another_view(labels: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(labels, (0, 1), value=-100)
    one, other = padded[..., 1:], padded[..., 1:]
    one.masked_fill_(one == 0, -100)
    return other.contiguous().view(-1)


@each(
    ("made", "expected"),
    [
        (shifted_by_transformers, Normaliser(("labels",), shifted=True)),
        (lambda labels: labels.clone().flatten(), Normaliser(("labels",))),
        (without_padding, None),
        (lambda labels: shifted_by_transformers(labels.clamp(max=12)), None),
        (written_to_by_another_view, None),
        (
            lambda labels: shifted_by_transformers(labels.view(len(labels), -1, 12)),
            Normaliser(("labels",), shifted=True),
        ),
    ],
)
def test_labels_that_a_trace_has_copied_are_known_again_unless_something_was_computed(
    made: Any, expected: Normaliser | None
) -> None:
    """The batch of the trace holds neither a zero nor a number above 12: what is done to those shows in no value."""
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))

    def batch(size: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(1, 13).repeat(size, 1)
        return {"ids": tokens, "labels": tokens.clone()}

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), made(batch["labels"]))

    found, why = LossGraph(TrainingStep(model, batch, loss, torch.optim.SGD)).reduction(
        4, Layout(parts={"ids": Layout(rows=True), "labels": Layout(rows=True)})
    )
    assert found == expected, why


def written(x: torch.Tensor, write: Any) -> torch.Tensor:
    values = x.square()
    write(values)
    return values.mean()


WEIGHT = torch.rand(8)


@each(
    "loss",
    [
        lambda x: torch.cat([x[: len(x) // 2].square(), x[len(x) // 2 :]]).mean(),
        lambda x: torch.stack([x.chunk(2)[0].square(), x.chunk(2)[1]]).mean(),
        lambda x: (torch.cat([x[: len(x) // 2], torch.ones(len(x) - len(x) // 2, 8)]) - x).square().mean(),
        lambda x: written(x, lambda values: values[: len(values) // 2].zero_()),
        lambda x: written(x, lambda values: values[0].fill_(2.0)),
        lambda x: written(x, lambda values: values.__setitem__(slice(None, None, 2), 0.0)),
        lambda x: x.mean() - x.mean().detach(),
        lambda x: (x * torch.bernoulli(torch.full((8,), 0.5))).mean(),
        lambda x: x[:, torch.randperm(8)[:4]].mean(),
        lambda x: x[:, torch.multinomial(torch.ones(8), 2)].mean(),
        lambda x: (x * functional.dropout(WEIGHT, 0.5)).mean(),
        lambda x: x.mean() + WEIGHT.expand(len(x), -1).square().sum(),
        lambda x: (x + WEIGHT.expand(len(x), -1).sum(0)).mean(),
        lambda x: (x + WEIGHT.expand(len(x), -1).cumsum(0)[-1]).mean(),
        lambda x: (x @ (WEIGHT.expand(len(x), -1).T @ WEIGHT.expand(len(x), -1))).mean(),
        lambda x: x.mean() + WEIGHT.sum() * len(x),
        lambda x: (x.mean(-1) * torch.ones(len(x)).cumsum(0)).mean(),
        lambda x: (x.mean(-1) * torch.zeros(len(x)).scatter(0, torch.arange(1), 1.0)).mean(),
        lambda x: x.renorm(2, 1, 1.0).mean(),
        lambda x: x[:, : len(x)].diagonal().mean(),
    ],
)
def test_what_depends_on_a_place_in_the_batch_or_on_other_samples_is_no_mean(loss: Any) -> None:
    """Ones that are counted up are others at each place, and so is a row that a value is put into; a number that is
    drawn for the whole batch, and a sum of as many copies as there are samples, are others in each part of it."""
    assert read_off(lambda samples: torch.rand(samples, 8), loss)[0] is None


@each(
    "loss",
    [
        lambda x: written(x, lambda values: values[:, 0].zero_()),
        lambda x: x.mean() + WEIGHT.expand(len(x), -1).square().mean(),
        lambda x: functional.dropout(WEIGHT.expand(len(x), -1) + 0 * x, 0.5).mean(),
        lambda x: (x * functional.dropout(WEIGHT.expand(len(x), -1), 0.5)).mean(),
        lambda x: (x * functional.dropout(WEIGHT, 0.0)).mean(),
        lambda x: torch.stack([torch.cat([one, WEIGHT]) for one in x]).mean(),
    ],
)
def test_what_is_done_to_every_sample_alike_is_a_mean(loss: Any) -> None:
    assert read_off(lambda samples: torch.rand(samples, 8), loss) == ("mean", "")


def test_every_second_label_is_not_taken_for_all_but_the_first() -> None:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(samples, 4, 3), "labels": torch.ones(samples, 8, dtype=torch.long)}

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        second = batch["labels"].view(len(batch["x"]), 4, 2)[..., 1:]
        return functional.cross_entropy(batch["x"].flatten(0, 1), second.flatten())

    assert read_off(batch, loss)[0] is None


def test_a_step_that_decides_by_its_loss_is_named_by_its_line() -> None:
    def loss(model: Any, batch: Any) -> Any:
        found = model(batch["x"]).square().mean()
        return found if torch.isfinite(found) else None

    step = TrainingStep(torch.nn.Linear(4, 2), _rows, loss, torch.optim.SGD)
    kind, why = LossGraph(step).reduction(8, probe_layout(_rows))
    assert kind is None
    assert "test_loss_terms.py:" in why


def _rows(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(samples, 4)}
