"""What a loss is over its batch, read from its graph: real losses of torch, real and symbolic."""

from __future__ import annotations

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


def losses(samples: int, device: str, x: Any = None, y: Any = None) -> dict[str, torch.Tensor]:
    """Every loss, of a batch of so many samples of five positions and six classes."""
    x = torch.randn(samples, 5, 6, device=device, requires_grad=True) if x is None else x
    y = torch.zeros(samples, 5, dtype=torch.long, device=device) if y is None else y
    truth, weights = x.detach(), torch.ones(6, device=device, requires_grad=True)
    flat, centre = (x.flatten(0, 1), y.flatten()), x.mean()
    return {
        "mean": functional.cross_entropy(*flat),
        "divided": functional.cross_entropy(*flat) / 4,
        "of images": functional.cross_entropy(x.transpose(1, 2)[..., None], y[..., None]),
        "by hand": functional.mse_loss(x, truth, reduction="none").sum((1, 2)).mean(),
        "divided sum": x.square().sum() / samples,
        "batchmean": functional.kl_div(x, truth, reduction="batchmean"),
        "of two": 3 - x.mean() - 0.5 * x.square().mean((0, 1, 2)).float(),
        "binary": functional.binary_cross_entropy_with_logits(x, truth) * 0.5,
        "sum": functional.mse_loss(x, truth, reduction="sum"),
        "sum over a constant": x.square().sum() / 100,
        "mean times samples": functional.l1_loss(x, truth) * samples,
        "labels, summed": functional.cross_entropy(*flat, reduction="sum"),
        "mean and sum": x.mean() + x.sum(),
        "over the batch first": x.mean(0).square().sum(),
        "logarithm": x.square().mean().log(),
        "loop": sum((x[at].mean() for at in range(samples)), torch.zeros((), device=device)) / samples,
        "penalised": functional.mse_loss(x, truth) + 0.1 * weights.square().sum(),
        "sum, penalised": x.square().sum() + 0.1 * weights.square().sum(),
        "of weights alone": weights.exp().sum().exp(),
        "balanced": x.mean() + (x.softmax(-1).mean((0, 1)) * weights).sum(),
        "compared": functional.cross_entropy(x[:, 0] @ x[:, 1].t(), torch.arange(samples, device=device)),
        "compared, no labels": (x[:, 0] @ x[:, 1].t()).log_softmax(-1).diagonal().mean(),
        "class weights": functional.cross_entropy(*flat, weight=weights.detach()),
        "softmax over samples": (x.softmax(0) * truth).mean(),
        "centred": (x - x.mean(0)).square().mean(),
        "pairs": (x[:, None, 0] - x[None, :, 0]).abs().mean(2).sum(1).mean(),
        "neighbours": (x - x.roll(1, 0)).square().mean(),
        "hardest": x.square().flatten().topk(2 * samples)[0].mean(),
        "halves": (x[::2] * x[1::2]).mean(),
        "of a graph": (torch.ones(samples, samples, device=device) @ x[:, 0]).square().mean(),
        "of attention": functional.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).square().mean(),
        "of attention within": functional.scaled_dot_product_attention(x, x, x).square().mean(),
        "convolved": functional.conv1d(x, torch.ones(3, 5, 3, device=device)).square().mean(),
        "of inputs' mean": x.square().mean() + (truth.mean(0) @ weights).square().sum(),
        "unknown": x.square().flatten(1).diag_embed().mean(),
        "picked": x.flatten(1)[torch.arange(samples, device=device), y[:, 0]].mean(),
        "used again": centre + (x - centre).square().mean(),
    }


EXPECTED = {
    **dict.fromkeys(
        ("by hand", "divided sum", "batchmean", "of two", "binary", "of attention within", "convolved", "picked",
         "penalised", "loop", "balanced"), "mean"),
    **dict.fromkeys(("mean", "divided", "of images"), "labels"),
    **dict.fromkeys(("sum", "sum over a constant", "mean times samples", "labels, summed"), "sum"),
}  # fmt: skip


def of_sizes(name: str, device: str) -> tuple[Any, str]:
    forms = []
    for samples in (8, 4):
        x = torch.randn(samples, 5, 6, device=device)
        batch = {"x": x, "y": torch.zeros(samples, 5, dtype=torch.long, device=device)}
        apart = SamplesApart(batch, samples, split(batch, samples, 1))
        with apart:
            loss = losses(samples, device, batch["x"] * torch.ones(6, device=device, requires_grad=True), batch["y"])
        forms.append(apart.form(loss[name]))
    found, why = form_over_samples(*forms)
    return ("labels" if isinstance(found, Normaliser) else found), why


@each("name", losses(2, "meta"))
def test_what_a_loss_is_over_its_batch(name: str) -> None:
    found, why = of_sizes(name, "cpu")
    assert found == EXPECTED.get(name), why
    assert bool(why) == (found is None)


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
        forms = []
        for samples in (8, 4):
            labels = torch.ones(samples, 8, dtype=torch.long)
            given = {"input_values": torch.randn(samples, 4000)} if expected == "checked" else {"input_ids": labels}
            batch = {**given, "labels": labels.clone()}
            apart = SamplesApart(batch, samples, split(batch, samples, 1))
            with apart:
                loss = model.train()(**batch).loss
            forms.append(apart.form(loss))
        found, why = form_over_samples(*forms)
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
