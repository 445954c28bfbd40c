"""Losses of all kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from .harness import MICRO, TIGHT, unchanged
from .lightning import Base, Rows, Training, case, loader

#: What has to be named: the loss, or the first gradient that comes out otherwise.
CAUSE = r"\bloss|gradient of|reduc|normali|mean over"


def loss(*fields: str, exact: bool = False, tight: bool = False, **more: Any) -> Any:
    """Register ``function(module, out, batch)``, or several by their names; ``out`` are scores of the first field."""

    def row(name: str, function: Callable[..., torch.Tensor]) -> None:
        def make() -> Training:
            class OfLoss(Base):
                def loss(self, batch: Any) -> torch.Tensor:
                    return function(self, self.net(batch[fields[0]]), batch)

            module = OfLoss()
            for part, value in more.get("parts", dict)().items():
                setattr(module, part, value)
            for buffer, value in more.get("buffers", {}).items():
                module.register_buffer(buffer, value.clone())
            return Training(module, loader(Rows(*fields)), callbacks=[one() for one in more.get("callbacks", ())])

        says = "" if exact else CAUSE
        case(f"loss {name}", unchanged(name), MICRO, *([TIGHT] if tight else []), says=says, exact=exact,
             tolerance=more.get("tolerance"))(make)  # fmt: skip

    def register(function: Callable[..., torch.Tensor] | None = None, **functions: Callable[..., torch.Tensor]) -> Any:
        for name, one in ({function.__name__: function} if function else functions).items():
            row(name, one)
        return function

    return register


def flat(out: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out.flatten(0, -2), labels.flatten()


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])

# --- means over samples, or over positions of equal numbers -------------------------------------------------


loss("x", "y", exact=True, tight=True)(squared=lambda m, out, b: F.mse_loss(out, b["y"]))
loss("x", "label", exact=True, tight=True)(
    cross_entropy=lambda m, out, b: F.cross_entropy(out, b["label"]),
    label_smoothing=lambda m, out, b: F.cross_entropy(out, b["label"], label_smoothing=0.1),
)
loss("x", "y", exact=True)(
    absolute=lambda m, out, b: F.l1_loss(out, b["y"]),
    huber=lambda m, out, b: F.huber_loss(out, b["y"]) + F.smooth_l1_loss(out, b["y"]),
)
loss("x", "label", exact=True)(
    binary=lambda m, out, b: F.binary_cross_entropy_with_logits(out, F.one_hot(b["label"], 4).float()),
    binary_with_positive_weights=lambda m, out, b: F.binary_cross_entropy_with_logits(
        out, F.one_hot(b["label"], 4).float(), pos_weight=WEIGHTS
    ),
    binary_with_element_weights=lambda m, out, b: F.binary_cross_entropy_with_logits(
        out, F.one_hot(b["label"], 4).float(), weight=WEIGHTS
    ),
)
loss("x", "y", exact=True)(
    sum_by_length=lambda m, out, b: (out - b["y"]).square().sum() / len(out),
    sum_of_dimensions_mean_of_samples=lambda m, out, b: (out - b["y"]).square().sum(-1).mean(),
)
loss("x", "label", "y", exact=True, tight=True)(
    several_tasks=lambda m, out, b: F.cross_entropy(out, b["label"]) + 0.3 * F.mse_loss(out, b["y"])
)


@loss("x", "label", "y", exact=True, parts=lambda: {"spread": nn.Parameter(torch.zeros(2))})
def learned_task_weights(m, out, b):
    losses = torch.stack([F.cross_entropy(out, b["label"]), F.mse_loss(out, b["y"])])
    return (losses * torch.exp(-m.spread) + m.spread).sum()


loss("x", "y", exact=True)(
    divergence_by_batch=lambda m, out, b: F.kl_div(out.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    distillation=lambda m, out, b: (
        F.kl_div((out / 4).log_softmax(-1), (b["y"] / 4).log_softmax(-1), log_target=True, reduction="batchmean") * 16
    ),
)


@loss("x", "label", exact=True)
def focal(m, out, b):
    of_each = F.cross_entropy(out, b["label"], reduction="none")
    return ((1 - torch.exp(-of_each)) ** 2 * of_each).mean()


loss("x", "y", exact=True)(
    gaussian_likelihood=lambda m, out, b: F.gaussian_nll_loss(out, b["y"], F.softplus(out) + 0.1)
)
loss("x", "rank", exact=True)(poisson_likelihood=lambda m, out, b: F.poisson_nll_loss(out[:, 0], b["rank"]))
loss("x", "x2", "label", exact=True)(
    cosine_embedding=lambda m, out, b: F.cosine_embedding_loss(out, m.net(b["x2"].flip(-1)), 2.0 * (b["label"] > 1) - 1)
)
loss("x", "x2", exact=True)(
    triplet_of_each_sample=lambda m, out, b: F.triplet_margin_loss(out, m.net(b["x2"]), m.net(-b["x"]))
)
loss("x", "label", exact=True)(several_margins=lambda m, out, b: F.multi_margin_loss(out, b["label"]))


@loss("x", "label", exact=True)
def dice_of_each_sample(m, out, b):
    p, t = out.softmax(-1), F.one_hot(b["label"], 4)
    return (1 - 2 * (p * t).sum(-1) / (p + t).sum(-1)).mean()


loss("x", "y", exact=True)(
    root_of_each_sample=lambda m, out, b: (out - b["y"]).square().mean(-1).add(1e-6).sqrt().mean()
)


@loss("tokens", "targets", "target_length", exact=True)
def connectionist(m, out, b):
    steps = torch.full((len(out),), out.shape[1])
    return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), b["targets"], steps, b["target_length"])


loss("x", "y", exact=True)(
    with_weight_penalty=lambda m, out, b: (
        F.mse_loss(out, b["y"]) + 1e-2 * sum(p.square().sum() for p in m.net.parameters())
    ),
    with_absolute_weight_penalty=lambda m, out, b: (
        F.mse_loss(out, b["y"]) + 1e-3 * m.net.first.weight.abs().sum() + m.net.last.weight.norm() * 0.01
    ),
    with_activation_penalty=lambda m, out, b: F.mse_loss(out, b["y"]) + 0.01 * out.abs().mean(),
)


@loss("x", "y", exact=True)
def gradient_penalty_of_each_sample(m, out, b):
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)
    return F.mse_loss(out, b["y"]) + 0.1 * (slope.norm(dim=-1) - 1).square().mean()


loss("x", "y", exact=True)(
    mixture_likelihood=lambda m, out, b: (
        -torch.logsumexp(out.log_softmax(-1) - 0.5 * (out - b["y"]).square(), -1).mean()
    )
)


@loss("x", "label", exact=True)
def evidence_bound(m, out, b):
    mean, spread = out[:, :2], out[:, 2:]
    return F.cross_entropy(out, b["label"]) - 0.05 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()


loss("tokens", "token_0", exact=True)(
    tokens_of_equal_numbers=lambda m, out, b: F.cross_entropy(*flat(out, b["token_0"]))
)


# --- normalised by what the batch holds ---------------------------------------------------------------------


loss("x", "label", exact=True, tight=True, parts=lambda: {"criterion": nn.CrossEntropyLoss(weight=WEIGHTS.clone())})(
    class_weights=lambda m, out, b: m.criterion(out, b["label"])
)
loss("x", "label", exact=True, parts=lambda: {"criterion": nn.NLLLoss(weight=WEIGHTS.clone())})(
    class_weights_of_likelihoods=lambda m, out, b: m.criterion(out.log_softmax(-1), b["label"])
)


class Reweighs(Callback):
    """Changes the weights of the classes after each batch, in place and by another tensor."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 2:
            pl_module.criterion.weight = pl_module.criterion.weight.flip(0) + 0.1
        else:
            pl_module.criterion.weight[1] *= 5


loss(
    "x",
    "label",
    exact=True,
    parts=lambda: {"criterion": nn.CrossEntropyLoss(weight=WEIGHTS.clone())},
    callbacks=[Reweighs],
)(class_weights_that_a_callback_changes=lambda m, out, b: m.criterion(out, b["label"]))
loss("x", "label", exact=True, buffers={"w": WEIGHTS.double()[None]})(
    class_weights_in_another_shape_and_precision=lambda m, out, b: F.cross_entropy(
        out, b["label"], weight=m.w.squeeze(0).to(out.dtype).detach().contiguous()
    )
)
loss("x", "label", exact=True, parts=lambda: {"w": nn.Parameter(WEIGHTS.clone(), requires_grad=False)})(
    class_weights_in_a_parameter=lambda m, out, b: F.cross_entropy(out, b["label"], weight=m.w)
)


def twins() -> Any:
    one = nn.CrossEntropyLoss(weight=WEIGHTS.clone())
    return {"criterion": one, "beside": nn.CrossEntropyLoss(weight=one.weight)}


loss("x", "label", parts=twins)(class_weights_of_two_names=lambda m, out, b: m.criterion(out, b["label"]))
loss("x", "label", buffers={"w": WEIGHTS})(
    class_weights_rounded=lambda m, out, b: F.cross_entropy(out, b["label"], weight=m.w.bfloat16().to(out.dtype)),
    class_weights_of_a_buffer_of_counts=lambda m, out, b: F.cross_entropy(out, b["label"], weight=1 / m.w),
)
loss("x", "label")(
    class_weights_of_the_step=lambda m, out, b: F.cross_entropy(
        out, b["label"], weight=torch.tensor([0.2, 1.0, 3.0, 0.5], device=out.device)
    )
)
loss("x", "label", parts=lambda: {"w": WEIGHTS.clone()})(
    class_weights_in_an_attribute=lambda m, out, b: F.cross_entropy(out, b["label"], weight=m.w)
)
loss("x", "label")(class_weights_of_the_file=lambda m, out, b: F.cross_entropy(out, b["label"], weight=WEIGHTS))
loss("x", "label_255", exact=True, tight=True)(
    ignoring_255=lambda m, out, b: F.cross_entropy(out, b["label_255"], ignore_index=255)
)
loss("tokens", "token_0", exact=True)(
    ignoring_0=lambda m, out, b: F.cross_entropy(*flat(out, b["token_0"]), ignore_index=0)
)
loss("tokens", "token_-100", exact=True, tight=True)(
    ignoring_minus_100=lambda m, out, b: F.cross_entropy(*flat(out, b["token_-100"]))
)
loss("tokens", "token_255", exact=True, buffers={"w": WEIGHTS})(
    ignoring_255_with_class_weights=lambda m, out, b: F.cross_entropy(
        *flat(out, b["token_255"]), ignore_index=255, weight=m.w
    )
)
loss("tokens", "token_-100", exact=True)(
    next_tokens=lambda m, out, b: F.cross_entropy(*flat(out[:, :-1], b["token_-100"][:, 1:]))
)
loss("tokens", "mask", exact=True, tight=True)(
    masked_mean=lambda m, out, b: (out.square().mean(-1) * b["mask"]).sum() / b["mask"].sum()
)
loss("tokens", "mask")(masked_by_selection=lambda m, out, b: (out[b["mask"]] - 0.5).square().mean())
loss("x", "y", "weight", exact=True)(
    weighted_mean=lambda m, out, b: ((out - b["y"]).square().mean(-1) * b["weight"]).sum() / b["weight"].sum(),
    weighted_samples=lambda m, out, b: ((out - b["y"]).square().mean(-1) * b["weight"]).mean(),
)


@loss("x", "label")
def by_positives(m, out, b):
    positive = b["label"] == 1
    return F.binary_cross_entropy_with_logits(out[:, 0], positive.float(), reduction="sum") / positive.sum().clamp(
        min=1
    )


loss("tokens", "token_255", "y")(
    ignored_labels_and_a_mean=lambda m, out, b: (
        F.cross_entropy(*flat(out, b["token_255"]), ignore_index=255) + F.mse_loss(out[:, 0], b["y"])
    )
)


@loss("x", "label")
def rare_classes(m, out, b):
    counts = torch.bincount(b["label"], minlength=4).float()
    return F.cross_entropy(out, b["label"], weight=len(out) / (4 * counts.clamp(min=1)))


# --- sums -----------------------------------------------------------------------------------------------------


loss("x", "y", tight=True)(
    summed=lambda m, out, b: F.mse_loss(out, b["y"], reduction="sum") * 0.02,
    sum_by_eight=lambda m, out, b: (out - b["y"]).square().mean(-1).sum() / 8,
)
loss("x", "label")(sum_of_likelihoods=lambda m, out, b: F.cross_entropy(out, b["label"], reduction="sum") / 10)
loss("x", "y", "label")(
    a_sum_and_a_mean=lambda m, out, b: F.cross_entropy(out, b["label"], reduction="sum") / 10 + F.mse_loss(out, b["y"])
)
loss("x", "y")(mean_times_length=lambda m, out, b: F.mse_loss(out, b["y"]) * len(out) / 8)


# --- no mean and no sum -----------------------------------------------------------------------------------------


loss("x", "y", tight=True)(root_mean_square=lambda m, out, b: F.mse_loss(out, b["y"]).sqrt())
loss("x", "y")(logarithm_of_the_mean=lambda m, out, b: torch.log1p(F.mse_loss(out, b["y"])))


@loss("x", "label", tight=True)
def dice_of_the_batch(m, out, b):
    p, t = out.softmax(-1), F.one_hot(b["label"], 4)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


@loss("x", "label")
def tversky_by_class(m, out, b):
    p, t = out.softmax(-1), F.one_hot(b["label"], 4)
    hit = (p * t).sum(0)
    return (1 - hit / (hit + 0.3 * (p * (1 - t)).sum(0) + 0.7 * ((1 - p) * t).sum(0) + 0.1)).mean()


loss("x", "label")(
    dice_and_likelihood=lambda m, out, b: F.cross_entropy(out, b["label"]) + dice_of_the_batch(m, out, b)
)


def similar(m, out, b):
    return F.normalize(out, dim=-1) @ F.normalize(m.net(b["x2"]), dim=-1).T / 0.5


loss("x", "x2", tight=True)(contrastive=lambda m, out, b: F.cross_entropy(similar(m, out, b), torch.arange(len(out))))


@loss("x", "x2", tight=True, parts=lambda: {"scale": nn.Parameter(torch.tensor(math.log(5.0)))})
def contrastive_in_two_directions(m, out, b):
    scores, own = similar(m, out, b) * m.scale.exp(), torch.arange(len(out))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


@loss("x", "x2")
def contrastive_of_both_views(m, out, b):
    both = F.normalize(torch.cat([out, m.net(b["x2"])]), dim=-1)
    scores = (both @ both.T / 0.5).fill_diagonal_(-1e4)
    return F.cross_entropy(scores, torch.arange(len(both)).roll(len(out)))


@loss("x", "x2")
def sigmoid_of_pairs(m, out, b):
    scores = similar(m, out, b)
    return -F.logsigmoid(scores * (2 * torch.eye(len(out)) - 1)).sum() / len(out)


@loss("x", "label", tight=True)
def supervised_contrastive(m, out, b):
    z = F.normalize(out, dim=-1)
    scores = (z @ z.T / 0.5).fill_diagonal_(-1e4).log_softmax(-1)
    same = (b["label"][:, None] == b["label"]).float().fill_diagonal_(0)
    return -((scores * same).sum(-1) / same.sum(-1).clamp(min=1)).mean()


@loss("x", "rank", tight=True)
def pairs_ranked(m, out, b):
    higher = b["rank"][:, None] > b["rank"]
    return (F.softplus(-(out[:, :1] - out[:, 0])) * higher).sum() / higher.sum().clamp(min=1)


loss("x", "rank")(
    neighbours_ranked=lambda m, out, b: F.margin_ranking_loss(
        out[:-1, 0], out[1:, 0], (b["rank"][:-1] - b["rank"][1:]).sign(), margin=0.1
    ),
    list_ranked=lambda m, out, b: -(b["rank"].softmax(0) * out[:, 0].log_softmax(0)).sum(),
)


@loss("x", "label")
def hardest_triplets(m, out, b):
    far = torch.cdist(out, out.detach() + 1e-3)
    same = b["label"][:, None] == b["label"]
    return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 0.5).mean()


@loss("x", "x2", tight=True)
def experts_balanced(m, out, b):
    share = out.softmax(-1)
    taken = F.one_hot(share.argmax(-1), 4).float().mean(0)
    return F.mse_loss(out, b["x2"][:, :4]) + 0.1 * 4 * (taken * share.mean(0)).sum()


@loss("x", "y")
def routing_entropy(m, out, b):
    mean = out.softmax(-1).mean(0)
    return F.mse_loss(out, b["y"]) + 0.5 * (mean * mean.log()).sum()


@loss("x", "x2")
def variance_invariance_covariance(m, out, b):
    one, two = out, m.net(b["x2"])
    kept = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (one, two))
    cov = sum((z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1) for z in (one, two))
    return F.mse_loss(one, two) + kept + 0.04 * (cov - cov.diag().diag()).square().sum() / 4


# As with batch statistics below: a bias that cancels out.
@loss("x", "x2", tolerance=1e-3)
def barlow_twins(m, out, b):
    one, two = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (out, m.net(b["x2"])))
    cross = one.T @ two / len(out)
    return ((cross - torch.eye(4)).square() * (0.1 + 0.9 * torch.eye(4))).sum()


@loss("x", "y")
def correlation(m, out, b):
    one, two = out - out.mean(), b["y"] - b["y"].mean()
    return 1 - (one * two).sum() / (one.norm() * two.norm())


loss("x", "y")(
    explained_variance=lambda m, out, b: (out - b["y"]).square().sum() / (b["y"] - b["y"].mean(0)).square().sum(),
    worst_sample=lambda m, out, b: (out - b["y"]).square().mean(-1).max(),
)
loss("x", "label")(
    hard_examples_only=lambda m, out, b: (
        F.cross_entropy(out, b["label"], reduction="none").topk(max(1, len(out) // 2)).values.mean()
    )
)


@loss("x", "y")
def trimmed_at_the_median(m, out, b):
    of_each = (out - b["y"]).square().mean(-1)
    return of_each[of_each <= of_each.detach().median()].mean()


@loss("x", "y")
def entropic_risk(m, out, b):
    of_each = (out - b["y"]).square().mean(-1)
    return torch.logsumexp(of_each, 0) - math.log(len(out))


loss("x", "y")(
    moments_matched=lambda m, out, b: (
        (out.mean(0) - b["y"].mean(0)).square().sum() + (out.std(0) - b["y"].std(0)).square().sum()
    )
)


@loss("x", "y")
def kernels_matched(m, out, b):
    kernel = lambda p, q: torch.exp(-torch.cdist(p, q).square() / 4).mean()  # noqa: E731
    return kernel(out, out) + kernel(b["y"], b["y"]) - 2 * kernel(out, b["y"])


@loss("x", "y")
def gradient_penalty_of_the_batch(m, out, b):
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(m.net(x), b["y"]), x, create_graph=True)
    return F.mse_loss(out, b["y"]) + slope.norm()


@loss("x", "y")
def attacked_along_the_slope_of_a_mean(m, out, b):
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(m.net(x), b["y"]), x)
    return F.mse_loss(m.net(b["x"] + 3 * slope), b["y"])


@loss("x", "y")
def noise_that_two_samples_share(m, out, b):
    noise = torch.randn((len(out) + 1) // 2, 4)
    return F.mse_loss(out + torch.cat([noise, -noise])[: len(out)], b["y"])


loss("x", "y")(neighbours_smooth=lambda m, out, b: F.mse_loss(out, b["y"]) + 0.2 * (out[1:] - out[:-1]).square().mean())
loss("x", "y", "label")(
    root_beside_a_mean=lambda m, out, b: F.cross_entropy(out, b["label"]) + F.mse_loss(out, b["y"]).sqrt()
)


@loss("x", "y")
def balanced_by_its_own_size(m, out, b):
    one, two = F.mse_loss(out, b["y"]), out.abs().mean()
    return one + two * (one / two).detach()


loss("x", "y")(clipped_loss=lambda m, out, b: F.mse_loss(out, b["y"]).clamp(max=2.0))


# The gradient of a bias before a normalisation cancels out, and only rounding is left of it.
loss("x", "y", parts=lambda: {"norm": nn.BatchNorm1d(4, affine=False, track_running_stats=False)}, tolerance=1e-3)(
    batch_statistics_in_the_loss=lambda m, out, b: F.mse_loss(m.norm(out), b["y"])
)


@loss("x", "y")
def by_a_number_of_margins(m, out, b):
    missed = (out - b["y"]).abs() > 1
    return ((out - b["y"]).square() * missed).sum() / max(1, int(missed.sum()))


loss("x", "y")(
    scaled_by_the_largest=lambda m, out, b: F.mse_loss(out, b["y"]) / float(out.detach().abs().max()),
    divided_before_the_sum=lambda m, out, b: ((out - b["y"]).square().mean(-1) / len(out)).sum(),
    with_the_length_added=lambda m, out, b: F.mse_loss(m.net(b["x"] + 0.01 * len(out)), b["y"]),
)
loss("x", "label")(margin_by_the_length=lambda m, out, b: F.multi_margin_loss(out, b["label"], margin=len(out) / 8))
loss("x", "label")(
    class_weights_and_the_largest=lambda m, out, b: (
        F.cross_entropy(out, b["label"], weight=WEIGHTS) / float(out.detach().abs().max())
    )
)
loss("x", "y")(
    by_the_number_of_the_sample=lambda m, out, b: F.mse_loss(
        m.net(b["x"] + 0.1 * torch.arange(len(out))[:, None]), b["y"]
    )
)
