"""Small chat templates, each in the manner of a family of models."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvws.chat.render import ChatRenderer

HARD = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]")
HARD += ("[/INST]", "</s>", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]")
HARD += ("<turn>", "</turn>")

CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_QWEN_SYSTEM = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}"""

_QWEN_CALLS = """
{%- for call in message.tool_calls or [] %}
{{- ('\n' if message.content or not loop.first else '') + '<tool_call>\n{"name": "' }}
{{- call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}"""

_QWEN_ANSWER = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""

_QWEN_TURNS = (
    """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + THINKING + message.content }}"""
    + _QWEN_CALLS
    + """
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}"""
    + _QWEN_ANSWER
    + """
{%- endif %}
{%- endfor %}"""
)

QWEN2 = (
    _QWEN_SYSTEM
    + _QWEN_TURNS.replace("THINKING + ", "")
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Tools in the system message; neighbouring tool answers in one user turn."""

QWEN3 = (
    _QWEN_SYSTEM
    + """
{%- set seen = namespace(asked=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- set place = messages | length - 1 - loop.index0 %}
{%- if seen.open and message.role == 'user' and not (message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
{%- set seen.open = false %}{% set seen.asked = place %}
{%- endif %}
{%- endfor %}"""
    + _QWEN_TURNS.replace(
        "THINKING + ",
        "('<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' if loop.index0 > "
        "seen.asked and (loop.last or message.reasoning_content) else '') + ",
    )
    + """
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}"""
)
"""Reasoning only since the last question, and an empty thought in a last turn that had none."""

LLAMA3 = """{{- '<|bos|>' }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|head|>system<|/head|>\n\nCutting knowledge: 2023\n\n' + system + '<|eot|>' }}
{%- if tools %}
{%- if not messages %}{{ raise_exception('no first user message') }}{% endif %}
{{- '<|head|>user<|/head|>\n\nCall one of:\n\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n\n' }}{% endfor %}
{{- (messages[0].content | trim) + '<|eot|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|head|>assistant<|/head|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|head|>ipython<|/head|>\n\n' + (message.content | tojson) + '<|eot|>' }}
{%- else %}
{{- '<|head|>' + message.role + '<|/head|>\n\n' + (message.content | trim) + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
"""Tools in the first user message; one call a turn; texts trimmed."""

MISTRAL = """
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- '<|bos|>' }}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{{- '[INST]' + (system + '\n\n' if loop.first and system is defined else '') + message.content }}
{{- '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (call.function | tojson) + call.id + (']' if loop.last else ', ') }}
{%- endfor %}
{{- '</s>' }}
{%- elif message.role == 'assistant' %}{{ ' ' + (message.content | trim) + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[RESULTS]' + message.content + message.tool_call_id + '[/RESULTS]' }}
{%- else %}{{ raise_exception('unknown role') }}
{%- endif %}
{%- endfor %}"""
"""Tools before the last user message; turns counted; ids shown; nothing opens the next turn."""

GEMMA = """{{- '<|bos|>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (message.content | trim) + '</turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
"""No system role, no tools, strictly alternating."""

NAMED_ANSWERS = """
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.tool_calls %}{% set last.name = message.tool_calls[0].function.name %}{% endif %}
{%- if message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('an answer without a call') }}{% endif %}
{{- '<|im_start|>' + last.name + ' to=assistant\n' + message.content + '<|im_end|>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ ' call ' + (call | tojson) }}{% endfor %}
{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
"""A tool's answer shows the name in the call before it."""

FAMILIES = {
    "chatml": CHATML,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "named answers": NAMED_ANSWERS,
}


def bytes_and_pairs() -> Tokenizer:
    """Byte pairs of which some cross the ends of words and lines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("e", "r"), ("u", "s"), ("us", "er"), ("Ġ", "t"), ("t", "o"), ("x", "Ċ")]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({text: n for n, text in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def blank_first() -> Tokenizer:
    """One token per character, and a blank put before the text but not after special tokens."""
    letters = ["▁", "\n", *map(chr, range(33, 127)), "�"]
    tokenizer = Tokenizer(
        models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="�")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def make_renderer(
    folder: Path, template: str | None, tokenizer: Tokenizer, hard: tuple[str, ...] = HARD
) -> ChatRenderer:
    """The renderer of a model with that chat template and tokenizer, written into `folder`."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in hard])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return ChatRenderer(folder)
