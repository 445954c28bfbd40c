"""What CUDA does differently from a naive trace, rule by rule."""

from __future__ import annotations

import pytest
import torch
from each import each
from torch import nn
from torch.nn import functional as F

from vram_guard.report import render
from vram_guard.scratch import Card, EmbeddingGradient
from vram_guard.simulate.operators import autocast, kernels
from vram_guard.simulate.operators.kernels import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER, CUBLASLT_WORKSPACE
from vram_guard.simulate.operators.products import copied_operands
from vram_guard.simulate.tracing.run import run_step
from vram_guard.step import Precision, TrainingStep
from vram_guard.techniques.recipe import Recipe
from vram_guard.timeline import Block, Timeline
from vram_guard.torch_release import torch_release

AMPERE = (8, 0)


def traced(model, batch, loss=None, *, capability=AMPERE, batch_size=4, **settings) -> Timeline:
    settings.setdefault("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    loss = loss or (lambda m, b: m(b).float().sum())
    return run_step(TrainingStep(model, batch, loss, **settings), batch_size, capability)


def made_by(timeline: Timeline, operator: str) -> list[Block]:
    return [block for block in timeline.blocks if operator in block.operator and not block.unknown]


def in_phase(timeline: Timeline, name: str, step: int) -> list[Block]:
    starts = [phase.start for phase in timeline.phases] + [len(timeline.events)]
    found = []
    for index, phase in enumerate(timeline.phases):
        if (phase.name, phase.step) == (name, step):
            events = timeline.events[starts[index] : starts[index + 1]]
            found += [timeline.blocks[event] for event in events if event >= 0]
    return found


def bytes_of(blocks) -> list[int]:
    return [block.size.base for block in blocks]


# --- operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_bias_is_added_in_place_where_the_input_is_not_contiguous(precision) -> None:
    """Linear.cpp, ``linear``: ``output.add_(*bias)``."""
    timeline = traced(
        nn.Linear(64, 32),
        lambda b: torch.randn(b, 100, 64),
        lambda net, batch: net(batch.transpose(0, 1)).float().sum(),
        precision=precision,
    )
    assert made_by(timeline, "aten.mm")
    assert not made_by(timeline, "aten.add")


@each(
    ("dims", "turned", "expected"),
    [((1,), False, 1), ((1, 2), False, 2), ((0, 1, 2), False, 3), ((1,), True, 2), ((1, 2), True, 3)],
)
def test_a_roll_along_several_dimensions_makes_each_of_them(dims, turned, expected) -> None:
    """TensorTransformations.h, ``roll_common``; TensorTransformations.cu, ``roll_cuda``: contiguous first."""
    timeline = traced(
        nn.Linear(8, 8),
        lambda b: torch.randn(b, 16, 8),
        lambda net, x: torch.roll(net(x).transpose(0, 1) if turned else net(x), (3,) * len(dims), dims).sum(),
    )
    made = [b for b in in_phase(timeline, "forward", 2) if b.operator == "aten.roll.default"]
    assert bytes_of(made) == [4 * 16 * 8 * 4] * expected


def test_the_buffer_of_a_log_sigmoid_is_the_cpu_s() -> None:
    timeline = traced(nn.Linear(8, 8), lambda b: torch.randn(b, 8), lambda net, x: F.logsigmoid(net(x)).sum())
    made = [b for b in in_phase(timeline, "forward", 2) if b.operator == "aten.log_sigmoid_forward.default"]
    assert bytes_of(made) == [4 * 8 * 4]


class Scored(nn.Module):
    """A hundred thousand numbers, and a loss of them."""

    def __init__(self, loss):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100_000))
        self.loss = loss

    def forward(self, x):
        return self.loss(self.weight, x[0])


@each(
    ("loss", "reduced", "as_they_are"),
    [
        (F.mse_loss, [400_000, 400_000], [400_000]),
        (F.smooth_l1_loss, [400_000, 400_000], [400_000]),
        (F.huber_loss, [400_000, 4], [400_000]),
        (F.binary_cross_entropy, [400_000, 4], [400_000]),  # Loss.cu: the elements, and their mean
        (F.soft_margin_loss, [400_000, 4], [400_000]),
        (F.binary_cross_entropy_with_logits, [400_000, 400_000, 4], [400_000, 400_000]),
    ],
)
def test_a_loss_makes_its_elements_before_it_reduces_them(loss, reduced, as_they_are) -> None:
    """Loss.cpp, each function of that name."""
    for reduction, expected in (("mean", reduced), ("sum", reduced), ("none", as_they_are)):
        model = Scored(lambda w, x, reduction=reduction: loss(w, x, reduction=reduction))
        timeline = traced(model, lambda b: torch.rand(b, 100_000))
        made = [b for b in in_phase(timeline, "forward", 2) if b.operator == f"aten.{loss.__name__}.default"]
        assert bytes_of(made)[: len(expected)] == expected


def test_weights_of_a_binary_cross_entropy_are_spread_before_its_elements() -> None:
    spread = [400_000, 8, 400_000, 400_000, 4]  # sigmoids; the weights less one; of each element; elements; mean
    model = Scored(lambda w, x: F.binary_cross_entropy_with_logits(w.view(-1, 2), x.view(-1, 2), pos_weight=x[:2]))
    timeline = traced(model, lambda b: torch.rand(b, 100_000))
    made = made_by(timeline, "aten.binary_cross_entropy_with_logits.default")
    assert bytes_of(made)[:5] == spread


@pytest.mark.parametrize(
    ("loss", "kept"),
    [(F.binary_cross_entropy, 400_000), (F.soft_margin_loss, 400_000), (F.mse_loss, 400_000), (F.huber_loss, 0)],
)
def test_some_losses_live_in_memory_for_their_elements(loss, kept) -> None:
    """Loss.cu, ``loss.resize_as_(loss_reduced)``; Loss.cpp, ``TORCH_META_FUNC(mse_loss)``: into the next forward."""
    model = Scored(loss)
    timeline = traced(model, lambda b: torch.rand(b, 100_000), lambda m, b: m(b))
    start = next(phase.start for phase in timeline.phases if (phase.name, phase.step) == ("forward", 2))
    held = [b.size.base for b in timeline.alive_at(start) if loss.__name__ in b.operator]
    assert sum(size for size in held if size > 4) == kept


def taken_by(timeline: Timeline, operator: str, phase: str = "backward") -> list[int]:
    """What an operator takes and gives back (negative) in a phase of the second step, at batch size 4."""
    start = next(at for at, p in enumerate(timeline.phases) if (p.name, p.step) == (phase, 2))
    stop = timeline.phases[start + 1].start
    events = timeline.events[timeline.phases[start].start : stop]
    blocks = [(timeline.blocks[max(event, ~event)], event >= 0) for event in events]
    sizes = [(b.bytes_at(4), new) for b, new in blocks if b.operator.startswith(f"aten.{operator}.")]
    return [size if new else -size for size, new in sizes if size]


class Weighted(nn.Module):
    """60 rows of 40 numbers, and what is made of them."""

    def __init__(self, made):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(60, 40))
        self.made = made

    def forward(self, x):
        return self.made(self.weight, x)


def weighted(made, batch=lambda b: torch.rand(b, 60, 40)) -> Timeline:
    return traced(Weighted(made), batch)


def test_the_gradient_of_a_soft_margin_loss_is_made_of_exponentials() -> None:
    """Loss.cpp: ``exp(-target * input)``, then the gradient."""
    timeline = weighted(lambda w, x: F.soft_margin_loss(w, x[0]))
    size = 60 * 40 * 4
    made = [size] * 3 + [-size] * 2 + [size, -size]  # negatives, products, exponentials; the gradient stays
    assert taken_by(timeline, "soft_margin_loss_backward") == made


def test_ones_are_scattered_into_zeros() -> None:
    """Onehot.cpp; for the meta device torch compares with a range, and converts that."""
    timeline = weighted(lambda w, x: F.one_hot(x.long(), 7) * w.sum())
    hot = [b for b in in_phase(timeline, "forward", 2) if b.bytes_at(4) >= 4 * 2400 * 7]
    assert [(b.operator, b.bytes_at(4)) for b in hot[1:]] == [  # after the indices
        ("aten.new_zeros.default", 4 * 2400 * 7 * 8),
        ("aten.mul.Tensor", 4 * 2400 * 7 * 4),
    ]


def test_values_are_not_known_once_ones_are_scattered_among_them() -> None:
    timeline = weighted(lambda w, x: w[F.one_hot((w[:, 0] > 0).long(), 2)[:, 1].bool()])
    assert timeline.tier == "partly symbolic"
    assert 60 * 40 * 4 in taken_by(timeline, "index", "forward")  # every row


def test_distances_copy_what_the_batch_repeats() -> None:
    """Distance.cpp, ``cdist_impl``; DistanceKernel.cu: a buffer of (batch, other rows, rows, features)."""
    timeline = weighted(lambda w, x: torch.cdist(w[None], x[:, :30], p=1.0))
    weight, other, pairs = 4 * 60 * 40 * 4, 4 * 30 * 40 * 4, 4 * 60 * 30 * 4
    assert taken_by(timeline, "_cdist_forward", "forward")[:3] == [weight, other, pairs]  # x[:, :30] has gaps
    assert taken_by(timeline, "_cdist_backward")[:3] == [weight, weight, pairs * 40]


def test_euclidean_distances_are_a_product_of_longer_rows() -> None:
    """Distance.cpp, ``_euclidean_dist``."""
    timeline = weighted(lambda w, x: torch.cdist(w, x[0, :50]))
    one, other = 60 * 40 * 4, 50 * 40 * 4
    assert taken_by(timeline, "_euclidean_dist", "forward") == [
        *(one, 60 * 4, -one, 60 * 4),  # squares, their sums, ones
        *(other, 50 * 4, -other, 50 * 4),
        *(one, one + 2 * 60 * 4, -60 * 4, -60 * 4, -one),  # twice the first, with two columns more
        *(other + 2 * 50 * 4, -50 * 4, -50 * 4),
        *(60 * 50 * 4, -other - 2 * 50 * 4, -one - 2 * 60 * 4),
    ]


@each(
    ("run", "operator", "sizes", "elements"),
    [
        (lambda w: torch.fft.rfft(w).real.sum(), "_fft_r2c", [60 * 21 * 8], 60 * 40),
        # Over the first two dimensions: one after the other, with a second buffer.
        (lambda w: torch.fft.rfft2(w).real.sum(), "_fft_r2c", [60 * 21 * 8] * 2, 60 * 40),
        (lambda w: torch.fft.fft(w + 0j).real.sum(), "_fft_c2c", [60 * 40 * 8], 60 * 40),
        # The input is overwritten, and so is a copy.
        (lambda w: torch.fft.irfft(w[:, :21] + 0j).sum(), "_fft_c2r", [60 * 40 * 4, 60 * 21 * 8], 60 * 40),
        # Four dimensions are two plans.
        (
            lambda w: torch.fft.fftn(w.view(6, 10, 4, 10) + 0j).real.sum(),
            "_fft_c2c",
            [60 * 40 * 8] * 2,
            60 * 40,
        ),
    ],
)
def test_a_fourier_transform_has_a_workspace_of_unknown_size(run, operator, sizes, elements) -> None:
    """SpectralOps.cpp; NVIDIA's cuFFT API Reference: at worst 8 complex numbers for each element."""
    timeline = weighted(lambda w, x: run(w))
    found = [block for block in in_phase(timeline, "forward", 2) if operator in block.operator]
    assert bytes_of(block for block in found if not block.unknown) == sizes
    assert bytes_of(block for block in found if block.unknown) == [8 * elements * 8]
    estimate = timeline.at(4)
    assert estimate.upper_reasons == ("transforms",)
    assert estimate.peak_upper >= estimate.peak_reserved + 8 * elements * 8
    assert "cuFFT's workspaces are unknown" in " ".join(render(estimate).split())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_are_sorted_whatever_their_number(mode) -> None:
    """EmbeddingBag.cu: no threshold as for an embedding; maxima are only added."""
    timeline = weighted(lambda w, x: F.embedding_bag(x, w, mode=mode), lambda b: torch.zeros(b, 500, dtype=torch.long))
    # torch before 2.6 shows the second, later releases the first.
    operators = "_embedding_bag_backward", "_embedding_bag_dense_backward"
    taken = [size for operator in operators for size in taken_by(timeline, operator) if size > 0]
    indices, pieces = 4 * 500 * 8, 4 * 500 // 10 + 60
    gradient = [4 * 40 * 4]  # of the sum, which is expanded
    if mode == "max":
        assert taken == [*gradient, 60 * 40 * 4]
    else:
        assert taken[:4] == [*gradient, indices, indices, indices]
        # Segments, and the keys that are found beside them; pieces.
        assert taken[5:] == [60 * 40 * 4, indices, indices, 60 * 8, 60 * 8, pieces * 8, pieces * 40 * 4]


@pytest.mark.parametrize("of_the_host", [True, False])
def test_a_ctc_loss_has_a_table_forward_and_one_backward(of_the_host) -> None:
    """LossCTC.cu; the lengths may lie on the host."""

    def loss(w, x):
        scores = w[:, None, :].expand(60, x.shape[0], 40).log_softmax(-1)
        lengths = torch.full((x.shape[0],), 60), torch.full((x.shape[0],), 7)
        return F.ctc_loss(scores, x[:, 0, :9].long(), *(n if of_the_host else n.to(x.device) for n in lengths))

    timeline = weighted(loss)
    table, lengths, scores = 4 * 60 * (2 * 7 + 1) * 4, 4 * 8, 60 * 4 * 40 * 4
    assert taken_by(timeline, "_ctc_loss", "forward") == [*[lengths] * 3, table, 4 * 4, *[-lengths] * 3]
    assert taken_by(timeline, "_ctc_loss_backward")[:5] == [*[lengths] * 3, table, scores]


def test_large_ctc_losses_sum_over_their_blanks() -> None:
    def loss(w, x):
        scores = w.repeat(5, 1)[:, None, :].expand(300, x.shape[0], 40).log_softmax(-1)
        return F.ctc_loss(scores, x[:, 0, :7].long(), [300] * x.shape[0], [5] * x.shape[0])

    taken = taken_by(weighted(loss), "_ctc_loss_backward")
    rows, blanks = 4 * 300 * 4, 4 * 300 * 6 * 4
    assert taken[5:9] == [blanks, rows, rows, blanks]


def test_a_mask_becomes_indices_where_values_are_put() -> None:
    """TensorAdvancedIndexing.cpp: a number fills; rows are put by their indices, whose number is the values'."""

    def put(values):
        def made(w, x):
            y = w * 1
            y[w[:, 0] > 0] = values(w)
            return y

        return taken_by(weighted(made), "index_put_", "forward")

    assert put(lambda w: 0.0) == []
    assert put(lambda w: w[:17].detach()) == [17 * 8, -17 * 8]
    assert put(lambda w: w[0]) == [60 * 8, -60 * 8]


def test_the_backward_of_a_mask_sorts_its_indices() -> None:
    timeline = weighted(lambda w, x: w[w[:, 0] > 0])
    assert [size for size in taken_by(timeline, "index_put") if size > 0][:6] == [60 * 8] * 3 + [60 * 40 * 4] + [
        480
    ] * 2


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    """Dropout.cu: the mask comes before the result."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))
    timeline = traced(model, lambda b: torch.randn(b, 32))
    assert bytes_of(made_by(timeline, "native_dropout.default"))[:2] == [4 * 32, 4 * 32 * 4]


def test_batch_norm_goes_to_cudnn_and_keeps_two_statistics() -> None:
    timeline = traced(nn.BatchNorm2d(8), lambda b: torch.randn(b, 8, 6, 6))
    assert bytes_of(made_by(timeline, "cudnn_batch_norm.default"))[:3] == [4 * 8 * 36 * 4, 8 * 4, 8 * 4]
    assert bytes_of(made_by(timeline, "cudnn_batch_norm_backward"))[:3] == [4 * 8 * 36 * 4, 8 * 4, 8 * 4]


def test_batch_norm_with_one_sample_raises_as_torch_does() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        traced(nn.BatchNorm1d(8), lambda b: torch.randn(b, 8), batch_size=1)


def test_channels_last_carries_through_convolutions() -> None:
    model = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last)
    timeline = traced(model, lambda b: torch.randn(b, 16, 8, 8).contiguous(memory_format=torch.channels_last))
    # Nothing is copied for layout's sake: one output forward; backward the weight's and the bias's gradient.
    assert len(made_by(timeline, "aten.convolution.default")) == 2  # one in each step
    mixed = traced(nn.Conv2d(16, 16, 3, padding=1), model_input_channels_last)
    copies = bytes_of(made_by(mixed, "aten.convolution.default"))
    assert copies[1] == 16 * 16 * 9 * 4  # the contiguous weight is copied to channels last for the call


def test_the_gradient_of_a_filter_comes_after_copies_of_its_operands() -> None:
    """ConvShared.cpp; recorded on an H200 for a patch embedding, whose input needs no gradient."""

    class Patches(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).flatten(2).transpose(1, 2).contiguous().square()

    timeline = traced(Patches(3, 32, 4, 4), lambda b: torch.randn(b, 3, 32, 32))
    assert taken_by(timeline, "convolution_backward")[:2] == [4 * 32 * 64 * 4, 32 * 3 * 16 * 4]


def test_channels_last_carries_through_convolutions_of_volumes() -> None:
    def batch(b: int) -> torch.Tensor:
        return torch.randn(b, 16, 4, 6, 8).contiguous(memory_format=torch.channels_last_3d)

    volume = 4 * 16 * 4 * 6 * 8 * 4
    model = nn.Conv3d(16, 16, 3, padding=1).to(memory_format=torch.channels_last_3d)
    forward = made_by(traced(model, batch), "aten.convolution.default")
    assert bytes_of(forward) == [volume] * 2  # one in each step: nothing is copied for layout's sake
    mixed = traced(nn.Conv3d(16, 16, 3, padding=1), batch)
    assert bytes_of(made_by(mixed, "aten.convolution.default"))[:2] == [volume, 16 * 16 * 27 * 4]  # the weight's copy
    plain = traced(nn.Conv3d(16, 16, 3, padding=1), lambda b: torch.randn(b, 16, 4, 6, 8))
    assert bytes_of(made_by(plain, "aten.convolution.default")) == [volume] * 2

    class OfEverySecond(nn.Conv3d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[..., ::2])

    gaps = traced(OfEverySecond(16, 16, 3, padding=1), lambda b: torch.randn(b, 16, 4, 6, 16))
    # One with gaps lies in neither layout: it is copied, and the weight is not.
    assert bytes_of(made_by(gaps, "aten.convolution.default")) == [volume, volume] * 2


def model_input_channels_last(b: int) -> torch.Tensor:
    return torch.randn(b, 16, 8, 8).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns_are_one_cudnn_call_over_flat_weights(kind: type[nn.RNNBase]) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(8, 16, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    timeline = traced(Tagger, lambda b: torch.randn(b, 5, 8))
    weights = sum(p.numel() for p in kind(8, 16, num_layers=2).parameters()) * 4
    assert bytes_of(b for b in in_phase(timeline, "setup", 0) if b.category == "parameters") == [weights]
    assert made_by(timeline, "_cudnn_rnn.default")
    assert not made_by(timeline, "aten.sigmoid")
    gradients = [b.size.base for b in in_phase(timeline, "backward", 2) if b.category == "gradients"]
    assert gradients == [weights]


def test_embedding_gradient_sorts_its_indices_only_above_3072() -> None:
    """EmbeddingBackwardKernel.cu: order, sorted indices, range; segments; the sums of pieces of ten rows in float32."""
    small, large = (
        [
            block.bytes_at(1)
            for block in in_phase(timeline, "backward", 2)
            if "embedding_dense" in block.operator and block.scratch is not None
        ]
        for timeline in (
            traced(nn.Embedding(50, 8), lambda b, each=each: torch.zeros(b, each, dtype=torch.long))
            for each in (100, 1000)
        )
    )
    assert not any(small)
    # 4,000 indices of 8 bytes; the keys that are found beside the segments; 50 rows that may occur; up to 400 + 50
    # pieces, which are summed in place where the rows are few (since torch 2.11).
    assert large[:3] == [32_000] * 3
    in_place = torch_release() >= (2, 11)
    assert [size for size in large[4:] if size] == [
        *[32_000, 32_000, 400, 400, 3_600],
        3_600 if in_place else 450 * 8 * 4,
    ]


@pytest.mark.parametrize(
    ("part", "rows", "stride", "expected"),
    [
        # Recorded on an H200 with torch 2.11: token types and words of BERT, 32 sequences of 256.
        *[("places", 2, 768, 821 * 8), ("sums", 2, 768, 0)],
        *[("places", 30522, 768, 0), ("sums", 30522, 768, (819 + 8192) * 768 * 4)],
        ("table", 2, 768, 2 * 768 * 4),
        ("sums", 2, 0, 821 * 768 * 4),  # bags, and deterministic algorithms
    ],
)
def test_few_rows_of_an_embedding_are_summed_in_place(part, rows, stride, expected) -> None:
    """EmbeddingBackwardKernel.cu, ``use_fused_kernel``."""
    width = 8 if part == "places" else 768 * 4
    assert EmbeddingGradient(part, rows, width, stride=stride).bytes((8192,), Card((9, 0), 132)) == expected


@pytest.mark.parametrize(("capability", "size"), [((8, 6), CUBLAS_WORKSPACE), ((9, 0), CUBLAS_WORKSPACE_HOPPER)])
def test_cublas_takes_a_workspace_in_each_thread(capability: tuple[int, int], size: int) -> None:
    timeline = traced(nn.Linear(8, 8), lambda b: torch.randn(b, 8), capability=capability)
    own = [CUBLASLT_WORKSPACE] if (2, 9) <= torch_release() <= (2, 11) else []
    assert bytes_of(b for b in timeline.blocks if b.category == "workspace") == [size, *own, size]


@pytest.mark.parametrize(("release", "own"), [((2, 8), []), ((2, 9), [2**20]), ((2, 11), [2**20]), ((2, 12), [])])
def test_cublas_lt_keeps_a_workspace_of_its_own_in_some_releases(monkeypatch, release, own) -> None:
    """CublasHandlePool.cpp; recorded on an H200 with torch 2.11: after cuBLAS's, for products with a bias."""
    monkeypatch.setattr(kernels, "torch_release", lambda: release)
    for bias, expected in ((True, [CUBLAS_WORKSPACE_HOPPER, *own]), (False, [CUBLAS_WORKSPACE_HOPPER])):
        timeline = traced(nn.Linear(8, 8, bias=bias), lambda b: torch.randn(b, 8), capability=(9, 0))
        workspaces = bytes_of(b for b in timeline.blocks if b.category == "workspace")
        assert workspaces == [*expected, CUBLAS_WORKSPACE_HOPPER]


@each(
    ("left", "right", "copied"),
    [
        # Recorded on an H200: the products of a Fourier layer (144 frequencies, 16 samples, 32 channels).
        *[(lambda x: x, lambda w: w.permute(2, 0, 1), [1]), (lambda x: x, lambda w: w.permute(2, 0, 1).conj(), [1])],
        (lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1), lambda w: w.permute(2, 0, 1), [1, 0]),
        (lambda x: x, lambda w: w.permute(2, 0, 1).contiguous(), []),
        (lambda x: x, lambda w: w.permute(2, 1, 0).contiguous().mT, []),
        (lambda x: x, lambda w: w.permute(2, 0, 1).contiguous().conj(), [1]),
        (lambda x: x, lambda w: w.permute(2, 1, 0).contiguous().mH, []),
        (lambda x: x, lambda w: w.permute(2, 0, 1).contiguous()[:, :, :1].expand(-1, -1, 32), [1]),
    ],
)
def test_batched_products_copy_what_lies_neither_by_rows_nor_by_columns(left, right, copied) -> None:
    """Blas.cpp, ``prepare_batch_matrix_for_cublas``."""
    operands = (
        left(torch.empty(144, 16, 32, dtype=torch.complex64, device="meta")),
        right(torch.empty(32, 32, 144, dtype=torch.complex64, device="meta")),
    )
    found = copied_operands(torch.ops.aten.bmm.default, operands, torch.bmm(*operands))
    assert found == [(589_824, 1_179_648)[at] for at in copied]


def test_copies_of_operands_come_after_the_result() -> None:
    timeline = weighted(lambda w, x: torch.bmm(x[:, :, ::2], w[:20].expand(x.shape[0], 20, 40)))
    assert taken_by(timeline, "bmm", "forward")[:3] == [4 * 60 * 40 * 4, 4 * 60 * 20 * 4, -4 * 60 * 20 * 4]


# --- attention -----------------------------------------------------------------------------------------------------


class Attended(nn.Module):
    """Attention of one learnt query, key and value of each head."""

    def __init__(self, dtype: torch.dtype, head: int, mask: object, **settings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 16, head, dtype=dtype))
        self.mask, self.settings = mask, settings

    def forward(self, x):
        qkv = [self.weight * x.to(self.weight.dtype).view(-1, 1, 1, 1) for _ in range(3)]
        mask = self.mask(x) if callable(self.mask) else None
        return F.scaled_dot_product_attention(*qkv, mask, **self.settings)


def backend(dtype, capability, head=64, mask: object = None, **settings) -> str:
    """Which kernel the forward of an attention is traced with."""
    timeline = traced(Attended(dtype, head, mask, **settings), lambda b: torch.rand(b), capability=capability)
    operators = {block.operator for block in timeline.blocks}
    names = ("flash", "efficient", "cudnn")
    return next((name for name in names if f"aten._scaled_dot_product_{name}_attention.default" in operators), "math")


@each(
    ("dtype", "capability", "mask", "head", "causal", "expected"),
    [
        (torch.float16, (8, 0), False, 64, False, "flash"),
        (torch.bfloat16, (8, 6), False, 64, True, "flash"),
        (torch.float16, (7, 5), False, 64, False, "efficient"),  # flash needs 8.0
        (torch.bfloat16, (7, 5), False, 64, False, "math"),  # neither takes bfloat16 before 8.0
        (torch.float32, (8, 0), False, 64, True, "efficient"),
        (torch.float16, (8, 0), True, 64, False, "efficient"),  # flash takes no mask
        (torch.float32, (8, 0), False, 6, False, "math"),  # 6 is not aligned to 4 elements
        (torch.float32, (7, 0), False, 6, False, "efficient"),  # before 8.0 float32 has no alignment
        (torch.float16, (8, 0), False, 320, False, "efficient"),  # over 256: not flash
        (torch.float16, (8, 0), True, 36, False, "math"),  # half precision is aligned to 8 elements, float32 to 4
        (torch.float32, (8, 0), True, 36, False, "efficient"),
        (torch.float16, (8, 0), False, 36, False, "flash"),  # which pads
        (torch.float64, (8, 0), False, 64, False, "math"),
    ],
)
def test_the_attention_backend_is_the_one_cuda_picks(dtype, capability, mask, head, causal, expected) -> None:
    one = (lambda x: torch.zeros(len(x), 1, 16, 16, dtype=dtype, device=x.device)) if mask else None
    assert backend(dtype, capability, head, one, is_causal=causal) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_that_is_expanded_over_the_keys_is_taken_by_no_kernel(dtype: torch.dtype) -> None:
    """A compiled ViT on an H200 kept its probabilities: transformers' mask of ones is one value for all keys."""

    def mask(x):
        return torch.ones(len(x), 1, 16, 1, dtype=torch.bool, device=x.device).expand(-1, 1, 16, 16)

    assert backend(dtype, AMPERE, mask=mask) == "math"
    assert backend(dtype, AMPERE, mask=lambda x: mask(x).contiguous()) == "efficient"


def test_the_users_choice_of_backend_is_honoured() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert backend(torch.float16, AMPERE) == "math"


class Attention(nn.Module):
    def __init__(self, mask: torch.Tensor | None = None, heads: int = 4, **settings) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(64, 192, bias=False)
        self.register_buffer("mask", mask)
        self.settings = settings

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask, **self.settings)


def test_flash_attention_saves_no_square_matrix() -> None:
    timeline = traced(Attention(is_causal=True), lambda b: torch.randn(b, 200, 64), precision="bf16-mixed")
    forward = bytes_of(made_by(timeline, "_scaled_dot_product_flash_attention.default"))
    assert forward[:2] == [4 * 200 * 64 * 2, 4 * 4 * 200 * 4]  # output in bf16, log-sum-exp in float32
    backward = bytes_of(made_by(timeline, "_scaled_dot_product_flash_attention_backward"))
    rounded = 256  # 200 rounded up to 128s; heads of 16 to 32
    # A copy of the output's gradient, which is one number for all, and three results come before.
    assert backward[:6] == [4 * 200 * 64 * 2] * 4 + [4 * 4 * rounded * 4, 4 * 4 * rounded * 32 * 4]


class LengthFirst(Attention):
    def forward(self, x):
        return super().forward(x).transpose(1, 2).flatten(2)


class ThroughMultihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class HeadsFirst(Attention):
    """As after a ``torch.cat`` of rotated parts, which is contiguous."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2).contiguous() for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [
        (LengthFirst(is_causal=True), 0, 0),
        (HeadsFirst(), 4, 1),  # q, k, v, and the output for ``flatten``; the output for the backward kernel
        (ThroughMultihead(), 2, 2),  # input, packed q, k, v; nothing for the output, but both of it for the backward
    ],
)
def test_flash_attention_lies_as_its_query_and_is_copied_for_its_backward(model, forward, backward) -> None:
    """flash_api.cpp, ``empty_like(q)``; attention_backward.cu, ``contiguous_grad_out`` and ``contiguous_out``."""
    timeline = traced(model, lambda b: torch.randn(b, 200, 64), precision="bf16-true")
    assert len([b for b in in_phase(timeline, "forward", 2) if b.operator == "aten.clone.default"]) == forward
    taken = bytes_of(made_by(timeline, "_scaled_dot_product_flash_attention_backward"))
    assert taken[: len(taken) // 2] == [4 * 200 * 64 * 2] * (backward + 3) + [4 * 4 * 256 * 4, 4 * 4 * 256 * 32 * 4]


def test_attention_with_a_mask_takes_the_memory_efficient_kernel() -> None:
    mask = torch.zeros(200, 200, dtype=torch.bool)
    timeline = traced(Attention(mask), lambda b: torch.randn(b, 200, 64))
    assert bytes_of(made_by(timeline, "_scaled_dot_product_efficient_attention.default"))[1] == 4 * 4 * 224 * 4
    assert not [b for b in timeline.blocks if b.size.base == 4 * 4 * 200 * 200 * 4]


@pytest.mark.parametrize(("length", "rounded", "heads"), [(200, 256, 4), (192, 192, 1), (193, 256, 4)])
def test_in_half_precision_the_memory_efficient_backward_sums_in_float32(length: int, rounded: int, heads: int) -> None:
    """kernel_backward.h, ``kNeedsAccumGradQ``: lengths and head sizes (16 and 64) rounded up to 64."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    timeline = traced(Attention(mask, heads), lambda b: torch.randn(b, length, 64), precision="bf16-mixed")
    backward = bytes_of(made_by(timeline, "_scaled_dot_product_efficient_attention_backward"))
    tiles = 4 * heads * rounded // 64  # each with its lock
    rows = 4 * heads * length * 4
    assert backward[backward.index(rows) + 1] == tiles * (64 * 64 * 4 + 16)


@pytest.mark.parametrize(("heads", "copies"), [(4, 1), (1, 0)])
def test_the_memory_efficient_backward_copies_a_gradient_that_is_not_by_positions(heads: int, copies: int) -> None:
    """Measured on an H100: of (sample, head, position, number), where heads do not follow positions in memory."""
    mask = torch.zeros(200, 200, dtype=torch.bool)
    timeline = traced(Attention(mask, heads), lambda b: torch.randn(b, 200, 64), precision="bf16-mixed")
    made = bytes_of(made_by(timeline, "_scaled_dot_product_efficient_attention_backward"))
    assert made.count(4 * 200 * 64 * 2) == 2 * (3 + copies)  # in both steps


@pytest.mark.parametrize(
    ("head", "precision", "locks"), [(64, "32-true", 8), (256, "32-true", 16), (128, "bf16-mixed", 4)]
)
def test_the_locks_of_the_memory_efficient_backward_are_those_that_were_measured(
    head: int, precision: Precision, locks: int
) -> None:
    """Of one sequence of 512 and one head, on an H100: the workspace beyond the sums of dq."""
    mask = torch.zeros(512, 512, dtype=torch.bool)

    def attend(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = model(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, mask.to(x.device)).float().sum()

    timeline = traced(nn.Linear(8, head), lambda b: torch.randn(b, 512, 8), attend, precision=precision)
    made = bytes_of(made_by(timeline, "_scaled_dot_product_efficient_attention_backward"))
    assert 4 * (512 * head * 4 + locks * 16) in made


def test_in_float32_the_memory_efficient_backward_sums_rows_first() -> None:
    """Recorded on an H200, as the sizes of GPT-2's: product, its sums, these in the order of heads, dq in tiles."""
    timeline = traced(Attention(heads=1, is_causal=True), lambda b: torch.randn(b, 512, 64))
    backward = bytes_of(made_by(timeline, "_scaled_dot_product_efficient_attention_backward"))
    rows = 4 * 512 * 4
    # A copy of the output's gradient, which is one number for all, and three results come before.
    assert backward[:8] == [rows * 64] * 5 + [rows, rows, 4 * 8 * (64 * 64 * 4 + 16)]
    freed = [size for size in taken_by(timeline, "_scaled_dot_product_efficient_attention_backward")[3:] if size < 0]
    assert freed[:2] == [-rows, -rows * 64]  # before the workspace


@pytest.mark.torch_since(2, 12)
@each(
    ("capability", "head", "mask", "dropout", "expected"),
    [
        *[((9, 0), head, mask, 0.125, "cudnn") for head in (32, 128) for mask in (False, True)],
        ((10, 0), 256, False, 0.0, "flash"),
        ((9, 0), 36, False, 0.0, "flash"),
        ((8, 0), 64, True, 0.0, "efficient"),
        ((9, 0), 64, True, 0.1, "efficient"),  # no multiple of one sixteenth
    ],
)
def test_cudnns_attention_comes_first_on_hopper(capability, head, mask, dropout, expected) -> None:
    one = (lambda x: torch.ones(len(x), 1, 16, 16, dtype=torch.bool, device=x.device)) if mask else None
    assert backend(torch.bfloat16, capability, head, one, dropout_p=dropout) == expected


@pytest.mark.torch_since(2, 11)
@pytest.mark.parametrize(("heads", "grouped"), [(4, 4), (4, 2)])
def test_cudnns_attention_sums_gradients_in_its_workspace(heads, grouped) -> None:
    """Recorded on an H200: 25,559,296 bytes for GPT-2's 16 x 12 x 512 x 64, 25,362,688 for Llama's 8 x 12 (4) x 512."""

    class Grouped(nn.Linear):
        def forward(self, x):
            sizes = [heads * 16, grouped * 16, grouped * 16]
            q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in super().forward(x).split(sizes, -1))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2) * 2

    model = Grouped(64, (heads + 2 * grouped) * 16, bias=False)
    timeline = traced(model, lambda b: torch.randn(b, 200, 64), precision="bf16-true", capability=(9, 0))
    forward = bytes_of(made_by(timeline, "_scaled_dot_product_cudnn_attention.default"))
    assert forward[2:5] == [4 * 200 * 64 * 2, 4 * heads * 200 * 4, 256]
    backward = bytes_of(made_by(timeline, "_scaled_dot_product_cudnn_attention_backward"))
    assert backward[:3] == [4 * 200 * each * 16 * 2 for each in (heads, grouped, grouped)]
    spread = 2 * 4 * heads * 200 * 16 * 2 if grouped < heads else 0  # dk and dv of each head of the query
    assert backward[3] == 4 * heads * 200 * (16 + 1) * 4 + 256 + spread


def test_the_math_backend_does_make_the_square_matrix() -> None:
    timeline = traced(Attention(is_causal=True), lambda b: torch.randn(b, 200, 64).double(), model_dtype_double)
    assert [b for b in timeline.blocks if b.size.base == 4 * 4 * 200 * 200 * 8]


def model_dtype_double(model, batch):
    return model.double()(batch).sum()


# --- autocast --------------------------------------------------------------------------------------------------------


class Observed(nn.Module):
    """Calls one function on two float32 tensors and notes the dtype that comes out."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        out = self.function(x, self.weight)
        SEEN.append(out.dtype)
        return out


SEEN: list[torch.dtype] = []

HALF, FULL = torch.float16, torch.float32


@each(
    ("function", "expected"),
    [
        (lambda x, w: x @ w, HALF),
        (lambda x, w: F.linear(x, w), HALF),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), HALF),
        (lambda x, w: torch.addmm(x, x, w), HALF),
        (lambda x, w: x + w, FULL),
        (lambda x, w: F.relu(x.half() * w.half()), HALF),
        (lambda x, w: torch.softmax(x.half() @ w, -1), FULL),
        (lambda x, w: torch.log_softmax(x @ w, -1), FULL),
        (lambda x, w: F.layer_norm((x @ w), (4,)), FULL),
        (lambda x, w: (x @ w).pow(2), FULL),
        (lambda x, w: (x @ w).exp(), FULL),
        (lambda x, w: (x @ w).sum(), FULL),
        (lambda x, w: (x @ w).norm(), FULL),
        (lambda x, w: F.mse_loss(x @ w, x), FULL),
        (lambda x, w: F.cross_entropy(x @ w, torch.zeros(4, dtype=torch.long, device=x.device)), FULL),
        (lambda x, w: torch.addcmul(x, x.half(), w.half()), FULL),
        (lambda x, w: F.interpolate((x @ w).view(1, 1, 4, 4), scale_factor=2), FULL),
    ],
)
def test_autocast_follows_cudas_lists(function, expected: torch.dtype) -> None:
    SEEN.clear()
    traced(Observed(function), lambda b: torch.randn(b, 4), precision="16-mixed")
    assert SEEN[0] == expected


def test_autocast_disabled_inside_is_float32() -> None:
    def plain(x, w):
        with torch.autocast("cuda", enabled=False):
            return x @ w

    SEEN.clear()
    traced(Observed(plain), lambda b: torch.randn(b, 4), precision="bf16-mixed")
    assert SEEN[0] == torch.float32


def test_casts_of_weights_are_cached_until_autocast_ends() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(128, 128))

        def forward(self, x):
            return (x @ self.weight) @ self.weight

    timeline = traced(Twice, lambda b: torch.randn(b, 128), precision="bf16-mixed")
    casts = [b for b in in_phase(timeline, "forward", 2) if b.size.base == 128 * 128 * 2]
    assert len(casts) == 1


def test_every_name_in_the_tables_is_an_operator_of_this_torch() -> None:
    names = [
        *autocast.LOWER_PRECISION,
        *autocast.FLOAT32,
        *autocast.FLOAT32_BY_DTYPE,
        *autocast.PROMOTE,
        *autocast.FLOAT32_BY_OVERLOAD,
    ]
    missing = [name for name in names if autocast.operator(name) is None]
    assert not missing
    assert len(names) == len(set(names))


def test_softmax_of_float16_makes_float32_in_one_kernel() -> None:
    class Probabilities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return torch.softmax(self.inner(x), -1)

    half = traced(Probabilities, lambda b: torch.randn(b, 64), precision="16-mixed")
    assert bytes_of(made_by(half, "aten._softmax.default"))[0] == 4 * 64 * 4
    copies = [b for b in in_phase(half, "forward", 1) if "_to_copy" in b.operator and b.size.base == 4 * 64 * 4]
    assert not copies
    brain = traced(Probabilities, lambda b: torch.randn(b, 64), precision="bf16-mixed")
    copies = [b for b in in_phase(brain, "forward", 1) if "_to_copy" in b.operator and b.size.base == 4 * 64 * 4]
    assert len(copies) == 1


# --- optimizers, clipping, scaler -----------------------------------------------------------------------------------


def _optimizer_phase(make, **settings) -> int:
    """Bytes held beyond weights, gradients and state at the worst moment of the second optimizer step."""
    timeline = traced(nn.Linear(512, 512, bias=False), lambda b: torch.randn(b, 512), optimizer=make, **settings)
    first = next(i for i, p in enumerate(timeline.phases) if (p.name, p.step) == ("optimizer", 2))
    live = peak = 0
    for event in timeline.events[timeline.phases[first].start :]:
        block = timeline.blocks[event if event >= 0 else ~event]
        if block.category == "temporaries":
            live += block.size.base if event >= 0 else -block.size.base
            peak = max(peak, live)
    return peak


PARAMETERS = 512 * 512 * 4


@each(
    ("make", "times"),
    [
        (lambda p: torch.optim.AdamW(p), 1),
        (lambda p: torch.optim.Adam(p, foreach=True), 1),
        (lambda p: torch.optim.AdamW(p, fused=True), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0),
        (lambda p: torch.optim.RMSprop(p), 1),
        (lambda p: torch.optim.NAdam(p), 1),
        (lambda p: torch.optim.RAdam(p), 1),
        (lambda p: torch.optim.Adamax(p), 1),
        (lambda p: torch.optim.Adagrad(p), 2),
        (lambda p: torch.optim.Adadelta(p), 2),
    ],
)
def test_foreach_optimizers_hold_copies_of_the_parameters(make, times: int) -> None:
    assert _optimizer_phase(make) == times * PARAMETERS


def test_an_optimizer_that_evaluates_the_loss_itself_is_given_a_closure() -> None:
    timeline = traced(
        nn.Linear(64, 64), lambda b: torch.randn(b, 64), optimizer=lambda p: torch.optim.LBFGS(p, max_iter=3)
    )
    evaluations = [phase for phase in timeline.phases if (phase.name, phase.step) == ("forward", 2)]
    assert len(evaluations) >= 2
    assert timeline.tier == "partly symbolic"
    flat = (64 * 64 + 64) * 4
    assert any(b.size.base == flat for b in timeline.blocks)  # LBFGS keeps all gradients in one vector


def test_adam_state_is_two_moments_and_its_step_stays_on_the_host() -> None:
    timeline = traced(
        nn.Linear(512, 512, bias=False), lambda b: torch.randn(b, 512), optimizer=lambda p: torch.optim.Adam(p)
    )
    assert bytes_of(b for b in timeline.blocks if b.category == "optimizer_states") == [PARAMETERS] * 2
    fused = traced(
        nn.Linear(512, 512, bias=False),
        lambda b: torch.randn(b, 512),
        optimizer=lambda p: torch.optim.Adam(p, fused=True),
    )
    assert sorted(bytes_of(b for b in fused.blocks if b.category == "optimizer_states")) == [4, *[PARAMETERS] * 2]


def test_clipping_by_norm_uses_foreach() -> None:
    timeline = traced(nn.Linear(64, 64), lambda b: torch.randn(b, 64), clip_grad_norm=1.0)
    assert made_by(timeline, "_foreach_norm")
    assert not made_by(traced(nn.Linear(64, 64), lambda b: torch.randn(b, 64)), "_foreach_norm")


def test_the_gradient_scaler_steps_and_keeps_its_scalars() -> None:
    timeline = traced(
        nn.Linear(64, 64),
        lambda b: torch.randn(b, 64),
        precision="16-mixed",
        optimizer=lambda p: torch.optim.Adam(p),
    )
    assert len([b for b in timeline.blocks if b.category == "optimizer_states"]) == 4  # it did step: no inf was found


def test_gradients_live_as_long_as_zero_grad_says() -> None:
    def alive_during_second_forward(zero_grad: str) -> int:
        timeline = traced(nn.Linear(512, 512, bias=False), lambda b: torch.randn(b, 512), zero_grad=zero_grad)
        forward = next(p for p in timeline.phases if (p.name, p.step) == ("forward", 2))
        live = set()
        for event in timeline.events[: forward.start]:
            live.add(event) if event >= 0 else live.discard(~event)
        return sum(timeline.blocks[i].size.base for i in live if timeline.blocks[i].category == "gradients")

    assert alive_during_second_forward("after_step") == 0
    assert alive_during_second_forward("before_forward") == 0
    assert alive_during_second_forward("before_backward") == PARAMETERS


def test_accumulation_adds_to_gradients_in_place() -> None:
    timeline = traced(nn.Linear(512, 512, bias=False), lambda b: torch.randn(b, 512), accumulate=3)
    gradients = [b for b in timeline.blocks if b.category == "gradients"]
    assert bytes_of(gradients) == [PARAMETERS] * 2  # one for each step, not one for each micro-batch
    temporary = [b for b in timeline.blocks if b.category == "temporaries" and b.size.base == PARAMETERS]
    assert len(temporary) == 2  # the second micro-batch's own gradient, in each step


def test_a_whole_batch_stays_on_the_device_while_its_micro_batches_run() -> None:
    def batch_bytes(**settings) -> int:
        timeline = traced(nn.Linear(8, 8), lambda b: torch.randn(b, 8), accumulate=5, **settings)
        return max(bytes_of(b for b in timeline.blocks if b.category == "batch"))

    assert batch_bytes(whole_batch=True) == 5 * batch_bytes()


class Grouped(nn.Module):
    """Queries of four heads over keys of two: in float32 no fused kernel takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (
            made(x).unflatten(-1, (heads, 16)).transpose(1, 2) for made, heads in ((self.query, 4), (self.key, 2))
        )
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


@pytest.mark.torch_since(2, 11)
def test_the_math_backend_adds_its_mask_in_place_and_looks_for_rows_without_a_score() -> None:
    """attention.cpp, ``_safe_softmax``: of the scores where they are -inf, of each row whether all are, and a zero.

    On an H200 "llama b8 32-true" then takes the 2 requests more in each layer, and as many bytes as were measured.
    """
    scores, rows = 4 * 4 * 128 * 128, 4 * 4 * 128
    timeline = traced(Grouped(), lambda b: torch.randn(b, 128, 64))
    forward = [block for block in in_phase(timeline, "forward", 1) if block.size.base]
    first = next(n for n, block in enumerate(forward) if "bmm" in block.operator)
    assert bytes_of(forward[first : first + 5]) == [4 * scores, 4 * scores, scores, rows, 4]
    assert "softmax" in forward[first + 1].operator


@pytest.mark.torch_since(2, 11)
def test_with_a_mode_of_the_step_a_mask_is_added_to_a_copy_of_the_scores() -> None:
    """``areAnyTensorSubclassLike`` in attention.cpp; selective checkpointing could not keep scores that change."""
    net, scores = nn.Sequential(Grouped()), 4 * 4 * 4 * 128 * 128
    sums = {}
    for keeps in ((), ("bmm",)):
        recipe = Recipe(checkpoint=("0",), checkpoint_keeps=keeps)
        timeline = traced(net, lambda b: torch.randn(b, 128, 64), recipe=recipe)
        made = [block for block in in_phase(timeline, "forward", 1) if "add.Tensor" in block.operator]
        sums[keeps] = bytes_of(made)
    assert sums == {(): [], ("bmm",): [scores]}


def alive_at_end_of_forward(timeline: Timeline, size: int) -> int:
    end = next(p.start for p in timeline.phases if p.name == "backward")
    live: set[int] = set()
    for event in timeline.events[:end]:
        live.add(event) if event >= 0 else live.discard(~event)
    return sum(timeline.blocks[i].size.base == size for i in live)


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning")  # torch 2.4's own checkpoint
def test_checkpointing_keeps_only_the_blocks_inputs() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
            )
            self.on = on

        def forward(self, x):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.on else layer(x)
            return x

    one = 1024 * 256 * 4
    plain = traced(lambda: Checkpointed(False), lambda b: torch.randn(b, 256), batch_size=1024)
    saved = traced(lambda: Checkpointed(True), lambda b: torch.randn(b, 256), batch_size=1024)
    assert alive_at_end_of_forward(saved, one) < alive_at_end_of_forward(plain, one)
    recomputed = [b for b in in_phase(saved, "backward", 1) if b.category == "activations"]
    assert {b.module for b in recomputed} >= {"layers.0.0", "layers.3.1"}
