"""The byte-level BPE tokenizer inside a GGUF file, as Hugging Face tokenizer files."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvws.errors import ModelError

_CONTROL_TOKEN = 3


def tokenizer_documents(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """JSON values and texts by file name, from a GGUF file's `fields`.

    Raises:
        ModelError: another kind of tokenizer.
        KeyError: a field is missing.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"the GGUF file's tokenizer {kind} has no known equivalent",
            hint="only SmolLM's byte-level BPE can be converted",
        )
    words: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL_TOKEN]

    def word(name: str) -> str:
        return words[int(fields[f"tokenizer.ggml.{name}_token_id"])]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": word("bos"),
        "eos_token": word("eos"),
        "unk_token": word("unknown"),
        "pad_token": word("padding"),
        "model_max_length": int(fields["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    merges = [(left, right) for left, right in map(str.split, fields["tokenizer.ggml.merges"])]
    tokenizer: Any = _bpe(words, merges, control)
    return {"tokenizer_config.json": config}, {"tokenizer.json": tokenizer.to_str()}


def _bpe(words: list[str], merges: list[tuple[str, str]], control: list[str]) -> Any:
    """SmolLM's splitting: digits one by one, then GPT-2's pattern over bytes."""
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in control]
    )
    return tokenizer
