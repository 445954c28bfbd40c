"""A training that a config and options describe: known without torch where the package has its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from vram_guard.capture.config_step import named_config, sizes_of, step_from_config
from vram_guard.capture.lora import weights_of
from vram_guard.capture.named_optimizer import WORDS, checked_optimizer
from vram_guard.cli.printing import tell
from vram_guard.closed_form.inputs import sample_shape, sizes_read
from vram_guard.known.architectures import Variant, architecture, timelines_of
from vram_guard.language import _, marked
from vram_guard.plan.techniques import ASSUMED_COMPUTE_CAPABILITY

if TYPE_CHECKING:
    from vram_guard.budget import Budget
    from vram_guard.closed_form.from_config import EstimateRequest
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
        return step_from_config(self.request, self.config)

    def known(self, capability: tuple[int, int] | None, *, cudnn: str | None = None) -> Timeline | None:
        """The timeline as written on cards of this compute capability; None where it has to be traced.

        Args:
            capability: of the card; None: no card is known, and one is assumed.
            cudnn: the choice of cuDNN, whose answers are no part of a known timeline.
        """
        capability = capability or ASSUMED_COMPUTE_CAPABILITY
        for timeline in self._timelines:
            found = timeline.of_capability(capability)
            if found is not None and not (any(block.unknown for block in found.blocks) and _asks_cudnn(cudnn)):
                return found
        return None

    def on_card(self, budget: Budget, *, cudnn: str | None = None) -> tuple[Timeline, Budget]:
        """The timeline as written on a budget's card, and what the budget is for a rank of the step's layout."""
        known = self.known(budget.compute_capability, cudnn=cudnn)
        if known is not None:
            return known.on(budget.multiprocessors, budget.placement), budget
        from vram_guard.plan.layout_facts import budget_of_rank
        from vram_guard.plan.on_card import traced_on_card

        budget = budget_of_rank(budget, self.step.layout)
        return traced_on_card(self.step, budget, cudnn=cudnn), budget

    def tell_assumed(self) -> None:
        """Say, beside the answer, what was assumed of the training of a plain model, or of one of a library."""
        if "step" not in vars(self):
            self._tell_known()
            return
        from vram_guard.capture.hugging_face import assumed_of
        from vram_guard.plain_model import ASSUMED, is_assumed, shapes_of

        model, step = self.request.model or "", self.step
        if assumed := assumed_of(step):
            self._tell(assumed.sample, step.precision, has_own_loss=assumed.has_own_loss)
        if is_assumed(step):
            if self.request.inputs is None:
                model = _("{model} with inputs of {shapes}", model=model, shapes=shapes_of(step.batch(1)))
            tell(_(ASSUMED, model=model, optimizer=self._optimizer))

    # --- what is known without a trace --------------------------------------------------------------------------------

    @cached_property
    def _timelines(self) -> tuple[Timeline, ...]:
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
        adapters = "" if weights.lora is None else "qlora" if weights.four_bits else "lora"
        variant = Variant(
            weights.dtype,
            request.precision or weights.precision,
            adapters,
            request.checkpointing,
            checked_optimizer(request.optimizer),
        )
        takes_text = "seq_length" in sizes_read(published.config)
        length = sample_shape(published.config, sizes_of(request))[0] if takes_text else None
        return tuple(timelines_of(published.name, variant, length))

    def _tell_known(self) -> None:
        config = named_config(self.request.model or "") or {}
        precision = self.request.precision or weights_of(self.request, config).precision
        self._tell(sample_shape(config, sizes_of(self.request)), precision, has_own_loss="_class_name" not in config)

    # --- words --------------------------------------------------------------------------------------------------------

    def _tell(self, sample: tuple[int, ...], precision: str, *, has_own_loss: bool) -> None:
        if len(sample) == 1:
            name = _("{model} with texts of {count} tokens (--seq-length)", model=self.request.model, count=sample[0])
        else:
            name = _("{model} with inputs of {shapes}", model=self.request.model, shapes="x".join(map(str, sample)))
        loss = _("the model's own") if has_own_loss else _("the mean square of its first output")
        tell(_(_ASSUMED_OF_LIBRARIES, model=name, precision=precision, optimizer=self._optimizer, loss=loss))

    @property
    def _optimizer(self) -> str:
        return _(WORDS[checked_optimizer(self.request.optimizer)])


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
