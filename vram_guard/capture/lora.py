"""The weights that a training by name is asked to have: their type, LoRA beside them, the rest in 4 bits.

LoRA (Hu et al. 2021, arXiv:2106.09685) is built by peft, weights in 4 bits (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314) by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from vram_guard.closed_form.dtypes import MIXED_OF, PRECISION_OF, SPELLINGS
from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _
from vram_guard.quiet import quiet_imports
from vram_guard.step import Precision

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.closed_form.from_config import EstimateRequest

#: As QLoRA's authors quantise (section 3).
_FOUR_BITS: Final = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


@dataclass(frozen=True)
class AdapterWeights:
    """What is asked of a model's weights.

    Attributes:
        dtype: of all weights, and under LoRA of those that are not trained.
        lora: arguments of peft's ``LoraConfig``; None: every weight is trained.
        four_bits: those that are not trained lie in 4 bits.
    """

    dtype: str = "float32"
    lora: Mapping[str, Any] | None = None
    four_bits: bool = False

    @classmethod
    def of(cls, request: EstimateRequest, stored: object = None) -> AdapterWeights:
        """Read what a request asks for.

        Args:
            request: of the options.
            stored: the type that a model's own config names, which counts where no option says another.

        Raises:
            InvalidInputError: a setting of LoRA is unknown, or no number.
        """
        named = str(stored).removeprefix("torch.")
        own = SPELLINGS.get(named, named)
        usual = own if own in PRECISION_OF else "bfloat16" if request.four_bits else "float32"
        if request.lora is None:
            return cls(request.dtype or usual)
        settings = _parsed(request.lora, _option(four_bits=request.four_bits))
        return cls(request.dtype or usual, settings, request.four_bits)

    @property
    def precision(self) -> Precision:
        """The precision that goes with the weights where none is asked for."""
        own: Any = PRECISION_OF[self.dtype]
        return own if self.lora is None else MIXED_OF[self.dtype]  # its own stay in float32

    def quantised(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config.json of transformers with weights in 4 bits, where they are asked for.

        Raises:
            MissingLibraryError: peft or bitsandbytes is not installed.
        """
        if not self.four_bits:
            return config
        self._check_libraries()
        return {**config, "quantization_config": {**_FOUR_BITS}}

    def applied(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
        """The model with LoRA beside its weights; built when it is called for.

        Raises:
            MissingLibraryError: peft or bitsandbytes is not installed.
        """
        if self.lora is None:
            return model
        self._check_libraries()
        settings = dict(self.lora)

        def build() -> nn.Module:
            import torch

            made = model if isinstance(model, torch.nn.Module) else model()
            if self.dtype != "float32":
                for one in made.parameters():
                    if one.is_floating_point():
                        one.data = one.data.to(getattr(torch, self.dtype))
            with quiet_imports():
                peft: Any = import_module("peft")
            try:
                with quiet_imports():  # it reads what transformers deprecates
                    adapted: nn.Module = peft.get_peft_model(made, peft.LoraConfig(**settings))
            except (ValueError, TypeError) as error:
                said = " ".join(str(error).split())
                raise InvalidInputError(
                    _("peft cannot put LoRA on this model: {problem} (--lora r=16,target=NAME+NAME)", problem=said)
                ) from error
            return adapted

        return build

    def _check_libraries(self) -> None:
        for library in ("peft", *(("bitsandbytes",) if self.four_bits else ())):
            if not find_spec(library):
                option = _option(four_bits=self.four_bits)
                raise MissingLibraryError(
                    _("{option} needs {library}: pip install {library}", option=option, library=library)
                )


def weights_of(request: EstimateRequest, config: Mapping[str, Any]) -> AdapterWeights:
    """The weights that a request asks for, of the model of a config.json: in the type that it names, unless it says so.

    Raises:
        as :meth:`AdapterWeights.of`, and InvalidInputError for weights in 4 bits of another library's model.
    """
    if request.four_bits and "model_type" not in config:
        raise InvalidInputError(_("--qlora is for models of transformers"))
    return AdapterWeights.of(request, config.get("dtype") or config.get("torch_dtype"))


def _option(*, four_bits: bool) -> str:
    return "--qlora" if four_bits else "--lora"


def _parsed(text: str, option: str) -> dict[str, Any]:
    """Peft's arguments for ``r=16,alpha=32,dropout=0.05,target=q_proj+v_proj``."""
    settings = dict[str, Any]()
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _equals, value = part.partition("=")
        setting, read = _SETTINGS.get(name, ("", None))
        try:
            settings[setting] = read(value) if read is not None else None
        except ValueError:
            read = None
        if read is None:
            raise InvalidInputError(
                _(
                    "{option} takes r, alpha, dropout and target, as in r=16,alpha=32,target=q_proj+v_proj, not {text}",
                    option=option,
                    text=repr(part)[:60],
                )
            )
    return settings


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(text)
    return int(text)


def _targets(text: str) -> str | list[str]:
    if not text:
        raise ValueError(text)
    return text if text == "all-linear" else text.split("+")


#: Our names of peft's settings, and how each is read.
_SETTINGS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "r": ("r", _positive),
    "alpha": ("lora_alpha", _positive),
    "dropout": ("lora_dropout", float),
    "target": ("target_modules", _targets),
}
