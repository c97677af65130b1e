"""A small byte-level BPE tokenizer with DeepSeek's markers and a V3-style chat template, as files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
MARKERS = (USER, ASSISTANT, "<think>", "</think>")

CHAT_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages if m['role'] == 'system' %}"
    "{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m['content'] %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '" + USER + "' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + m['content'] + '" + EOS + "' }}"
    "{% elif m['role'] != 'system' %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% if thinking %}<think>{% endif %}{% endif %}"
)

_LINES = (
    "The quick brown fox jumps over the lazy dog and the other dogs.",
    "Speculation drafts several tokens and the model checks them all at once.",
    "Stop strings may span tokens: ###, END, stop, </answer>.",
    "Übung macht den Meister; déjà vu; naïve café.",
    "投机解码 一次 验证 多个 词元。 人工智能。",
    "emoji: 😀 👍🏽 👩‍👩‍👧",
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 3, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return tokenizer.to_str()


def write_tokenizer(path: Path, **settings: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json; `settings` replace entries of the latter."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_trained(), encoding="utf-8")
    config = {
        "tokenizer_class": "LlamaTokenizerFast",  # as the first DeepSeek-V3 release has it
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": BOS, "normalized": True, "special": True},
        "eos_token": {"__type": "AddedToken", "content": EOS, "normalized": True, "special": True},
        "pad_token": EOS,
        "model_max_length": 16384,
        "chat_template": CHAT_TEMPLATE,
    } | settings
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
