"""Model folders as the hub has them: true configs, true tensor names and shapes, sparse files for the data."""

from __future__ import annotations

import json
import struct
from math import prod

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}

#: CogVideoX-5b's own ``transformer/config.json``, the entries that say something about memory.
TRANSFORMER = {
    "_class_name": "CogVideoXTransformer3DModel",
    "attention_head_dim": 64,
    "in_channels": 16,
    "max_text_seq_length": 226,
    "num_attention_heads": 48,
    "num_layers": 42,
    "out_channels": 16,
    "patch_size": 2,
    "sample_frames": 49,
    "sample_height": 60,
    "sample_width": 90,
    "temporal_compression_ratio": 4,
    "text_embed_dim": 4096,
    "time_embed_dim": 512,
    "use_rotary_positional_embeddings": True,
}
#: The encoder of T5 v1.1 XXL, as its folder has it.
TEXT_ENCODER = {
    "architectures": ["T5EncoderModel"],
    "model_type": "t5",
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}
#: Both, small enough to be made real.
SMALL = {**TRANSFORMER, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32}
SMALL |= {"time_embed_dim": 16, "max_text_seq_length": 8, "in_channels": 4, "out_channels": 4}
SMALL_TEXT = {**TEXT_ENCODER, "num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 100}


def write_safetensors(path, tensors):
    """A file with these tensors, name -> (dtype, shape); its data is a hole that takes no disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_shards(folder, stem, tensors):
    """The same in two files with an index."""
    names = list(tensors)
    placed = {}
    for number in range(2):
        part = names[number::2]
        file = f"{stem}-{number + 1:05d}-of-00002.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        placed |= dict.fromkeys(part, file)
    total = sum(BYTES[dtype] * prod(shape) for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def transformer_tensors(config=TRANSFORMER):
    """Names and shapes of a CogVideoXTransformer3DModel (5,570,283,072 parameters for CogVideoX-5b)."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    head, time, text = config["attention_head_dim"], config["time_embed_dim"], config["text_embed_dim"]
    patch = config["in_channels"] * config["patch_size"] ** 2
    out = config["out_channels"] * config["patch_size"] ** 2
    linear = {
        "patch_embed.text_proj": (width, text),
        "time_embedding.linear_1": (time, width),
        "time_embedding.linear_2": (time, time),
        "norm_out.linear": (2 * width, time),
        "proj_out": (out, width),
    }
    norms = {"norm_final": width, "norm_out.norm": width}
    for number in range(config["num_layers"]):
        block = f"transformer_blocks.{number}"
        for norm in ("norm1", "norm2"):
            linear[f"{block}.{norm}.linear"] = (6 * width, time)
            norms[f"{block}.{norm}.norm"] = width
        for one in ("norm_q", "norm_k"):
            norms[f"{block}.attn1.{one}"] = head
        for one in ("to_q", "to_k", "to_v", "to_out.0"):
            linear[f"{block}.attn1.{one}"] = (width, width)
        linear[f"{block}.ff.net.0.proj"] = (4 * width, width)
        linear[f"{block}.ff.net.2"] = (width, 4 * width)
    shapes = {"patch_embed.proj.weight": (width, patch // 4, 2, 2), "patch_embed.proj.bias": (width,)}
    for name, (rows, columns) in linear.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name, size in norms.items():
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def text_encoder_tensors(config=TEXT_ENCODER):
    """Names and shapes of a T5EncoderModel (4,762,310,656 parameters for the XXL one)."""
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    shapes = {"shared.weight": (config["vocab_size"], width), "encoder.final_layer_norm.weight": (width,)}
    for number in range(config["num_layers"]):
        attention, feed = (f"encoder.block.{number}.layer.{part}" for part in (0, 1))
        for one in ("q", "k", "v"):
            shapes[f"{attention}.SelfAttention.{one}.weight"] = (inner, width)
        shapes[f"{attention}.SelfAttention.o.weight"] = (width, inner)
        shapes[f"{attention}.layer_norm.weight"] = (width,)
        for one in ("wi_0", "wi_1"):
            shapes[f"{feed}.DenseReluDense.{one}.weight"] = (config["d_ff"], width)
        shapes[f"{feed}.DenseReluDense.wo.weight"] = (width, config["d_ff"])
        shapes[f"{feed}.layer_norm.weight"] = (width,)
    shapes["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, config["num_heads"])
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def write_cogvideox(path, transformer=TRANSFORMER, text_encoder=TEXT_ENCODER):
    """A pipeline folder: transformer and text encoder in shards, a scheduler and a tokenizer without weights."""
    path.mkdir(parents=True)
    pipeline = {
        "_class_name": "CogVideoXPipeline",
        "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    }
    (path / "model_index.json").write_text(json.dumps(pipeline))
    for name in ("scheduler", "tokenizer", "transformer", "text_encoder"):
        (path / name).mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "CogVideoXDDIMScheduler"}')
    (path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (path / "transformer" / "config.json").write_text(json.dumps(transformer))
    (path / "text_encoder" / "config.json").write_text(json.dumps(text_encoder))
    write_shards(path / "transformer", "diffusion_pytorch_model", transformer_tensors(transformer))
    write_shards(path / "text_encoder", "model", text_encoder_tensors(text_encoder))
    return path
