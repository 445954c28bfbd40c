"""``vram-guard estimate --model-path``: guide 001 on folders with true configs and headers; hostile files refused."""

from __future__ import annotations

import json
import pickle
import shlex

import pytest
from each import each
from folders import (
    SMALL,
    SMALL_TEXT,
    transformer_tensors,
    write_cogvideox,
    write_safetensors,
)

from vram_guard import cli
from vram_guard.closed_form.folder import read_folder
from vram_guard.closed_form.weights import read_weights
from vram_guard.errors import InvalidInputError

TRANSFORMER_PARAMETERS = 5_570_283_072
TEXT_PARAMETERS = 4_762_310_656
SIZES = shlex.split("--num_frames 3 --height 8 --width 8 --batch_size 2")
TWO_MODELS = shlex.split("--train transformer --frozen transformer,text_encoder")


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory):
    """CogVideoX-5b: 10.3 billion parameters in headers, a few hundred kilobytes on the disk."""
    return write_cogvideox(tmp_path_factory.mktemp("hub") / "CogVideoX-5b")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_cogvideox(tmp_path_factory.mktemp("hub") / "small", SMALL, SMALL_TEXT)


def answer(capsys, folder, *arguments):
    code = cli.main(["estimate", "--model-path", str(folder), *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_parameters_by_component_and_dtype(cogvideox):
    parts = read_folder(cogvideox).components
    assert parts["transformer"].weights.numbers == {"BF16": TRANSFORMER_PARAMETERS}
    # Not the 220 million that the guide gives its text encoder: those are T5-base's.
    assert parts["text_encoder"].weights.numbers == {"BF16": TEXT_PARAMETERS}
    assert parts["text_encoder"].weights.stored_bytes == 2 * TEXT_PARAMETERS
    assert set(parts) == {"transformer", "text_encoder"}
    assert read_folder(cogvideox).class_name == "CogVideoXPipeline"


@pytest.fixture
def diffusers():
    pytest.importorskip("diffusers")
    try:  # a diffusers may be too new for torch 2.4: what it offers is imported where it is asked for
        from diffusers import CogVideoXTransformer3DModel  # noqa: F401 - whether it is there
    except RuntimeError as error:
        pytest.skip(str(error))
    pytest.importorskip("transformers")


@pytest.mark.usefixtures("diffusers")
def test_the_guides_two_models_each_counted_once(small, capsys):
    code, found = answer(capsys, small, *SIZES, *TWO_MODELS, "--dtype", "bf16", "--recommend", "--gpu", "T4")
    assert (code, found["fits"], found["dtype"], found["sample"]) == (0, True, "bfloat16", [4, 3, 8, 8])
    assert (found["trained"], found["frozen"]) == ("transformer", ["transformer", "text_encoder"])
    symbolic, parts = found["symbolic"]["estimate"], found["components"]
    stored = 2 * parts["transformer"]["stored_bytes"] + parts["text_encoder"]["stored_bytes"]
    # The allocator gives each of some hundred small tensors whole blocks of 512 bytes.
    assert stored < symbolic["breakdown"]["parameters"] < 1.5 * stored
    assert symbolic["tier"] == "symbolic"
    assert found["symbolic"]["plan"]["fits"]
    assert found["symbolic"]["largest_batch"] > 2


@pytest.mark.usefixtures("diffusers")
def test_what_is_frozen_can_be_chosen_and_one_component_is_trained(small, capsys):
    _, alone = answer(capsys, small, *SIZES, "--frozen", "none", "--budget", "1MiB")
    assert (alone["fits"], alone["frozen"], alone["dtype"]) == (False, [], "bfloat16")
    _, both = answer(capsys, small, *SIZES, "--budget", "1GiB")
    assert both["frozen"] == ["text_encoder"]
    for named in ("none", "transformer,text_encoder"):
        assert cli.main(["estimate", "--model-path", str(small), "--train", named, "--gpu", "T4"]) == 2
        assert "--train" in capsys.readouterr().err


def test_a_language_model_alone(tmp_path, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2}
    config |= {"vocab_size": 100, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"transformer.wte.weight": ("F16", (100, 32)), "transformer.h.0.attn.bias": ("U8", (1, 1, 64, 64))}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    write_safetensors(tmp_path / "model.fp32.safetensors", {"other": ("F32", (1000, 1000))})
    code, found = answer(capsys, tmp_path, "--seq-length", "16", "--gpu", "T4")
    model = found["components"]["model"]
    assert (model["parameters"], model["files"]) == (3200, ["model.safetensors"])
    assert model["numbers_by_dtype"] == {"F16": 3200, "U8": 4096}
    assert (code, found["symbolic"]["estimate"]["tier"]) == (0, "symbolic")


def test_a_network_that_cannot_be_built_is_never_promised_to_fit(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"_class_name": "NoSuchUNet", "in_channels": 4, "sample_size": 8}')
    write_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", {"w": ("F32", (10, 10))})
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "A100 80GB", "--recommend"]) == 2
    assert "NoSuchUNet" in capsys.readouterr().err


@each("text", ["", "[]", "{", "nul", '{"model_type": 3, "architectures": 7}', "\x00"])
def test_damaged_configs_end_in_a_message(tmp_path, text, capsys):
    (tmp_path / "config.json").write_text(text)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (10, 10))})
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "T4"]) in (1, 2)
    assert "vram-guard: " in capsys.readouterr().err


class Bomb:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (open, (str(self.proof), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt"])
def test_pickles_are_named_and_never_loaded(tmp_path, capsys, name):
    proof = tmp_path / "proof"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(proof)))
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "T4"]) == 2
    assert f"only pickles ({name})" in capsys.readouterr().err
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", (10, 10))})
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "T4"]) in (0, 1)
    assert f"model/{name}" in capsys.readouterr().out
    assert not proof.exists()


@each("content", [b"", b"\x10\x00", b"\x04\x00\x00\x00\x00\x00\x00\x00{abc", pickle.dumps({"a": 1}) * 4])
def test_damaged_weights(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert cli.main(["estimate", "--model-path", str(tmp_path), "--gpu", "T4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not a valid safetensors file" in captured.err


def test_scalars_and_empty_tensors_are_sound(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", ()), "b": ("F16", (0, 5)), "c": ("I64", (3,))})
    weights = read_weights(tmp_path)
    assert (weights.numbers, weights.parameters, weights.stored_bytes) == ({"F32": 1, "F16": 0, "I64": 3}, 1, 28)


@each(
    ("index", "said"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": 3}}', "does not belong to it"),
        ('{"weight_map": {"a": ["x"]}}', "not an index"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', "does not belong to it"),
        ('{"weight_map": {"a": "model.bin"}}', "does not belong to it"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "cannot be read"),
    ],
)
def test_hostile_indices(tmp_path, index, said):
    write_safetensors(tmp_path / "real.safetensors", {"w": ("F32", (2,))})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidInputError, match=said):
        read_weights(tmp_path)


def test_an_index_names_every_tensor_once(tmp_path):
    """A shard may lie there twice under two names: the index decides."""
    write_cogvideox(tmp_path / "x", SMALL, SMALL_TEXT)
    folder = tmp_path / "x" / "transformer"
    write_safetensors(folder / "diffusion_pytorch_model.safetensors", transformer_tensors(SMALL))
    plain = sum(count for count in read_folder(tmp_path / "x").components["transformer"].weights.numbers.values())
    (folder / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert read_folder(tmp_path / "x").components["transformer"].weights.parameters == plain
