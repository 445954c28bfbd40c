"""Training steps from configs of transformers: what each kind of model is given."""

from __future__ import annotations

import pytest
import torch

from vram_guard.closed_form.inputs import InputSizes

pytest.importorskip("transformers")

from vram_guard.capture.hugging_face import inputs_of, step_of
from vram_guard.capture.lora import AdapterWeights

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 8,
}
SIZES = InputSizes(seq_length=8)


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("BertForSequenceClassification", (3,)),  # one class a sample
        ("BertForTokenClassification", (3, 8)),
        ("BertForMaskedLM", (3, 8)),
        ("BertModel", None),
    ],
)
def test_labels_are_those_of_the_task(architecture: str, labels: tuple[int, ...] | None) -> None:
    config = {**BERT, "architectures": [architecture]}
    given = inputs_of(config, SIZES)(3)
    assert given["input_ids"].shape == (3, 8)
    found = given.get("labels")
    assert (None if found is None else tuple(found.shape)) == labels
    step = step_of(config, SIZES, AdapterWeights())
    loss = step.loss(step.model(), given)
    assert loss.shape == ()
    assert torch.isfinite(loss)
