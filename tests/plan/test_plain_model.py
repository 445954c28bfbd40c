"""A plain model and the shape of its input: predicted and planned without a TrainingStep."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vram_guard import Budget, TrainingStep, estimate, plan, trace
from vram_guard.cli import main
from vram_guard.errors import InvalidInputError
from vram_guard.plain_model import DTYPES, InputShape, step_of_model

MODELS = """
import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

class Huge(nn.Module):
    def __init__(self, width=2**17):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)

class Other:
    pass

def number():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


def test_a_model_of_scores_is_trained_by_cross_entropy() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    step = TrainingStep(
        net,
        lambda size: (torch.zeros(size, 3, 32, 32), torch.zeros(size, dtype=torch.long)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW,
    )
    assert estimate(net, 16, input_shape=(3, 32, 32)).peak_reserved == estimate(step, 16).peak_reserved
    assert estimate(net, 16, input_shape="3x32x32").breakdown == estimate(step, 16).breakdown
    wide = nn.Linear(64, 8)
    assert estimate(wide, 16, input_shape=64) == estimate(wide, 16, input_shape=(64,))


@pytest.mark.parametrize(
    "output",
    [lambda x: x, lambda x: (x, None), lambda x: {"out": x, "aux": None}, lambda x: [[x]]],
    ids=["tensor", "tuple", "dict", "nested"],
)
def test_other_outputs_are_trained_by_the_mean_squared_error(output: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 5, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return output(self.layer(x))

    net = Net()
    step = step_of_model(net, InputShape.parse("3x4x4"))
    loss = step.loss(net, (torch.ones(2, 3, 4, 4), torch.zeros(2, dtype=torch.long)))
    assert torch.equal(loss, net.layer(torch.ones(2, 3, 4, 4)).square().mean())


class Scores(NamedTuple):
    """As torchvision's GoogLeNetOutputs."""

    logits: torch.Tensor
    aux_logits2: torch.Tensor
    aux_logits1: torch.Tensor


class Deep(nn.Module):
    """Two auxiliary classifiers that are there while it is trained, as in torchvision's GoogLeNet."""

    def __init__(self, answer: Callable[..., Any] = Scores) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 16, 3), nn.Linear(16, 10)
        self.aux1, self.aux2 = (nn.Sequential(nn.Linear(16, 1000), nn.ReLU(), nn.Linear(1000, 10)) for _ in range(2))
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        found = self.stem(x).relu().mean((2, 3))
        scores = self.last(found)
        return self.answer(scores, self.aux2(found), self.aux1(found)) if self.training else scores


def test_auxiliary_classifiers_are_trained() -> None:
    """With the weight of 0.3 that GoogLeNet's authors give them, and with none, a step takes the same."""

    def weighted(model: Any, batch: Any) -> torch.Tensor:
        main, *others = (nn.functional.cross_entropy(one, batch[1]) for one in model(batch[0]))
        return main + 0.3 * (others[0] + others[1])

    batches = lambda size: (torch.zeros(size, 3, 32, 32), torch.zeros(size, dtype=torch.long))  # noqa: E731
    written = estimate(TrainingStep(Deep, batches, weighted, torch.optim.AdamW), 64)
    alone = estimate(
        TrainingStep(Deep, batches, lambda model, batch: model(batch[0]).logits.logsumexp(1).sum(), torch.optim.AdamW),
        64,
    )
    made = estimate(Deep, 64, input_shape=(3, 32, 32))
    assert made.breakdown["optimizer_states"] == written.breakdown["optimizer_states"]
    assert made.breakdown["optimizer_states"] > 10 * alone.breakdown["optimizer_states"]
    assert (made.peak_allocated, made.peak_reserved) == (written.peak_allocated, written.peak_reserved)


def test_a_models_own_loss_counts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.frozen = nn.Embedding(50, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.frozen(self.embedding(tokens)) * mask[..., None]).sum()}

    predicted = estimate(Net(), 4, input_shape=["7:int64", (7,)])
    assert predicted.breakdown["optimizer_states"] == 2 * 1024, "frozen parameters have no states"
    assert predicted.breakdown["batch"] == 3 * 512


def test_it_is_planned_as_a_step_is() -> None:
    net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 16))
    made = plan(net, 4096, "96MiB", input_shape=(256,), allow=["accumulate"])
    assert made.fits
    assert made.splits > 1
    assert trace(lambda: nn.Linear(2**17, 2**17), input_shape=(2**17,)).at(1).breakdown["parameters"] > 2**36


@each(
    "wrong",
    [
        lambda net: estimate(net, 4),
        lambda net: plan(net, 4, "1GiB"),
        lambda net: estimate(TrainingStep(net, torch.ones(1, 3), lambda net, x: net(x).sum()), 4, input_shape=(3,)),
        lambda net: estimate(net, 4, input_shape=(3, 0)),
        lambda net: estimate(net, 4, input_shape=(3.0,)),
        lambda net: estimate(net, 4, input_shape=3.0),
        lambda net: estimate(net, 4, input_shape=True),
        lambda net: estimate(net, 4, input_shape={"x": 3}),
        lambda net: estimate(net, 4, input_shape=[(3,), 5]),
        lambda net: estimate(net, 4, input_shape=[]),
        lambda net: estimate(net, 4, input_shape=(1,) * 9),
        lambda net: estimate(net, 4, input_shape=(7,)),  # the model takes three
    ],
)
def test_bad_input_is_an_error_in_words(wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        wrong(nn.Linear(3, 3))


@pytest.mark.torch_since(2, 6)  # torch 2.4's meta convolution takes any input
def test_a_model_that_fails_on_its_input_says_so_and_was_built(models: str, capsys: Any) -> None:
    command = ["--model", f"{models}:net", "--input", "3x2x2", "--batch", "4", "--gpu", "4090"]
    for name in ("estimate", "plan"):
        assert main([name, *command]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert "vram-guard: the model fails on an input of 3x2x2: RuntimeError" in said


def test_a_step_whose_callables_take_others_is_refused_before_any_work() -> None:
    def step(**changed: Any) -> TrainingStep:
        usual = {"model": nn.Linear(3, 3), "batch": lambda size: torch.ones(size, 3), "optimizer": torch.optim.AdamW}
        return TrainingStep(**{**usual, "loss": lambda model, batch: model(batch).sum(), **changed})

    def scaled(loss: Any) -> Any:
        return functools.wraps(loss)(lambda model, batch: loss(model, batch, 2.0))

    assert estimate(step(), 2).peak_reserved > 0
    handed_on = scaled(lambda model, batch, scale: model(batch).sum() * scale)  # what a decorator hands on is its own
    assert estimate(step(loss=handed_on), 2).peak_reserved > 0
    for name, wrong in {
        "loss": lambda batch: batch.sum(),
        "optimizer": lambda model, parameters: torch.optim.SGD(parameters),
        "batch": lambda: torch.ones(2, 3),
        "model": nn.Linear,
    }.items():
        with pytest.raises(InvalidInputError, match=f"{name} is called with .* but takes"):
            estimate(step(**{name: wrong}), 2)
        with pytest.raises(InvalidInputError, match=f"{name} is called with .* but takes"):
            plan(step(**{name: wrong}), 2, budget="1GiB")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.sampled_from(sorted(DTYPES))),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read(inputs: list[tuple[list[int], str]]) -> None:
    text = ",".join(f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in inputs)
    assert InputShape.parse(text) == tuple(InputShape(tuple(shape), DTYPES[dtype]) for shape, dtype in inputs)


@each("text", ["", "3xx4", "x", "3x-4", "3x4:float99", "٣x4", "3x4,", "1e3", "3x0", "9" * 30])
def test_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        InputShape.parse(text)


def test_plan_takes_a_file_and_a_name(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", "3x64x64", "--batch", "32", "--budget", "4GiB", "--json"]
    assert main(["plan", f"{models}:net", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["report"]["batch_size"] == {"before": 32, "after": 32}
    assert "assumed for" in err
    assert "AdamW" in err


def test_a_class_is_built_symbolically(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are 64 GiB."""
    words = ["--input", "131072", "--batch", "1", "--budget", "1TiB"]
    assert main(["plan", f"{models}:Huge", *words]) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("net", ["--batch", "3"], "--input 3x224x224"),
        ("Huge", ["--batch", "3"], "--input 3x224x224"),
        ("net", ["--input", "3x64x64"], "--batch N"),
        ("nett", ["--input", "3", "--batch", "3"], "did you mean net"),
        ("net", ["--input", "3", "--batch", "3", "--step", "a:b"], "not both"),
    ],
)
def test_mistakes_are_told(
    models: str, name: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{models}:{name}", *words, "--budget", "1GiB"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Other", "number"])
def test_what_builds_no_model_is_told(models: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{models}:{name}", "--input", "3", "--batch", "3", "--budget", "1GiB"]) == 3
    assert "not an nn.Module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "more", "parameters"), [("gpt2", ("--seq-length", "32"), 124_439_808), ("resnet", (), 23_512_130)]
)
def test_a_kind_of_transformers_has_its_usual_size(
    name: str, more: tuple[str, ...], parameters: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["estimate", "--model", name, "--batch", "2", *more, "--gpu", "H100 SXM", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    held = answer["symbolic"]["estimate"]["breakdown"]["parameters"]
    assert 4 * parameters <= held < 4 * parameters * 1.01


def test_the_tokens_of_a_text_are_its_labels_however_its_length_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """--input had a language model trained by the mean squared error of its scores."""
    pytest.importorskip("transformers")
    found = []
    for more in (("--seq-length", "64"), ("--input", "64:int64")):
        assert main(["plan", "gpt2", "--batch", "2", "--budget", "40GiB", "--json", *more]) == 0
        captured = capsys.readouterr()
        found.append(json.loads(captured.out)["report"]["before"])
    assert found[0] == found[1]


def test_a_language_model_of_ones_own_learns_the_words_of_its_vocabulary() -> None:
    class Net(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, words)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    tokens = InputShape.parse("7:int64")
    for words, expected in ((50, "NllLossBackward0"), (49, "MseLossBackward0")):
        step = step_of_model(Net(words), tokens)
        loss = step.loss(step.model, step.batch(4))
        assert type(loss.grad_fn).__name__ == expected, "scores of other things than words are numbers"


LIBRARIES = {
    "torchvision/models/__init__.py": """
from types import SimpleNamespace
from torch import nn

def list_models():
    return list(BUILDERS)

def resnet50(*, weights="downloaded", **more):
    assert weights is None
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1000))

def fcn(*, weights=None, weights_backbone="downloaded"):
    assert weights_backbone is None
    return nn.Conv2d(3, 4, 3)

def fasterrcnn(*, weights=None):
    raise RuntimeError("boxes")

def r3d(*, weights=None):
    return nn.Conv3d(3, 4, 3)

fasterrcnn.__module__ = "torchvision.models.detection.faster_rcnn"
r3d.__module__ = "torchvision.models.video.resnet"
BUILDERS = {"resnet50": resnet50, "inception_v3": resnet50, "fcn": fcn, "fasterrcnn": fasterrcnn, "r3d": r3d}
get_model_builder = BUILDERS.get
SIDES = {"resnet50": 224, "inception_v3": 299}

def get_model_weights(name):
    preset = SimpleNamespace(transforms=lambda: SimpleNamespace(crop_size=[SIDES[name]]))
    return SimpleNamespace(IMAGENET1K_V1=preset) if name in SIDES else SimpleNamespace(COCO_V1=None)
""",
    "torchvision/__init__.py": "",
    "timm/__init__.py": """
from types import SimpleNamespace
from torch import nn

def list_models():
    return ["tiny_vit"]

def is_model(name):
    return name in list_models()

is_model_pretrained = is_model

def get_pretrained_cfg(name):
    return SimpleNamespace(input_size=(3, 96, 96))

def create_model(name):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 96 * 96, 10))
""",
}


def estimated_with_libraries(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """torchvision has no build that needs no GPU on every index: stand-ins with the functions that are called."""
    for file, text in LIBRARIES.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); from vram_guard.cli import main; main(sys.argv[1:])"
    words = ["estimate", "--model", name, "--batch", "2", "--gpu", "H100 SXM", "--json", *more]
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("typed", "meant"), [("resnet5O", "resnet50"), ("tinyvit", "tiny_vit"), ("qqqq", None)])
def test_the_nearest_name_of_a_library_is_offered(tmp_path: Path, typed: str, meant: str | None) -> None:
    said = estimated_with_libraries(tmp_path, typed).stderr
    assert f"the model {typed} is unknown" in said
    assert ("did you mean" in said) == (meant is not None)
    assert f"did you mean {meant}?" in said or meant is None


@pytest.mark.parametrize(("name", "side"), [("resnet50", 224), ("inception_v3", 299), ("fcn", 224), ("tiny_vit", 96)])
def test_models_of_picture_libraries_are_built_by_name_and_never_downloaded(
    tmp_path: Path, name: str, side: int
) -> None:
    done = estimated_with_libraries(tmp_path, name)
    answer = json.loads(done.stdout)
    pictures, labels = -(-2 * 3 * side * side * 4 // 512) * 512, 512
    assert answer["symbolic"]["estimate"]["breakdown"]["batch"] == pictures + labels, done.stderr
    assert f"assumed for {name} with inputs of 3x{side}x{side}: " in done.stderr


def test_a_model_that_takes_more_than_a_picture_says_what_to_give(tmp_path: Path) -> None:
    assert "fasterrcnn learns from boxes beside its pictures" in estimated_with_libraries(tmp_path, "fasterrcnn").stderr
    assert "--input 3x16x112x112" in estimated_with_libraries(tmp_path, "r3d").stderr
    video = estimated_with_libraries(tmp_path, "r3d", "--input", "3x8x16x16")
    assert "assumed for r3d: " in video.stderr
    assert json.loads(video.stdout)["symbolic"]["estimate"]["breakdown"]["batch"] == 2 * 3 * 8 * 16 * 16 * 4 + 512


class Holding(torch.optim.SGD):
    """Steps another optimizer, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.Adam(self.param_groups)


class OfRows(nn.Module):
    """Called with a dictionary; it returns its loss where it is asked to."""

    def __init__(self, with_loss: bool = False) -> None:
        super().__init__()
        self.line, self.with_loss = nn.Linear(8, 8), with_loss

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        output = self.line(batch["rows"])
        return {"loss": output.square().mean()} if self.with_loss else output


class Attends(nn.Module):
    """With attention, whose kernels differ between cards."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.layer = nn.TransformerEncoderLayer(64, 1, 64, batch_first=True)
        self.scores = nn.Linear(64, 100)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.scores(self.layer(self.words(ids)))
        if labels is None:
            return scores
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def test_a_model_is_asked_with_a_batch_and_an_optimizer_that_are_there() -> None:
    net, ids = Attends(), torch.zeros(4, 512, dtype=torch.long)
    groups = [{"params": net.words.parameters(), "momentum": 0.9}, {"params": net.scores.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    by_name = {"ids": ids, "labels": ids}
    written = TrainingStep(
        net,
        by_name,
        lambda model, batch: model(**batch)["loss"],
        lambda _parameters: torch.optim.SGD(
            [
                {"params": net.words.parameters(), "momentum": 0.9},
                {"params": net.scores.parameters()},
            ],
            lr=0.1,
        ),
    )
    assert estimate(net, by_name, optimizer) == estimate(written, 4)
    assert estimate(net, by_name, optimizer, batch_size=16) == estimate(written, 16)
    assert estimate(net, (ids, ids), optimizer).peak_allocated == estimate(written, 4).peak_allocated
    assert estimate(net, by_name, optimizer, precision="bf16-mixed") == estimate(
        written.with_(precision="bf16-mixed"), 4
    )
    assert estimate(net, ids, optimizer).breakdown["optimizer_states"] == 100 * 64 * 4  # of the group with momentum
    own = estimate(net, ids, optimizer, loss=lambda model, batch: model(batch).square().mean())
    assert own.breakdown["optimizer_states"] == 100 * 64 * 4
    assert estimate(net, np.int64(4), optimizer, input_shape="512:int64") == estimate(
        net, 4, optimizer, input_shape="512:int64"
    )
    assert estimate(OfRows(with_loss=True), ({"rows": torch.ones(4, 8)},)).batch_size == 4
    assert not optimizer.state
    assert all(one.grad is None for one in net.parameters())


def test_an_estimate_answers_for_the_kernels_of_the_card_that_is_asked_about() -> None:
    net, ids = Attends().half(), torch.zeros(8, 1024, dtype=torch.long)
    taken = estimate(net, ids)
    for name, budget in (("V100 32GB", Budget.of("V100 32GB")), ("RTX 4090", Budget.of("RTX 4090"))):
        there = estimate(net, ids, compute_capability=budget.compute_capability)
        assert taken.elsewhere is not None
        assert abs(taken.elsewhere(budget).peak_allocated - there.peak_allocated) < 2**20, name  # buffers by processors
        assert taken.fits(name) is there.fits(budget)
    amounts = {amount: taken.fits(amount) for amount in ("1GiB", 2**30, "1MiB")}
    assert list(amounts.values()) == [True, True, False]
    assert taken.elsewhere(Budget.of("V100 32GB")).peak_allocated != taken.peak_allocated
    assert taken.bound > taken.peak_reserved
    assert taken.measured.rows > 22
    with pytest.raises(InvalidInputError, match="4090"):
        pickle.loads(pickle.dumps(taken)).fits("RTX 4090")


@each(
    "ask",
    [
        lambda net, ids: estimate(net),
        lambda net, ids: estimate(net, 4, batch_size=4, input_shape="512:int64"),
        lambda net, ids: estimate(net, ids, input_shape="512:int64"),
        lambda net, ids: estimate(net, ids, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)),
        lambda net, ids: estimate(Attends, ids, torch.optim.SGD(net.parameters(), lr=0.1)),
        lambda net, ids: estimate(TrainingStep(net, ids, lambda net, x: net(x).sum()), ids),
        lambda net, ids: estimate(TrainingStep(net, ids, lambda net, x: net(x).sum()), 4, torch.optim.Adam),
        lambda net, ids: estimate(TrainingStep(net, ids, lambda net, x: net(x).sum())),
        lambda net, ids: estimate(net, ids).fits("RTX 409"),
        lambda net, ids: estimate(net, ids, torch.optim.LBFGS(net.parameters())),  # keeps a list of weights of its own
        lambda net, ids: estimate(net, ids, Holding(net.parameters())),
        lambda net, ids: estimate(net, ids, losss=None),
        lambda net, ids: estimate(OfRows(), ({"rows": torch.ones(4, 8)},)),
    ],
)
def test_an_example_that_makes_no_sense_is_refused(ask: Any) -> None:
    with pytest.raises(InvalidInputError):
        ask(Attends(), torch.zeros(4, 512, dtype=torch.long))
