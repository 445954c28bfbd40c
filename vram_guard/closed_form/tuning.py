"""Memory of fine-tuning a model, in closed form: weights, gradients, optimizer states, batch, a rule for the rest.

Weights, gradients and optimizer states are exact: AdamW keeps two numbers of the weight's own type for each of them
(torch.optim.AdamW, ``exp_avg`` and ``exp_avg_sq``), and only what is trained has gradients and states. Activations are
a rule of thumb for transformers: 34 bytes for each token and hidden number of a layer in 16 bit (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, equation 2, without its last
term: the attention scores, which today's attention kernels do not keep). For other networks no such rule is known here,
and the answer is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vram_guard.closed_form.folder import Component
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.step import LARGEST_BATCH, checked_count

#: Bytes of a number by what people call its type.
DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
SPELLINGS: Final = {
    "fp32": "float32",
    "f32": "float32",
    "32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
#: Lightning's words for weights of these types.
PRECISION_OF: Final = {"float32": "32-true", "float16": "16-true", "bfloat16": "bf16-true"}
STORED: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: Bytes for each token and hidden number that a transformer layer keeps in 16 bit, see above.
LAYER_BYTES_16_BIT: Final = 34
#: Numbers that AdamW keeps of each weight.
STATES: Final = 2


@dataclass(frozen=True)
class TransformerShape:
    """A transformer as the rule for activations sees it."""

    layers: int
    hidden: int
    tokens: int
    """Of one sample."""


@dataclass(frozen=True)
class Tuning:
    """One fine-tuning. All amounts are ints of bytes.

    Attributes:
        trained, frozen: components; one that is in both is there twice, once as a frozen copy.
        batch: samples of one forward pass.
        dtype: of the weights, a key of :data:`DTYPES`.
        sample_numbers: numbers of one sample as the trained model is given it (latents or pixels).
        text_numbers: numbers of one sample's encoded prompt.
        sample: shape of one sample: (tokens,), or (channels, frames, height, width); without frames for pictures.
        shape: of the trained transformer; None where it is another kind of network.
    """

    trained: tuple[Component, ...]
    frozen: tuple[Component, ...]
    batch: int
    dtype: str
    sample_numbers: int = 0
    text_numbers: int = 0
    sample: tuple[int, ...] = ()
    shape: TransformerShape | None = None

    def __post_init__(self) -> None:
        checked_count("batch_size", self.batch)

    @property
    def number(self) -> int:
        """Bytes of one number."""
        return DTYPES[self.dtype]

    def parts(self) -> dict[str, int | None]:
        """Name -> bytes; None where no rule is known."""
        learning = sum(one.weights.parameters for one in self.trained)
        return {
            "trained parameters": learning * self.number,
            "frozen parameters": sum(one.weights.parameters for one in self.frozen) * self.number,
            "gradients": learning * self.number,
            "optimizer states": STATES * learning * self.number,
            "batch": self.batch * self.sample_numbers * self.number,
            "text encoding": self.batch * self.text_numbers * self.number,
            "activations": self.activations(),
        }

    def activations(self) -> int | None:
        """Bytes of saved activations, by the rule of thumb; 0 where nothing is trained."""
        if not self.trained:
            return 0
        if self.shape is None:
            return None
        numbers = self.batch * self.shape.tokens * self.shape.hidden
        return self.shape.layers * (numbers * LAYER_BYTES_16_BIT * self.number // 2)

    @property
    def total(self) -> int:
        """The sum of all parts that are known."""
        return sum(amount for amount in self.parts().values() if amount is not None)

    @property
    def complete(self) -> bool:
        """True where every part is known; otherwise :attr:`total` is a lower bound."""
        return self.activations() is not None

    def largest_batch(self, usable: int) -> int:
        """The largest batch within ``usable`` bytes that a step may have; 0 where not even one sample fits."""
        one, two = replace(self, batch=1).total, replace(self, batch=2).total
        if one > usable or not self.complete:
            return 0
        return min(1 + (usable - one) // (two - one), LARGEST_BATCH) if two > one else self.batch


def checked_dtype(name: str) -> str:
    """A key of :data:`DTYPES` for what people call a type.

    Raises:
        InvalidInputError: it is none of them.
    """
    known = SPELLINGS.get(name.lower().removeprefix("torch."), name.lower().removeprefix("torch."))
    if known not in DTYPES:
        raise InvalidInputError(
            _("--dtype must be one of {names}, not {name}", names=", ".join(DTYPES), name=repr(name)[:40])
        )
    return known


def stored_dtype(components: tuple[Component, ...]) -> str:
    """The type that the largest component is stored in; float32 where that is not a type to train in."""
    largest = max(components, key=lambda one: one.weights.parameters, default=None)
    return STORED.get((largest.weights.dtype if largest else None) or "", "float32")


def transformer_shape(config: Mapping[str, Any], tokens: int) -> TransformerShape | None:
    """Layers, width and tokens of the transformer that a config describes; None where it describes another network."""
    layers = _count(config, "num_layers", "num_hidden_layers", "n_layer", "n_layers")
    hidden = _count(config, "hidden_size", "n_embd", "d_model", "inner_dim")
    heads, width = _count(config, "num_attention_heads"), _count(config, "attention_head_dim")
    if hidden is None and heads is not None and width is not None:
        hidden = heads * width
    if layers is None or hidden is None or "UNet" in str(config.get("_class_name")):
        return None
    return TransformerShape(layers, hidden, tokens)


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a sensible number."""
    found = (config.get(name) for name in names)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31), None
    )
