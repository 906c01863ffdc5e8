"""What the fork server of `processes` does before it forks; its processes then begin with all of it done."""

import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
import transformers.models.gpt2.modeling_gpt2
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import processes  # noqa: F401
import quick  # noqa: F401
from tropism.cli import commands  # noqa: F401

# Tables that libraries fill at their first model. Nothing here starts a thread: a fork would lose it.
torch.set_num_threads(1)
get_checkpoint_conversion_mapping("llama")
with torch.device("meta"):
    AutoModelForCausalLM.from_config(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8))
