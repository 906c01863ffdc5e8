"""Values that a model, a tokenizer or an adapter must not have: each is refused before the first step."""

from typing import Any

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "head_dim",
          "num_key_value_heads", "max_position_embeddings")
_NOT_SIZES: dict[str, Any] = {"zero": 0, "negative": -4, "text": "4", "nan": float("nan"), "list": [4], "object": {},
                              "fraction": 2.5, "true": True, "huge": 2**70}

NESTED = "[" * 100_000 + "]" * 100_000
_DEEP = '{"a":' * 5000 + "1" + "}" * 5000

# The whole text of a file that ought to be a JSON object.
JSON_TEXTS: dict[str, bytes] = {
    "empty": b"", "blank": b" " * 5000, "null": b"null", "number": b"5", "text": b'"config"', "array": b"[]",
    "object of nothing": b"{}", "nested": NESTED.encode(), "nested objects": _DEEP.encode(),
    "not utf-8": b'{"model_type": "\xff\xfe"}', "utf-16": '{"model_type": "llama"}'.encode("utf-16"),
    "cut": b'{"model_type": "llam', "nul": b"\x00" * 64, "digits": b'{"model_type": ' + b"9" * 5000 + b"}",
    "yaml": b"model_type: llama\n", "html": b"<!doctype html><title>404</title>", "pickle": b"\x80\x04K\x05.",
    "surrogate": b'{"model_type": "\\ud800"}', "two values": b"{} {}", "trailing comma": b'{"model_type": "llama",}'}

CONFIGS: dict[str, dict[str, Any]] = {
    **{f"{size} is {name}": {size: value} for size in _SIZES for name, value in _NOT_SIZES.items()
       if not (name == "huge" and size == "max_position_embeddings")},
    "num_hidden_layers is a million": {"num_hidden_layers": 10**6},
    "num_hidden_layers is a float": {"num_hidden_layers": 1e6},
    "num_hidden_layers is 10^15": {"num_hidden_layers": 10**15},
    "one layer more than the files": {"num_hidden_layers": 3},
    "hidden_size of a terabyte": {"hidden_size": 2**20, "intermediate_size": 2**20, "head_dim": 2**20},
    "vocab_size of a terabyte": {"vocab_size": 2**33},
    "vocab_size smaller": {"vocab_size": 5}, "vocab_size larger": {"vocab_size": 5000},
    "intermediate_size other": {"intermediate_size": 33}, "head_dim other": {"head_dim": 24},
    "key heads do not divide": {"num_key_value_heads": 3}, "hidden_size not divisible": {"hidden_size": 33},
    "model_type unknown": {"model_type": "martian"}, "model_type number": {"model_type": 5},
    "model_type list": {"model_type": ["llama"]}, "model_type object": {"model_type": {"a": 1}},
    "model_type null": {"model_type": None}, "model_type of an image model": {"model_type": "vit"},
    "model_type of an encoder": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "model_type with path": {"model_type": "../../llama"},
    "architectures number": {"architectures": 5}, "architectures of objects": {"architectures": [{}]},
    "eps text": {"rms_norm_eps": "tiny"}, "eps nan": {"rms_norm_eps": float("nan")}, "eps nan text":
    {"rms_norm_eps": "nan"}, "eps list": {"rms_norm_eps": [1e-6]}, "eps negative": {"rms_norm_eps": -1.0},
    "activation unknown": {"hidden_act": "martian"}, "activation number": {"hidden_act": 5},
    "activation list": {"hidden_act": ["silu"]},
    "rope unknown": {"rope_parameters": {"rope_type": "martian", "rope_theta": 1e4}},
    "rope theta text": {"rope_parameters": {"rope_type": "default", "rope_theta": "many"}},
    "rope theta nan": {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
    "rope theta zero": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "rope theta list": {"rope_parameters": {"rope_type": "default", "rope_theta": [1]}},
    "rope list": {"rope_parameters": [1]}, "rope text": {"rope_parameters": "default"},
    "rope number": {"rope_parameters": 5},
    "rope factor text": {"rope_parameters": {"rope_type": "linear", "factor": "2", "rope_theta": 1e4}},
    "rope yarn without factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "rope longrope lists": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1],
                                                "long_factor": "x"}},
    "layer_types number": {"layer_types": 5}, "layer_types short": {"layer_types": ["full_attention"]},
    "layer_types unknown": {"layer_types": ["martian", "martian"]}, "dtype unknown": {"dtype": "float7"},
    "dtype number": {"dtype": 5}, "quantization text": {"quantization_config": "nf4"},
    "quantization unknown": {"quantization_config": {"quant_method": "martian"}},
    "quantization without method": {"quantization_config": {"bits": 4}},
    "quantization list": {"quantization_config": [4]}, "id2label text": {"id2label": "x"},
    "eos object": {"eos_token_id": {"a": 1}}, "auto_map text": {"model_type": "martian", "auto_map": "x"},
    "tied though different": {"tie_word_embeddings": "yes"}, "attention_bias text": {"attention_bias": "no"},
    "bias that is not in the files": {"attention_bias": True}, "llama 4": {"model_type": "llama4"},
    "llama 4 text": {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]},
    "other family": {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
    "transformers_version object": {"transformers_version": {}, "model_type": "martian"}}



def nested_parts(name: str, depth: int) -> Any:
    """Parts of a tokenizer in one another."""
    part: Any = {"type": "Sequence", name: []}
    for _ in range(depth):
        part = {"type": "Sequence", name: [part]}
    return part


TOKENIZERS: dict[str, Any] = {
    "no model": lambda t: t.pop("model"), "model type unknown": lambda t: t["model"].update(type="Martian"),
    "vocab list": lambda t: t["model"].update(vocab=[1]), "vocab text": lambda t: t["model"].update(vocab="x"),
    "vocab ids text": lambda t: t["model"].update(vocab={"a": "b"}),
    "vocab ids negative": lambda t: t["model"].update(vocab={"a": -1}),
    "vocab ids huge": lambda t: t["model"].update(vocab={"a": 2**40}),
    "vocab empty": lambda t: (t["model"].update(vocab={}), t.update(added_tokens=[])),
    "merges of unknown tokens": lambda t: t.update(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}),
    "merges of one": lambda t: t.update(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}),
    "merges text": lambda t: t.update(model={"type": "BPE", "vocab": {"a": 0}, "merges": "a b"}),
    "merges numbers": lambda t: t.update(model={"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}),
    "unigram without pieces": lambda t: t.update(model={"type": "Unigram", "vocab": [], "unk_id": 5}),
    "unigram unknown id": lambda t: t.update(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5}),
    "unigram scores text": lambda t: t.update(model={"type": "Unigram", "vocab": [["a", "b"]], "unk_id": 0}),
    "word pieces without unknown": lambda t: t.update(added_tokens=t["added_tokens"], model={
        "type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100}),
    "words without unknown": lambda t: t.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
    "normalizer unknown": lambda t: t.update(normalizer={"type": "Martian"}),
    "normalizer number": lambda t: t.update(normalizer=5),
    "normalizer with a bad pattern": lambda t: t.update(normalizer={
        "type": "Replace", "pattern": {"Regex": "("}, "content": "x"}),
    "normalizers nested": lambda t: t.update(normalizer=nested_parts("normalizers", 200)),
    "splits nested": lambda t: t.update(pre_tokenizer=nested_parts("pretokenizers", 200)),
    "decoders nested": lambda t: t.update(decoder=nested_parts("decoders", 200)),
    "split by a bad pattern": lambda t: t.update(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "[["}, "behavior": "Isolated", "invert": False}),
    "processor of a token that is not there": lambda t: t.update(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
        "special_tokens": {}}),
    "decoder number": lambda t: t.update(decoder=5), "added_tokens text": lambda t: t.update(added_tokens="x"),
    "added_tokens of numbers": lambda t: t.update(added_tokens=[5]),
    "added token without id": lambda t: t.update(added_tokens=[{"content": "x"}]),
    "truncation text": lambda t: t.update(truncation="x"), "version number": lambda t: t.update(version=5)}

TOKENIZER_CONFIGS: dict[str, dict[str, Any]] = {
    "eos_token number": {"eos_token": 5}, "eos_token list": {"eos_token": ["a"]}, "eos_token object": {"eos_token": {}},
    "eos_token null": {"eos_token": None}, "class number": {"tokenizer_class": 5},
    "class object": {"tokenizer_class": {"a": 1}},
    "added tokens text": {"added_tokens_decoder": "x"}, "added tokens list": {"added_tokens_decoder": [1]},
    "added tokens ids text": {"added_tokens_decoder": {"x": {"content": "y"}}},
    "added tokens numbers": {"added_tokens_decoder": {"5": 5}},
    "template number": {"chat_template": 5}, "template of numbers": {"chat_template": [1, 2]},
    "template object": {"chat_template": {"a": [1]}}, "template list of objects": {"chat_template": [{"name": 5}]},
    "extra tokens number": {"extra_special_tokens": 5}, "model_max_length text": {"model_max_length": "long"},
    "auto_map text": {"auto_map": "x", "tokenizer_class": "Martian"}}

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank huge": {"r": 10**9}, "rank above all sides": {"r": 100_000}, "rank 10^30": {"r": 10**30},
    "rank zero": {"r": 0}, "rank negative": {"r": -8}, "rank text": {"r": "8"}, "rank list": {"r": [8]},
    "rank other than the file": {"r": 7}, "rank pattern huge": {"rank_pattern": {"q_proj": 10**9}},
    "alpha nan": {"lora_alpha": float("nan")}, "alpha infinite": {"lora_alpha": float("inf")},
    "alpha text": {"lora_alpha": "x"}, "targets empty": {"target_modules": []},
    "targets unknown": {"target_modules": ["martian"]}, "targets number": {"target_modules": 5},
    "targets of a bad pattern": {"target_modules": "("}, "targets of lists": {"target_modules": [[1]]},
    "type unknown": {"peft_type": "MARTIAN"}, "type number": {"peft_type": 5}, "type list": {"peft_type": ["LORA"]},
    "type object": {"peft_type": {}}, "type missing": {"peft_type": None},
    "setting unknown": {"martian": {"a": 1}}, "task unknown": {"task_type": "MARTIAN"},
    "layers text": {"layers_to_transform": "x"}, "layers beyond": {"layers_to_transform": [99]},
    "modules_to_save text": {"modules_to_save": "lm_head"}, "modules_to_save unknown": {"modules_to_save": ["martian"]},
    "bias unknown": {"bias": "some"}, "start unknown": {"init_lora_weights": "martian"},
    "start number": {"init_lora_weights": 5}, "dora text": {"use_dora": "yes"}}


