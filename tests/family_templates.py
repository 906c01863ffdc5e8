"""Chat templates in the shapes that model families have: markers, thoughts, tools and generation prompts."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}')
_SCHEMAS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"

# The thought `t` and the answer `a` of a message: from its key, or from its content at the tags.
_SPLIT = (
    "{% set ns.t = '' %}{% set ns.a = m.content or '' %}{% if m.reasoning_content is string %}"
    "{% set ns.t = m.reasoning_content %}{% elif '</think>' in ns.a %}"
    "{% set ns.t = ns.a.split('</think>')[0].split('<think>')[-1] %}{% set ns.a = ns.a.split('</think>')[-1] %}"
    "{% endif %}")
# The number of the last user message: thoughts before it are dropped.
_LAST = ("{% set ns = namespace(last=-1, t='', a='') %}{% for m in messages %}{% if m.role == 'user' %}"
         "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}")


def _chatml(answer: str, generation: str, before: str = "") -> str:
    return (before + _SCHEMAS + "{% for m in messages %}{% if m.role == 'tool' %}" + _RESULT +
            "{% elif m.role == 'assistant' %}<|im_start|>assistant\n" + answer + _CALLS + "<|im_end|>\n"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n" + generation + "{% endif %}")


_CLOSED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_THOUGHTFUL = _SPLIT + (
    "{% if loop.index0 > ns.last and (loop.last or ns.t) %}<think>\n{{ ns.t.strip() }}\n</think>\n\n"
    "{{ ns.a.lstrip('\n') }}{% else %}{{ ns.a.lstrip('\n') }}{% endif %}")
_LLAMA = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"


def _llama(role: str) -> str:
    return _LLAMA.replace("{{ role }}", role)


TEMPLATES = {
    "qwen25": _chatml("{{ m.content or '' }}", ""),
    "qwen3": _chatml(_THOUGHTFUL, _CLOSED, _LAST),
    "qwen35": _chatml(_THOUGHTFUL.replace(" and (loop.last or ns.t)", ""),
                      _CLOSED.replace("{% endif %}", "{% else %}<think>\n{% endif %}"), _LAST),
    "smollm3": _chatml(
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
        "{{ (m.content or '').lstrip('\n') }}",
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"),
    "llama31": (
        "{{ bos_token }}{% if tools %}" + _llama("system") + "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "<|eot_id|>{% endif %}{% for m in messages %}{% if m.tool_calls %}" + _llama("assistant") +
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% else %}" +
        _llama("{{ 'ipython' if m.role == 'tool' else m.role }}") + "{{ m.content | trim }}<|eot_id|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + _llama("assistant") + "{% endif %}"),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n"
        "{% endif %}"),
    "r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}"
        "{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ c.function.name + '\n' + c.function.arguments }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"),
    "gptoss": (
        "<|start|>system<|message|>Reasoning: medium<|end|>{% if tools %}<|start|>developer<|message|>"
        "{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if '<|channel|>analysis' in (m.content or '') %}{{ raise_exception('pass the analysis as thinking') }}"
        "{% endif %}{% set last = loop.last and not add_generation_prompt %}{% if m.tool_calls %}"
        "{% set ns = namespace(final=false) %}{% for n in messages[loop.index:] %}{% if n.role == 'assistant' and not "
        "n.tool_calls %}{% set ns.final = true %}{% endif %}{% endfor %}{% if m.thinking and not ns.final %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}{% if m.thinking and last %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if last else '<|end|>' }}"
        "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"),
    "phi": ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    "glm": (
        "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}" + _LAST +
        "{% for m in messages %}{% if m.role == 'assistant' %}" + _SPLIT + "<|assistant|>\n"
        "{% if loop.index0 > ns.last and ns.t %}<think>{{ ns.t.strip() }}</think>{% else %}<think></think>{% endif %}\n"
        "{{ ns.a.strip() }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n"
        "<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"),
}
"""One template of each family."""

_QWEN = (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
         ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
_TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "qwen25": _QWEN, "qwen3": _QWEN, "qwen35": _QWEN, "smollm3": _QWEN,
    "llama31": (["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], []),
    "gemma": (["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], []),
    "r1": (["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"],
           ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"]),
    "gptoss": (["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"], []),
    "phi": (["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"], []),
    "glm": (["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
            _QWEN[1]),
}
_BOS = {"llama31": "<|begin_of_text|>", "gemma": "<bos>", "r1": "<｜begin▁of▁sentence｜>"}


def family_tokenizer(family: str, *, special: bool = False, **changes: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the added tokens and the template of a family.

    Args:
        special: make all added tokens special.
        changes: keyword arguments of the tokenizer.
    """
    control, other = _TOKENS[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in other])
    settings = {"eos_token": control[0], "bos_token": _BOS.get(family), "chat_template": TEMPLATES[family], **changes}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in settings.items() if v is not None})


def added_tokens(family: str) -> tuple[list[str], list[str]]:
    """The special added tokens of a family, and the others."""
    return _TOKENS[family]
