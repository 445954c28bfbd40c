"""A forward in slices: outputs and gradients of the whole batch, whatever the script does with them."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.microbatch import probe_layout
from vram_guard.apply.normalisers import Normaliser
from vram_guard.apply.sliced_forward import ITEMS_IN_BATCH, slice_forward
from vram_guard.errors import LossChangedError, UnsupportedStepError, UnsupportedTechniqueError


class Output(NamedTuple):
    rows: torch.Tensor
    name: str


class Net(nn.Module):
    """Counts the samples of each call, and answers in the form that it is asked for."""

    def __init__(self, form: str = "tensor", dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(dropout)
        self.form = form
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        self.calls.append(len(x))
        out = self.last(self.dropout(torch.relu(self.first(x))))
        if self.form == "tensor":
            return out
        if self.form == "named":
            return Output(out, "kept")
        if self.form == "nested":
            return [out, {"mean": out.mean(), "size": len(x)}, (out.argmax(-1),)]
        num_items_in_batch = None if self.form == "mean" else num_items_in_batch
        reduction = "sum" if num_items_in_batch is not None else "mean"
        loss = nn.functional.cross_entropy(out.flatten(0, -2), labels.flatten(), reduction=reduction)
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return {"loss": loss, "logits": out}


def twins(form: str = "tensor", micro: int = 4, **more: Any) -> tuple[Net, Net]:
    torch.manual_seed(0)
    whole = Net(form, **more).double()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, micro)
    return whole, sliced


def same_gradients(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(10, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))


Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])


def test_a_loss_outside_the_model_runs_each_forward_twice(x: torch.Tensor) -> None:
    whole, sliced = twins()
    for model in (whole, sliced):
        # A loss that is no mean over samples: the outputs as a whole decide.
        (model(x).logsumexp(0).sum() / 3).backward()
    same_gradients(whole, sliced)
    assert whole.calls == [10]
    assert sliced.calls == [4, 3, 3] * 2


def test_a_loss_inside_the_model_runs_nothing_twice(x: torch.Tensor) -> None:
    whole, sliced = twins("loss")
    losses = []
    for model in (whole, sliced):
        out = model(x, labels=Y)
        (out["loss"] / 7).backward()
        losses.append(out["loss"].item())
    assert losses[0] == pytest.approx(losses[1])
    same_gradients(whole, sliced)
    assert sliced.calls == [4, 3, 3]


def test_a_loss_that_is_computed_beside_the_returned_one_costs_no_backward_of_that(x: torch.Tensor) -> None:
    whole, _ = twins("loss")
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, 4, returns_loss=False)
    for model in (whole, sliced):
        out = model(x, labels=Y)
        (nn.functional.cross_entropy(out["logits"], Y, label_smoothing=0.1) + 0.5 * out["loss"]).backward()
    same_gradients(whole, sliced)
    assert sliced.calls == [4, 3, 3] * 2


def test_a_loss_that_is_a_sum_is_added_up(x: torch.Tensor) -> None:
    class Summed(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().sum()}

    whole = Summed().double()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, 4, loss_weight="sum")
    losses = [model(x)["loss"] for model in (whole, sliced)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    same_gradients(whole, sliced)
    assert sliced.calls == [4, 3, 3]


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("returns_loss", [True, False])
def test_a_slice_in_which_nothing_counts_changes_nothing(x: torch.Tensor, empty: int, returns_loss: bool) -> None:
    """Its own loss is 0 / 0, and so are that one's gradients."""

    class Masked(Net):
        def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
            out = super().forward(x)
            of_each = out.square().mean(-1)
            return {"loss": (of_each * labels).sum() / labels.sum(), "outputs": out}

    whole = Masked().double()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, 5, loss_weight=Normaliser(("labels",), "sum"), returns_loss=returns_loss)
    mask = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 0, 0]).double().roll(5 * (1 - empty))
    losses = [model(x, labels=mask)["loss"] for model in (whole, sliced)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    same_gradients(whole, sliced)


class Late(Net):
    """A loss that becomes another one."""

    late = False

    def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"].sqrt()} if self.late else out


def test_from_where_the_loss_is_another_one_calls_run_as_written(x: torch.Tensor) -> None:
    net = Late("loss", dropout=0.5).double()
    twin = copy.deepcopy(net)
    slice_forward(net, 10, 5, graphs=LossGraphs(net))
    labels = torch.arange(10) % 3
    net(x, labels)["loss"].backward()
    net.late = twin.late = True

    def called(one: Net) -> torch.Tensor:
        torch.manual_seed(1)
        found: torch.Tensor = one(x, labels)["loss"]
        return found

    with pytest.warns(UserWarning, match="run as written"):
        first = called(net)
    assert first == called(net) == called(twin)
    assert net.calls == [5, 5, 5, 10, 10]


def test_weights_that_are_frozen_since_excuse_no_later_change() -> None:
    """A layer is frozen, which leaves the graph's operators as they are; some batches later one block joins samples."""
    blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    graphs, joins = LossGraphs(blocks), False

    def loss() -> torch.Tensor:
        x = torch.ones(3, 2)
        for at, block in enumerate(blocks):
            x = block(x).relu()
            x = x - x.mean(0) if joins and at == 1 else x
        return x.square().mean()

    graphs.check(loss())
    graphs.next_batch()
    blocks[3].bias.requires_grad_(requires_grad=False)
    graphs.check(loss())
    joins = True
    with pytest.raises(LossChangedError):
        graphs.check(loss())


def test_where_slices_have_moved_statistics_another_loss_stops_before_it_is_learned(x: torch.Tensor) -> None:
    net = Late("loss").double()
    net.norm = nn.BatchNorm1d(2)
    slice_forward(net, 10, 5, graphs=LossGraphs(net))
    net(x, torch.arange(10) % 3)["loss"].backward()
    net.late = True
    with pytest.raises(LossChangedError, match="SqrtBackward0"):
        net(x, torch.arange(10) % 3)


def test_a_loss_that_is_weighed_by_a_part_that_a_call_lacks_is_refused(x: torch.Tensor) -> None:
    _, sliced = twins("loss")
    slice_forward(sliced, 10, 5, loss_weight=Normaliser(("labels",)))
    with pytest.raises(UnsupportedTechniqueError, match=r"the number of values other than -100 in batch\['labels'\]"):
        sliced(x, Y)
    with torch.no_grad():
        assert len(sliced(x, Y)["logits"]) == 10


def test_loss_and_outputs_may_both_carry_gradient(x: torch.Tensor) -> None:
    whole, sliced = twins("loss")
    for model in (whole, sliced):
        out = model(x, labels=Y)
        (out["loss"] + out["logits"].square().mean()).backward()
    same_gradients(whole, sliced)


def test_the_gradient_of_the_input_is_whole(x: torch.Tensor) -> None:
    whole, sliced = twins()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, given in zip((whole, sliced), inputs, strict=True):
        model(given * 2).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("form", ["tensor", "named", "nested"])
def test_outputs_keep_their_form(x: torch.Tensor, form: str) -> None:
    whole, sliced = twins(form)
    one, other = whole(x), sliced(x)
    assert type(one) is type(other)
    if form == "named":
        torch.testing.assert_close(one.rows, other.rows)
        assert other.name == "kept"
    if form == "nested":
        torch.testing.assert_close(one[0], other[0])
        torch.testing.assert_close(one[1]["mean"], other[1]["mean"])
        assert torch.equal(one[2][0], other[2][0])
        (other[0].sum() + other[1]["mean"]).backward()
        (one[0].sum() + one[1]["mean"]).backward()
        same_gradients(whole, sliced)


def test_a_short_batch_is_sliced_too(x: torch.Tensor) -> None:
    whole, sliced = twins()
    for model in (whole, sliced):
        model(x).sum().backward()
        model(x[:5]).square().sum().backward()
    same_gradients(whole, sliced)
    assert sliced.calls[6:] == [3, 2, 3, 2]


def test_evaluation_and_frozen_models_stay_whole(x: torch.Tensor) -> None:
    _, sliced = twins()
    with torch.no_grad():
        sliced(x)
    sliced.eval()(x)
    sliced.train().requires_grad_(requires_grad=False)(x)
    assert sliced.calls == [10, 10, 10]


def test_a_forward_that_runs_again_has_the_same_random_numbers(x: torch.Tensor) -> None:
    _, sliced = twins(dropout=0.5)
    sliced.last.weight.data.fill_(1.0)
    sliced.last.bias.data.fill_(0.0)
    torch.manual_seed(3)
    out = sliced(x)
    after = torch.get_rng_state()
    out[:, 0].sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    # With weights of one, an output is the sum of what dropout left: so is the gradient of its weights.
    torch.testing.assert_close(sliced.last.weight.grad[0].sum(), out[:, 0].sum())


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_layers_dropped_by_any_generator_are_dropped_again(x: torch.Tensor, draw: Any) -> None:
    """LayerDrop: the second forward of a slice must skip the layers that the first one skipped."""

    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
            self.ran: list[list[int]] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ran.append([at for at in range(len(self.layers)) if draw() < 0.5])
            for at in self.ran[-1]:
                x = self.layers[at](x)
            return x

    model = LayerDrop().double()
    slice_forward(model, 10, 4)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    model(x).sum().backward()
    assert model.ran[:3] == model.ran[3:]
    assert len({tuple(run) for run in model.ran}) > 1
    used = set().union(*model.ran[:3])
    assert [layer.weight.grad is not None for layer in model.layers] == [at in used for at in range(8)]


def test_labels_that_are_ignored_do_not_count(x: torch.Tensor) -> None:
    labels = Y[:, None].repeat(1, 4)
    labels[0], labels[5, 1:] = -100, -100
    whole, sliced = twins("loss")
    x = x[:, None].repeat(1, 4, 1)
    for model in (whole, sliced):
        model(x, labels=labels)["loss"].backward()
    same_gradients(whole, sliced)


def test_semantic_segmentation_ignores_a_label_of_its_own(x: torch.Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "SegformerForSemanticSegmentation"):
        pytest.skip("this release of transformers makes no SegFormer with this torch")
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "decoder_hidden_size": 8}
    none = dict.fromkeys(("drop_path_rate", "hidden_dropout_prob", "classifier_dropout_prob"), 0.0)
    torch.manual_seed(0)
    whole = SegformerForSemanticSegmentation(SegformerConfig(num_labels=3, **sizes, **none)).train()
    for part in whole.modules():
        part.train(not isinstance(part, nn.BatchNorm2d))
    whole.training = True
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 4, 2)
    pixels, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4, 32, 32))
    labels[:2, 1:] = 255
    losses = [model(pixel_values=pixels, labels=labels).loss for model in (whole, sliced)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("slices", [1, 2])
def test_slices_without_any_label_leave_the_loss_a_number(x: torch.Tensor, slices: int) -> None:
    labels = Y[:, None].repeat(1, 4)
    labels[: 4 * slices] = -100  # all of the first ones
    whole, sliced = twins("loss")
    losses = [model(x[:, None].repeat(1, 4, 1), labels=labels)["loss"] for model in (whole, sliced)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    same_gradients(whole, sliced)


@pytest.mark.parametrize("kept", [0, 1])
def test_of_one_label_or_none_the_loss_is_that_of_the_whole_batch(x: torch.Tensor, kept: int) -> None:
    """Where every label is ignored, a mean over labels is undefined, in slices too."""
    labels = torch.full((len(Y), 4), -100)
    labels[0, :kept] = Y[0]
    losses = [model(x[:, None].repeat(1, 4, 1), labels=labels)["loss"] for model in twins("loss")]
    assert losses[0].isnan() == (not kept)
    torch.testing.assert_close(*losses, equal_nan=True)


@pytest.mark.parametrize("form", ["loss", "mean"])
@pytest.mark.parametrize("items", [40, torch.tensor(40)])
def test_a_number_of_items_counts_where_the_model_divides_by_it(x: torch.Tensor, form: str, items: Any) -> None:
    """Many of Transformers' models take the number, and return a mean all the same (BertForMaskedLM)."""
    whole, sliced = twins(form)
    for _ in range(2):
        losses = [model(x, labels=Y, **{ITEMS_IN_BATCH: items})["loss"] for model in (whole, sliced)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    same_gradients(whole, sliced)


def test_running_statistics_are_those_of_one_pass() -> None:
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    by_hand = copy.deepcopy(model)
    slice_forward(model, 8, 4)
    model(x).sum().backward()
    for part in (x[:4], x[4:]):
        by_hand(part)
    torch.testing.assert_close(model[0].running_mean, by_hand[0].running_mean)
    assert model[0].num_batches_tracked == 2
    assert model[0].momentum == 0.1


@pytest.mark.parametrize("form", ["tensor", "loss"])
def test_autocast_around_the_forward_holds_for_the_second_one(x: torch.Tensor, form: str) -> None:
    whole, sliced = twins(form)
    whole, sliced, x = whole.float(), sliced.float(), x.float()
    for model in (whole, sliced):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, labels=Y)
            loss = out["loss"] if form == "loss" else nn.functional.cross_entropy(out, Y)
        loss.backward()
    for a, b in zip(whole.parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.05, atol=0.005)


def test_float16_gradients_are_made_under_the_scale(x: torch.Tensor) -> None:
    whole, sliced = twins("loss")
    tiny = 1e-30
    slice_forward(sliced, 10, 5, scale=lambda: 1 / tiny)
    for model in (whole, sliced):
        (model(x, labels=Y)["loss"] * 4).backward()
    same_gradients(whole, sliced)


def test_gradients_add_up_over_calls(x: torch.Tensor) -> None:
    whole, sliced = twins("loss")
    for model in (whole, sliced):
        for _ in range(2):
            (model(x, labels=Y)["loss"] / 2).backward()
    same_gradients(whole, sliced)


def test_twice_differentiated_is_refused(x: torch.Tensor) -> None:
    _, sliced = twins()
    given = x.requires_grad_()
    with pytest.raises(UnsupportedTechniqueError, match="gradient penalty"):
        torch.autograd.grad(sliced(given).sum(), given, create_graph=True)


def test_a_copy_and_an_undone_one_are_their_own(x: torch.Tensor) -> None:
    whole, sliced = twins()
    other = copy.deepcopy(sliced)
    other(x).sum().backward()
    assert sliced.calls == []
    assert sliced.first.weight.grad is None
    undo = slice_forward(whole, 10, 2)
    undo()
    whole(x)
    assert whole.calls == [10]
    assert "forward" not in vars(whole)


def test_a_batch_that_cannot_be_sliced_runs_whole(x: torch.Tensor) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.weight * one.sum() * other.sum()

    model = Pair()
    slice_forward(model, 10, 4)
    with pytest.warns(UserWarning, match="trained without splitting it"):
        model(torch.ones(7), torch.ones(9)).backward()
    assert model.weight.grad == 63
    traced = Pair()
    slice_forward(traced, 10, 4, at_most=2)
    with pytest.raises(UnsupportedStepError, match="cannot split"):
        traced(torch.ones(7), torch.ones(9))


class Odd(nn.Module):
    """Parameters whose gradients autograd hands out in one piece of memory, or in memory that cannot be written to."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.alone, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.ones(1))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.tanh(x + (self.one + self.other)).sum(1, keepdim=True)
        if self.form == "scalar":
            return rows.mean() + self.alone.sum()
        return rows.flatten() if self.form == "flat" else (rows * self.alone, self.scale.exp())


def odd_twins(form: str, micro: int = 4) -> tuple[Odd, Odd]:
    torch.manual_seed(0)
    whole = Odd(form).double()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, micro)
    return whole, sliced


def test_gradients_that_share_their_memory_are_added_apart(x: torch.Tensor) -> None:
    whole, sliced = odd_twins("scalar")
    for model in (whole, sliced):
        (0.5 * model(x)).backward()
        del model.scale  # not used in this form
    same_gradients(whole, sliced)


@pytest.mark.parametrize("micro", [4, 1])
def test_an_output_that_is_the_same_for_all_samples_counts_once(x: torch.Tensor, micro: int) -> None:
    """In slices of one sample, it has as many rows as each of them."""
    whole, sliced = odd_twins("rows", micro)
    for model in (whole, sliced):
        rows, scale = model(x)
        assert (rows.shape, scale.shape) == ((10, 6), (1,))
        (rows * scale).pow(2).mean().backward()
    same_gradients(whole, sliced)


def test_looking_at_two_samples_uses_no_random_numbers_and_is_done_once(x: torch.Tensor) -> None:
    whole, _ = twins(dropout=0.5)
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, 1)
    results = []
    for rows in (lambda: sliced(x), lambda: torch.cat([whole(row[None]) for row in x])):
        torch.manual_seed(7)
        results.append(torch.cat([rows(), rows()]))
    torch.testing.assert_close(*results)
    assert sliced.calls == [2] + [1] * 20


@pytest.mark.parametrize("micro", [4, 1])
def test_rows_that_are_not_samples_are_refused(micro: int) -> None:
    model = Net()
    model.last = nn.Flatten(0)  # type: ignore[assignment]
    slice_forward(model, 10, micro)
    with pytest.raises(UnsupportedTechniqueError):
        model(torch.randn(10, 6))


@pytest.mark.parametrize("form", ["tensor", "loss"])
def test_a_single_sample_may_be_left_for_the_last_slice(x: torch.Tensor, form: str) -> None:
    whole, sliced = twins(form, micro=2)
    for model in (whole, sliced):
        out = model(x[:3], labels=Y[:3])
        (out["loss"] if form == "loss" else out.pow(2).mean()).backward()
    assert sliced.calls[:2] == [2, 1]
    same_gradients(whole, sliced)


def test_a_model_that_answers_one_sample_in_another_form_is_refused_in_slices_of_one(x: torch.Tensor) -> None:
    class Sparing(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return (out, out.mean(0, keepdim=True)) if len(x) > 1 else (out,)

    model = Sparing().double()
    slice_forward(model, 10, 1)
    with pytest.raises(UnsupportedTechniqueError):
        model(x)


def test_a_number_that_carries_gradient_is_an_input_too(x: torch.Tensor) -> None:
    class Heated(Net):
        def forward(self, x: torch.Tensor, heat: torch.Tensor) -> Any:
            return super().forward(x) * heat

    model = Heated().double()
    heats = [torch.tensor(2.0, dtype=torch.double, requires_grad=True) for _ in range(2)]
    model(x, heats[0]).pow(2).mean().backward()
    slice_forward(model, 10, 4)
    model(x, heats[1]).pow(2).mean().backward()
    torch.testing.assert_close(heats[0].grad, heats[1].grad)


def test_a_second_backward_through_one_loss_is_refused(x: torch.Tensor) -> None:
    _, sliced = twins("loss")
    loss = sliced(x, labels=Y)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedTechniqueError, match="second backward"):
        loss.backward()


def test_a_whole_model_is_saved_without_the_guard(x: torch.Tensor) -> None:
    whole = Net().double()
    sliced = copy.deepcopy(whole)
    file = io.BytesIO()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    slice_forward(sliced, 10, 4, scale=lambda: scaler.get_scale())
    torch.save(sliced, file)
    assert b"vram_guard" not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    torch.testing.assert_close(loaded(x), whole(x))
    assert loaded.calls == [10]


class Pictures(nn.Module):
    """Takes its batch as a list of samples, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.calls: list[list[torch.Size]] = []

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.calls.append([image.shape for image in images])
        found = torch.stack([self.net(image).square().mean(0) for image in images])
        return {"loss": (found - torch.stack([target["y"] for target in targets])).square().mean()}


@pytest.mark.parametrize(("samples", "channels"), [(4, 3), (3, 3)])
@pytest.mark.parametrize("keywords", [False, True])
def test_lists_of_samples_are_cut_by_samples(samples: int, channels: int, keywords: bool) -> None:
    def call(size: int) -> dict[str, Any]:
        names = ("images", "targets") if keywords else ("0", "1")
        images = [torch.full((channels, 4), float(at + 1)) for at in range(size)]
        return dict(zip(names, (images, [{"y": torch.ones(2)} for _ in range(size)]), strict=True))

    torch.manual_seed(0)
    whole = Pictures()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, samples, 1, layout=probe_layout(call))
    for model in (whole, sliced):
        given = call(samples)
        images = [image.requires_grad_() for image in next(iter(given.values()))]
        out = model(**given) if keywords else model(*given.values())
        out["loss"].backward()
        assert all(image.grad is not None for image in images)
        model.grads = [image.grad for image in images]
    same_gradients(whole, sliced)
    for one, other in zip(whole.grads, sliced.grads, strict=True):
        torch.testing.assert_close(one, other)
    assert sliced.calls[-1] == [torch.Size((channels, 4))]


def test_a_list_that_reads_in_two_ways_is_trained_on_whole() -> None:
    model = Pictures()
    slice_forward(model, 3, 1)
    with pytest.warns(UserWarning, match="may be samples or columns.*trained without splitting it"):
        model([torch.ones(3, 4)] * 3, [{"y": torch.ones(2)}] * 3)["loss"].backward()
    assert [len(call) for call in model.calls] == [3]


def test_inputs_with_gradient_in_any_container_get_theirs(x: torch.Tensor) -> None:
    """Rows of a tensor, samples of a list, and what is shared by all slices, in one call."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def forward(self, batch: Row) -> torch.Tensor:
            rows = batch.x + torch.stack(batch.each) + batch.shared
            return self.net(rows)

    @dataclasses.dataclass
    class Row:
        each: list[torch.Tensor]
        x: torch.Tensor
        shared: torch.Tensor

    torch.manual_seed(0)
    whole = Mixed().double()
    sliced = copy.deepcopy(whole)
    slice_forward(sliced, 10, 4)
    found = []
    for model in (whole, sliced):
        each = [torch.full((6,), float(at), dtype=torch.double, requires_grad=True) for at in range(10)]
        given = Row(each, x.clone().requires_grad_(), torch.ones(1, 6, dtype=torch.double, requires_grad=True))
        model(given).square().sum().backward()
        found.append([*(one.grad for one in each), given.x.grad, given.shared.grad])
    same_gradients(whole, sliced)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
