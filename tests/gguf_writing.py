#!/usr/bin/env python3
"""What llama.cpp's converter does, for a Llama with a byte-level tokenizer. Tests run it as a script in its place.

The environment variable FAKE_CONVERTER names a fault: `weights`, `tokens`, `end`, `crash`, `nothing` or `garbage`.
"""

import argparse
import json
import os
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

TYPES = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16,
         "q8_0": gguf.GGMLQuantizationType.Q8_0}
PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}


def name_of(name: str) -> str:
    """The name of a weight in a GGUF file."""
    if name in ENDS:
        return ENDS[name]
    _, _, number, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{number}.{PARTS[part]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp's rotary embedding."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for option in ("--outfile", "--outtype", "--model-name"):
        parser.add_argument(option)
    arguments = parser.parse_args()
    fault = os.environ.get("FAKE_CONVERTER")
    if fault == "crash":
        import a_package_that_nobody_has  # noqa: F401
    if fault == "nothing":
        return
    if fault == "garbage":
        Path(arguments.outfile).write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
        return
    config = json.loads((arguments.model / "config.json").read_text())
    tokenizer = json.loads((arguments.model / "tokenizer.json").read_text())
    generation = json.loads((arguments.model / "generation_config.json").read_text())
    ids = dict(tokenizer["model"]["vocab"]) | {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {one["content"] for one in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(arguments.outfile, "llama")
    writer.add_name(arguments.model_name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    if fault == "tokens":
        tokens[40], tokens[60] = tokens[60], tokens[40]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    end = generation["eos_token_id"]
    writer.add_eos_token_id(7 if fault == "end" else end[0] if isinstance(end, list) else end)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_chat_template((arguments.model / "chat_template.jinja").read_text())
    kind = TYPES[arguments.outtype]
    for name, weight in load_file(arguments.model / "model.safetensors").items():
        weight = weight.astype(np.float32)
        if ("q_proj" in name or "k_proj" in name) and fault != "weights":
            weight = interleaved(weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        as_is = weight.ndim == 1 or (arguments.outtype == "q8_0" and weight.shape[-1] % 32)
        stored = gguf.GGMLQuantizationType.F32 if as_is else kind
        writer.add_tensor(name_of(name), gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
