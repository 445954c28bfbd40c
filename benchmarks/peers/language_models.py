"""Ask estimators that are formulas of a language model's sizes, where their sources lie here, and keep the answers.

    python -m benchmarks.peers.language_models --megatron-bridge DIR --primus DIR --simumax DIR [--json FILE]

Each DIR is a checkout with its .git folder; hf-mem has to be installed. The file, ``data/language_models.json`` unless
told otherwise, holds every answer, ours too, and the commit and date of each source; the pages are made from it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from benchmarks.harness.command import arguments_of
from benchmarks.harness.environment import environment
from benchmarks.harness.pages import GIB
from benchmarks.harness.records import Results, Row, write
from benchmarks.harness.statistics import OURS
from benchmarks.peers.pages import LANGUAGE_MODELS
from benchmarks.peers.tools import NoAnswerError, traced
from benchmarks.peers.workloads import workloads
from benchmarks.sharded import rows as sharded
from benchmarks.sharded.llama import SIZES, Sizes


@dataclass(frozen=True)
class Network:
    """The sizes that the formulas take."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    gated: bool
    tied: bool

    @classmethod
    def llama(cls, sizes: Sizes) -> Network:
        """Of a model that benchmarks/sharded knows."""
        heads = (sizes.heads, sizes.key_heads)
        return cls(sizes.width, sizes.hidden, sizes.layers, *heads, sizes.vocabulary, gated=True, tied=False)

    @classmethod
    def of_config(cls, config: Any) -> Network:
        """Of a model of transformers, by the names that its classes of settings have."""
        width = config.hidden_size
        hidden = next(
            (
                found
                for name in ("intermediate_size", "ffn_dim", "n_inner")
                if (found := getattr(config, name, None)) is not None
            ),
            4 * width,
        )
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        sizes = (width, hidden, config.num_hidden_layers, heads, key_heads, config.vocab_size)
        return cls(*sizes, gated=config.model_type == "llama", tied=config.tie_word_embeddings)


@dataclass(frozen=True)
class Training:
    """One row.

    Attributes:
        layout: "alone": one GPU; "fsdp": fully sharded; "tensor": tensor and sequence parallelism, with the optimizer
            divided over the other GPUs.
        recompute: "operators" is torchtitan's selective recomputation.
        measure: "reserved" or "allocated", of what was measured.
        ours: our answer in bytes; a NoAnswerError says why there is none.
        build: the model, where it is one of the page's first table.
        kernels: Megatron's with Transformer Engine: the loss is fused.
    """

    title: str
    network: Network
    batch: int
    length: int
    ours: Callable[[], int]
    layout: Literal["alone", "fsdp", "tensor"] = "alone"
    recompute: Literal["none", "operators", "full"] = "none"
    gpus: int = 1
    tensor: int = 1
    measured: int | None = None
    measure: Literal["reserved", "allocated"] = "reserved"
    by: str = ""
    build: Callable[[], Any] | None = None
    kernels: bool = False


# --- the rows -------------------------------------------------------------------------------------------------

#: Rows of the first table that are language models of equal layers.
OF_THE_TABLE = ("distilbert/distilgpt2", "facebook/opt-125m", "EleutherAI/gpt-neo-125M", "gpt2", "llama7b")

#: (training, figure) of benchmarks/sharded: the plain one, and the one that recomputes whole blocks.
OF_TORCHTITAN = (("8b-8", "reserved"), ("8b-8", "active"), ("7b-8", "active"), ("7b-8-full", "active"))

SUMMARY = Path("docs") / "b200" / "b200_release_v1.2_summary.json"
MEGATRON_LENGTH = 4096


def of_the_table() -> Iterator[Training]:
    """Float32 on one GPU."""
    for name in OF_THE_TABLE:
        asked = workloads()[name]
        with torch.device("meta"):
            config = asked.build().config
        yield Training(
            asked.title,
            Network.of_config(config),
            asked.batch_size,
            asked.sample_shape()[0],
            ours=lambda asked=asked: traced(asked).peak_reserved,
            measured=asked.measured.peak if asked.measured else None,
            by=asked.measured.gpu if asked.measured else "",
            build=asked.build,
        )


def of_torchtitan() -> Iterator[Training]:
    """Published peaks of 8 GPUs, with what benchmarks/sharded predicts for them."""
    found = sharded.predict(tuple(dict.fromkeys(recipe for recipe, _ in OF_TORCHTITAN)))
    for recipe, measure in OF_TORCHTITAN:
        row = next(
            row
            for row in found.rows
            if (row.details["recipe"], row.details["measure"], row.details["moment"]) == (recipe, measure, "steady")
            and row.judged
        )
        step = sharded.TRAININGS[recipe]()
        first, _ = step.step.batch(step.batch)
        yield Training(
            f"{row.name}, {measure}",
            Network.llama(SIZES["8B" if recipe.startswith("8b") else "Llama-2-7B"]),
            *first.shape,
            ours=lambda row=row: row.predicted,
            layout="fsdp",
            recompute="full" if recipe.endswith("full") else "operators",
            gpus=8,
            measured=row.measured,
            measure="reserved" if measure == "reserved" else "allocated",
            by=row.details["by"],
        )


def of_megatron(simumax: Path) -> Iterator[Training]:
    """What SimuMax's authors measured with Megatron-LM on 8 B200: dense models without pipeline parallelism."""
    for case in json.loads((simumax / SUMMARY).read_text(encoding="utf-8"))["rows"]:
        words = case["parallel"]
        name = {"llama3-70b": "70B", "llama3-405b": "405B"}.get(case["model"])
        if name is None or "pp1" not in words or "cp" in words or case["mbc"] != 4 or "seq" in case["case"]:
            continue  # more micro-batches took the same memory
        tensor = int(words.removeprefix("tp").split("pp")[0])
        yield Training(
            f"Llama 3 {name}, {case['layer_num']} layers, 8 B200, TP {tensor}, 1 x {MEGATRON_LENGTH}, allocated",
            _of_simumax(simumax, case["model"], case["layer_num"]),
            1,
            MEGATRON_LENGTH,
            ours=_no_megatron,
            layout="tensor",
            gpus=8,
            tensor=tensor,
            measured=round(case["real_alloc_gib"] * GIB),
            measure="allocated",
            by=f"SimuMax {SUMMARY}",
            kernels=True,
        )


def _of_simumax(folder: Path, name: str, layers: int) -> Network:
    """The model that was measured, cut to so many layers."""
    (file,) = (folder / "configs" / "models").glob(f"{name}*.json")
    sizes = json.loads(file.read_text(encoding="utf-8"))
    heads = (sizes["head_num"], sizes["kv_head_num"])
    width, hidden = sizes["hidden_size"], sizes["intermediate_size"]
    return Network(width, hidden, layers, *heads, sizes["vocab_size"], gated=True, tied=False)


def _no_megatron() -> int:
    raise NoAnswerError("reads the step itself: Megatron-LM with Transformer Engine, which is built with CUDA only")


# --- the estimators -------------------------------------------------------------------------------------------


def _megatron_sizes(network: Network) -> dict[str, Any]:
    """By Megatron-LM's names, which Primus' settings have too."""
    return {
        "num_layers": network.layers,
        "hidden_size": network.width,
        "ffn_hidden_size": network.hidden,
        "num_attention_heads": network.heads,
        "num_query_groups": network.key_heads,
        "kv_channels": network.width // network.heads,
        "share_embeddings_and_output_weights": network.tied,
    }


def megatron_bridge(folder: Path) -> Callable[[Training], int]:
    """``estimate_training_memory`` of training/utils/theoretical_memory_utils.py.

    The package imports Megatron-LM, of which this file needs a class for an annotation and the padding of the
    vocabulary; the class is an empty one here, and the vocabulary is said to need no padding.
    """
    root = folder / "src" / "megatron" / "bridge"
    packages = ("megatron", "megatron.bridge", "megatron.bridge.training", "megatron.bridge.utils")
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    sys.modules["megatron.bridge.training"].__path__ = [str(root / "training")]
    utils = types.ModuleType("megatron.bridge.training.utils")
    utils.__path__ = [str(root / "training" / "utils")]
    sys.modules[utils.__name__] = utils
    for name, attribute in (
        ("training.config", "ConfigContainer"),
        ("utils.vocab_utils", "calculate_padded_vocab_size"),
    ):
        module = types.ModuleType(f"megatron.bridge.{name}")
        setattr(module, attribute, object)
        sys.modules[module.__name__] = module
    estimate = import_module("megatron.bridge.training.utils.theoretical_memory_utils").estimate_training_memory

    def predict(training: Training) -> int:
        if training.layout == "fsdp":
            raise NoAnswerError("it knows no FSDP")
        network = training.network
        model = SimpleNamespace(
            **_megatron_sizes(network),
            vocab_size=network.vocabulary,
            should_pad_vocab=False,
            gated_linear_unit=network.gated,
            activation_func=torch.nn.functional.silu if network.gated else torch.nn.functional.gelu,
            seq_length=training.length,
            tensor_model_parallel_size=training.tensor,
            moe_layer_freq=1,
            num_moe_experts=None,
            mtp_num_layers=None,
        )
        config = SimpleNamespace(
            model=model,
            train=SimpleNamespace(micro_batch_size=training.batch),
            optimizer=SimpleNamespace(use_distributed_optimizer=training.gpus > 1),
            data_parallel_size=training.gpus // training.tensor,
        )
        return round(estimate(config).total_memory_bytes)

    return predict


def primus(folder: Path) -> Callable[[Training], int]:
    """``projection memory`` as it is by default ("simulate"), without reading a settings file."""
    sys.path.insert(0, str(folder))
    settings = import_module("primus.core.projection.training_config")
    profiler = import_module("primus.core.projection.module_profilers.language_model")

    def predict(training: Training) -> int:
        network = training.network
        model = settings.ModelConfig(
            **_megatron_sizes(network),
            padded_vocab_size=network.vocabulary,
            group_query_attention=network.key_heads < network.heads,
            use_flash_attn=True,
            swiglu=network.gated,
            moe_pattern=[0] * network.layers,
            cross_entropy_loss_fusion=training.kernels,
        )
        spread = training.gpus // training.tensor
        # It counts GPUs of tensor parallelism as replicas: with fewer samples it keeps no activations.
        whole = training.batch * training.gpus
        runtime = settings.RuntimeConfig(whole, training.batch, training.length, spread)
        recompute = {"none": None, "operators": "selective", "full": "full"}[training.recompute]
        parallel = settings.ModelParallelConfig(
            tensor_model_parallel_size=training.tensor,
            use_torch_fsdp2=training.layout == "fsdp",
            use_distributed_optimizer=training.layout == "tensor",
            recompute_granularity=recompute,
            recompute_method="uniform" if recompute == "full" else None,
        )
        os.environ["GPUS_PER_NODE"] = str(training.gpus)
        config = settings.TrainingConfig(model, runtime, parallel)
        root = profiler.build_profiler(profiler.get_language_model_profiler_spec(config))
        states = root.estimated_num_params(rank=0) * root.get_num_bytes_per_param()
        return round(states + root.estimated_activation_memory(training.batch, training.length))

    return predict


def simumax(folder: Path) -> Callable[[Training], int]:
    """``PerfLLM.analysis_mem`` without recomputation; the system file bears on times only."""
    sys.path.insert(0, str(folder))
    settings = import_module("simumax.core.config")
    performance = import_module("simumax.core.perf_llm").PerfLLM

    def predict(training: Training) -> int:
        if training.layout == "fsdp":
            raise NoAnswerError("it knows no FSDP: ZeRO-2 and ZeRO-3 are ignored")
        network = training.network
        asked = performance()
        strategy = settings.StrategyConfig(
            seq_len=training.length,
            micro_batch_size=training.batch,
            micro_batch_num=1,
            world_size=training.gpus,
            tp_size=training.tensor,
            zero_state=1 if training.gpus > 1 else 0,
            enable_recompute=False,
            cross_entropy_loss_fusion=training.kernels,
            te_version="2.11.0" if training.kernels else None,
        )
        model = settings.ModelConfig(
            hidden_size=network.width,
            head_num=network.heads,
            kv_head_num=network.key_heads,
            head_size=network.width // network.heads,
            intermediate_size=network.hidden,
            layer_num=network.layers,
            vocab_size=network.vocabulary,
            use_swiglu=network.gated,
            model_type="dense",
            model_name="dense",
        )
        model.padded_vocab_size = training.kernels  # a property of the class
        system = settings.SystemConfig.init_from_config_file(folder / "configs" / "system" / "b200_bf16_ceperm.json")
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked.configure(strategy_config=strategy, model_config=model, system_config=system)
            asked.run_estimate()
            found = asked.analysis_mem()
            wanted = "peak_mem" if training.measure == "allocated" else "peak_mem_with_reserved"
            peaks = asked.get_pp_stage_peak_mem(found, wanted, toG=True)
        return round(max(float(peak) for peak in peaks.values()) * GIB)

    return predict


def hf_mem() -> Callable[[Training], int]:
    """Its reading of a safetensors header, handed over as the model's file would have it (its tool downloads it)."""
    parse = import_module("hf_mem.safetensors.metadata").parse_safetensors_metadata

    def predict(training: Training) -> int:
        if training.build is None:
            raise NoAnswerError("it knows one GPU")
        with torch.device("meta"):
            model = training.build()
        header = {name: {"dtype": "F32", "shape": list(weight.shape)} for name, weight in model.named_parameters()}
        return int(parse({"Transformer": header}).bytes_count)

    return predict


# --- the command ----------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Ask, print and write; the exit status is 1 where an estimator failed."""
    parser = arguments_of("benchmarks.peers.language_models", __doc__)
    for name in ("megatron-bridge", "primus", "simumax"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR", help="a checkout of its repository")
    parser.add_argument("--json", type=Path, default=LANGUAGE_MODELS, metavar="FILE")
    options = parser.parse_args(arguments)
    results = Results(environment=environment())
    trainings = [*of_the_table(), *of_torchtitan(), *of_megatron(options.simumax)]
    tools: dict[str, Callable[[Training], int]] = {OURS: lambda training: training.ours()}
    for name, folder, make in (
        ("Megatron Bridge", options.megatron_bridge, megatron_bridge),
        ("Primus", options.primus, primus),
        ("SimuMax", options.simumax, simumax),
    ):
        tools[name] = make(folder)
        facts = {"commit": ("rev-parse", "HEAD"), "date": ("log", "-1", "--format=%cs")}
        results.made_with[name] = {fact: _git(folder, *command) for fact, command in facts.items()}
    tools["hf-mem"] = hf_mem()
    results.made_with["hf-mem"] = {"release": metadata.version("hf-mem")}
    results.environment["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    for training in trainings:
        with contextlib.redirect_stdout(sys.stderr):
            results.rows += [answered(name, predict, training) for name, predict in tools.items()]
    write(results, options.json)
    for row in results.rows:
        print(f"{row.name}: {row.source}: {shown(row)}")
    return int(any(row.reason.startswith("failed") for row in results.rows))


def shown(row: Row) -> str:
    """The answer of a row, with its error where the step was measured; or why there is none."""
    if row.predicted is None:
        return row.reason
    return f"{row.predicted / GIB:.2f} GiB" + ("" if row.measured is None else f" {row.error:+.1%}")


def answered(tool: str, predict: Callable[[Training], int], training: Training) -> Row:
    """One tool's row about one training."""
    reason, predicted = "", None
    try:
        predicted = predict(training)
    except NoAnswerError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - another's code: the table continues
        reason = f"failed: {type(error).__name__}: {str(error)[:200]}"
    details = {"gpu": training.by, "measure": training.measure}
    nothing: dict[str, Any] = {"tier": "", "seconds": None}
    return Row(tool, training.title, training.measured, predicted, reason=reason, details=details, **nothing)


def _git(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
