"""A training that a config and options describe: known without torch where the package has its timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from vram_guard.capture.config_step import named_config, sizes_of, step_from_config
from vram_guard.capture.lora import weights_of
from vram_guard.capture.named_optimizer import WORDS, checked_optimizer
from vram_guard.cli.printing import tell
from vram_guard.closed_form.dtypes import PRECISION_OF
from vram_guard.closed_form.inputs import sample_shape, sizes_read
from vram_guard.codec import to_plain
from vram_guard.known.architectures import Variant, architecture, timelines_of
from vram_guard.known.inputs import reading
from vram_guard.known.store import Answer, Question
from vram_guard.language import _, marked
from vram_guard.plain_model import ASSUMED
from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY, compute_capability

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.from_config import EstimateRequest
    from vram_guard.plan import Plan
    from vram_guard.releases import Releases
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline

#: Of models of transformers and diffusers.
_ASSUMED_OF_LIBRARIES: Final = marked(
    "assumed for {model}: precision {precision} (--precision, --dtype); {optimizer}; {loss} as loss. A TrainingStep "
    "says what your training really does"
)


class Described:
    """One training, as ``estimate``, ``gpus`` and ``plan`` ask about it.

    Args:
        name: for messages and tables.
        request: what the config and the options say; its model is one that can be built.
        config: all entries of the config.
    """

    def __init__(self, name: str, request: EstimateRequest, config: Mapping[str, Any]) -> None:
        self.name = name
        self.request = request
        self.config = config

    @cached_property
    def step(self) -> TrainingStep:
        """The training step, with its libraries imported.

        Raises:
            as :func:`vram_guard.capture.config_step.step_from_config`.
        """
        with reading():
            return step_from_config(self.request, self.config)

    @property
    def is_remembered(self) -> bool:
        """True if the same was asked before, and nothing that the answer rests on has changed."""
        return self._remembered is not None

    @cached_property
    def question(self) -> Question:
        """What is asked of the step as written, whatever the batch and the card."""
        request = replace(self.request, memory=None, gpu=None, numbers={**self.request.numbers, "batch": 0})
        return Question({"request": to_plain(request), "config": self.config})

    def known(
        self, capability: tuple[int, int] | None, *, cudnn: str | None = None, confirmed: int | None = None
    ) -> Timeline | None:
        """The timeline as written on cards of this compute capability; None where it has to be traced.

        Args:
            capability: of the card; None: no card is known, and one is assumed.
            cudnn: the choice of cuDNN, whose answers are no part of a known timeline.
            confirmed: samples at which a trace of the user's own code has to have confirmed it; None: the law will do.
        """
        capability = capability or ASSUMED_COMPUTE_CAPABILITY
        own = () if self._remembered is None else self._remembered.timelines
        for timeline in (*self._published, *(one for one in own if confirmed is None or confirmed in one.traced)):
            found = timeline.of_capability(capability)
            if found is not None and not (any(block.unknown for block in found.blocks) and _asks_cudnn(cudnn)):
                return found
        return None

    @property
    def releases(self) -> Releases | None:
        """Those that it was traced with where the package knows it; None where it was traced here."""
        return self._published[0].releases if self._published else None

    def traced(self, trace: Callable[[TrainingStep], Timeline]) -> Timeline:
        """A timeline of the step as written, which is remembered."""
        with self.question.answered() as answer:
            timeline = trace(self.step)
            self._remember(answer, timeline)
        return timeline

    def on_card(self, budget: Budget, *, cudnn: str | None = None) -> tuple[Timeline, Budget]:
        """The timeline as written on a budget's card, and what the budget is for a rank of the step's layout."""
        known = self.known(budget.compute_capability, cudnn=cudnn)
        if known is not None:
            return known.on(budget.multiprocessors, budget.placement), budget

        from vram_guard.plan.layout_facts import budget_of_rank
        from vram_guard.simulate import trace

        timeline = self.traced(lambda step: trace(step, budget=budget, cudnn=cudnn))

        return timeline, budget_of_rank(budget, self.step.layout)

    def plan_as_written(self, budget: Budget, *, cudnn: str | None) -> Plan | None:
        """The plan where the training is known and fits; None where it has to be traced."""
        from vram_guard.plan.as_written import plan_as_written

        batch_size = self.request.numbers["batch"]
        known = self.known(compute_capability(budget), cudnn=cudnn, confirmed=batch_size)
        if known is None:
            return None
        return plan_as_written(known.on(budget.multiprocessors, budget.placement), batch_size, budget)

    def planned(self, plan: Callable[[TrainingStep], Plan]) -> Plan:
        """A plan for the step, whose timeline as written is remembered."""
        with self.question.answered() as answer:
            made = plan(self.step)
            timeline = made.timeline_before
            if timeline is not None and made.fits_as_written:  # a trace at this very size has confirmed it
                self._remember(answer, replace(timeline, traced=(*timeline.traced, made.batch_size_before)))
        return made

    def _remember(self, answer: Answer, timeline: Timeline) -> None:
        """Keep a timeline that says all there is to say of the step: of a plain one, on one GPU."""
        from vram_guard.simulate.compiled import EAGER

        step = self.step
        is_compiled = any(note.said == EAGER for note in timeline.notes)
        is_plain = step.accumulate == 1 and step.job is None and step.layout is None and not is_compiled
        if is_plain and not self._builds_by_batch:
            answer.timelines.append(timeline)
            answer.about = self._assumed

    @cached_property
    def _builds_by_batch(self) -> bool:
        """True if what builds the step may be given the size of a batch, which is no part of the question."""
        from vram_guard.capture.object_reference import parameters_of

        model = self.request.model or ""
        taken = parameters_of(model) if ":" in model else frozenset[str]()
        return taken is None or "batch" in taken

    def tell_assumed(self) -> None:
        """Say, beside the answer, what was assumed of the training of a plain model, or of one of a library."""
        if self._assumed is None:
            return
        kind, sample, precision, has_own_loss = self._assumed
        model, optimizer = self.request.model, _(WORDS[checked_optimizer(self.request.optimizer)])
        if kind == "text":
            model = _("{model} with texts of {count} tokens (--seq-length)", model=model, count=sample)
        elif sample:
            model = _("{model} with inputs of {shapes}", model=model, shapes=sample)
        if kind == "plain":
            tell(_(ASSUMED, model=model, optimizer=optimizer))
            return
        if self._published and "step" not in vars(self):
            tell(_("known without a trace, as with {releases}", releases=self.releases))
        loss = _("the model's own") if has_own_loss else _("the mean square of its first output")
        tell(_(_ASSUMED_OF_LIBRARIES, model=model, precision=precision, optimizer=optimizer, loss=loss))

    # --- what is known without a trace --------------------------------------------------------------------------------

    @cached_property
    def _remembered(self) -> Answer | None:
        return self.question.answer()

    @cached_property
    def _published(self) -> tuple[Timeline, ...]:
        request = self.request
        published = architecture(request.model or "")
        if published is None or named_config(request.model or "") is not published.config:
            return ()
        sized = {"height", "width", "num_frames"} & request.numbers.keys()
        if sized or request.inputs is not None or request.numbers.get("accumulate", 1) > 1:
            return ()
        weights = weights_of(request, published.config)
        if weights.lora:
            return ()
        precision = request.precision or weights.precision
        # Where every weight is trained, the precision says what they are.
        own = next((dtype for dtype, one in PRECISION_OF.items() if one == precision), "float32")
        variant = Variant(
            own if weights.lora is None else weights.dtype,
            precision,
            "" if weights.lora is None else "qlora" if weights.four_bits else "lora",
            request.checkpointing,
            checked_optimizer(request.optimizer),
        )
        takes_text = "seq_length" in sizes_read(published.config)
        length = sample_shape(published.config, sizes_of(request))[0] if takes_text else None
        return tuple(timelines_of(published.name, variant, length))

    @cached_property
    def _assumed(self) -> tuple[str, str, str, bool] | None:
        """(Kind of model, sample, precision, whether the loss is the model's own); None where nothing is assumed."""
        if "step" in vars(self):
            return self._assumed_of_step()
        if self._published:
            config = named_config(self.request.model or "") or {}
            precision = self.request.precision or weights_of(self.request, config).precision
            sample = "x".join(map(str, sample_shape(config, sizes_of(self.request))))
            return "text" if "x" not in sample else "picture", sample, precision, "_class_name" not in config
        return None if self._remembered is None else self._remembered.about

    def _assumed_of_step(self) -> tuple[str, str, str, bool] | None:
        from vram_guard.capture.hugging_face import assumed_of
        from vram_guard.plain_model import is_assumed, shapes_of

        step = self.step
        if assumed := assumed_of(step):
            sample = "x".join(map(str, assumed.sample))
            return "text" if "x" not in sample else "picture", sample, step.precision, assumed.has_own_loss
        if is_assumed(step):
            return "plain", shapes_of(step.batch(1)) if self.request.inputs is None else "", step.precision, True
        return None


def _asks_cudnn(choice: str | None) -> bool:
    """True if a cuDNN would be asked for workspaces: one that is named, or that of a GPU here."""
    from vram_guard.budget import nvml
    from vram_guard.errors import DeviceQueryError, NoDeviceError

    if choice not in (None, "auto"):
        return choice != "off"
    try:
        nvml.read_device(0)
    except (nvml.NvmlUnavailableError, NoDeviceError, DeviceQueryError):
        return False
    return True
