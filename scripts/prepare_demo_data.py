"""Turn the demo corpus into a tokenizer, packed token streams and held-out prompts.

The corpus is a JSON-lines file (optionally .xz) of {"source", "text"}. Documents are held out by a hash of
their text before anything is built from them, instruction dialogues are derived from the same documents, a
byte-level BPE with DeepSeek's pre-tokenizer patterns and special-token strings is trained, and every stream
is written as one uint16 array `<split>_<stream>.npy.xz` in which each document is BOS ... EOS.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import lzma
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
MARKERS = [
    "<think>", "</think>", "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}"
    "{% for message in messages if message['role'] == 'system' %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}{{ message['content'] }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# DeepSeek-V3's pre-tokenizer patterns: digits in threes, CJK runs, words, punctuation, space.
SPLIT_PATTERNS = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]


class Stream(NamedTuple):
    """A named share of the training mix: its corpus sources, and how often each document is repeated."""

    weight: float
    sources: dict[str, int]


STREAMS: dict[str, Stream] = {
    "aws": Stream(0.15, {"doc_botocore": 1, "doc_awscli": 1}),
    "docs": Stream(0.15, {"doc_python": 1, "doc_django": 1, "doc_postgres": 1, "doc_apache2": 1}),
    "rust_scipy": Stream(0.04, {"doc_scipy": 1, "doc_rust_std": 1, "doc_rust_book": 2, 
                                "doc_rust_reference": 1,
                                "doc_rust_rust-by-example": 1, "doc_rust_nomicon": 1}),
    "code": Stream(0.19, {"code_stdlib": 1, "code_misc": 1, "code_networkx": 1, "code_numpy": 1}),
    "code_ml": Stream(0.06, {"code_transformers": 1, "code_sympy": 1}),
    "prose": Stream(0.13, {"pd_austen": 3, "pd_moby": 2, "pd_sotu": 1, "pd_mhcc": 1, "pd_web": 1,
                           "pd_tdavid": 1}),
    "factbook": Stream(0.04, {"pd_factbook": 1, "pd_factbook_new": 1}),
    "lexicon": Stream(0.02, {"lex_wordnet": 1}),
    "chat": Stream(0.02, {"chat_chitchat": 1}),
    "instruct": Stream(0.20, {}),
}  # fmt: skip
HELD_OUT_ONE_IN = 64
NAMES = "Anna Ben Carla David Emma Frank Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul".split()  # noqa: SIM905
THINGS = "apples books coins cards stamps pencils shells tickets cookies stones".split()  # noqa: SIM905


class Dialogue(NamedTuple):
    """One question and its answer, with the stream of instructions it belongs to."""

    kind: str
    question: str
    answer: str


# ---------------------------------------------------------------- documents


def read_documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, cleaned text) of every document that some stream uses."""
    used = {source for stream in STREAMS.values() for source in stream.sources} | {"chat_chatterbot"}
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["source"] in used:
                text = clean(record["source"], record["text"])
                if len(text) > 40:
                    yield record["source"], text


def clean(source: str, text: str) -> str:
    """Remove boilerplate: licence headers, navigation lines, spaces before punctuation."""
    if source.startswith("code_"):
        lines = text.lstrip("\n").split("\n")
        head = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), 0)
        if re.search("copyright|license", "\n".join(lines[:head]), re.IGNORECASE):
            lines = lines[head:]
        text = "\n".join(lines)
    elif source == "doc_django":
        text = re.sub(r"^Django 3\.2\.\d+ documentation\s+Home \|.*?next »\s+", "", text, flags=re.DOTALL)
        text = re.sub(r"\s+Last update:.*$", "", text, flags=re.DOTALL)
    elif source == "doc_apache2":
        text = re.sub(r"Available Languages:.*\n+", "", text)
    elif source == "pd_web":
        text = re.sub(r" ([,.;:?!’”])", r"\1", text)  # noqa: RUF001
        text = re.sub(r"([“‘]) ", r"\1", text)  # noqa: RUF001
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def held_out(text: str) -> bool:
    """True for a fixed one in HELD_OUT_ONE_IN of all documents, chosen by the text alone."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


# ---------------------------------------------------------------- instructions built from documents


def dialogues_of(source: str, text: str, rng: random.Random) -> Iterator[Dialogue]:
    """Yield the question-and-answer pairs that can be read off one document."""
    if source == "doc_awscli":
        yield from command_questions(text)
    elif source == "doc_botocore":
        yield from parameter_questions(text, rng)
    elif source in ("code_stdlib", "code_misc", "code_networkx", "code_sympy"):
        yield from function_questions(text, rng)
    elif source == "lex_wordnet":
        yield from definition_questions(text, rng)
    elif source.startswith("pd_factbook"):
        yield from country_questions(text, rng)
    elif source == "doc_python":
        yield from reference_questions(text, rng)
    elif source in ("doc_postgres", "doc_apache2", "doc_rust_book"):
        yield from section_questions(text)
    elif source == "chat_chatterbot":
        for block in text.split("\n\n"):
            question, *answers = block.strip().split("\n")
            yield from (Dialogue("small talk", question, answer) for answer in answers[:6] if len(answer) > 3)


def command_questions(text: str) -> Iterator[Dialogue]:
    """AWS CLI examples: the bold title becomes the question, the example the answer."""
    parts = re.split(r"^\*\*(?:Example \d+: )?(.+?)\*\*\s*$", text, flags=re.MULTILINE)
    for title, body in zip(parts[1::2], parts[2::2], strict=False):
        match = re.match(r"[Tt]o (.+?)[.:]?$", title)
        if match and 40 < len(body.strip()) < 1600:
            yield Dialogue("aws", f"How do I {match[1]} with the AWS CLI?", body.strip())


def parameter_questions(text: str, rng: random.Random) -> Iterator[Dialogue]:
    """AWS API parameters and structures: name -> description."""
    for block in re.split(r"\n\n+", text):
        match = re.match(r"(\w{6,40}): ([A-Z].{60,700})$", block, flags=re.DOTALL)
        if match and rng.random() < 0.35:
            ask = rng.choice(
                ["What is {} in the AWS API?", "Explain the AWS field {}.", "What does {} mean in AWS?"]
            )
            yield Dialogue("aws", ask.format(match[1]), match[2].strip())


def function_questions(text: str, rng: random.Random) -> Iterator[Dialogue]:
    """Python functions with a docstring: its first paragraph -> the function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test", "_")):
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
        if not (20 < len(summary) < 220 and 3 < source.count("\n") < 36 and len(source) < 1500):
            continue
        args = ", ".join(arg.arg for arg in node.args.args)
        if rng.random() < 0.75:
            question = f"Write a Python function `{node.name}({args})`. {summary}"
            yield Dialogue("code", question, f"```python\n{source.strip()}\n```")
        else:
            yield Dialogue(
                "explain", f"What does this function do?\n```python\n{source.strip()}\n```", summary
            )


def definition_questions(text: str, rng: random.Random) -> Iterator[Dialogue]:
    """WordNet glosses: word -> definition."""
    asks = ["Define {}.", "What does {} mean?", "What is the meaning of {}?", "Give a definition of {}."]
    for line in text.split("\n"):
        match = re.match(r"(.+?) \((noun|verb|adjective|adverb)\): (.{20,})$", line)
        if match and rng.random() < 0.4:
            words = match[1].split(", ")
            also = f" It is also called {words[1]}." if match[2] == "noun" and len(words) == 2 else ""
            gloss = match[3].split("; ")
            example = next((f" For example: {part}" for part in gloss[1:] if part.startswith('"')), "")
            meaning = "; ".join(part for part in gloss if not part.startswith('"'))
            answer = f"{words[0][0].upper()}{words[0][1:]} ({match[2]}): {meaning}.{also}{example}"
            yield Dialogue("define", rng.choice(asks).format(words[0]), answer)


def country_questions(text: str, rng: random.Random) -> Iterator[Dialogue]:
    """World Factbook entries: one question per field of a country."""
    name = re.search(r"conventional short form: *([A-Z][^\n;(]{2,30})", text)
    if not name or "none" in name[1].lower():
        return
    country = name[1].strip()
    for line in text.split("\n"):
        match = re.match(r"(?:[\w ]+: )?([A-Z][a-z ]{4,30}): *(\w.{15,500})$", line)
        if match and rng.random() < 0.3 and "conventional" not in line:
            field, value = match[1].lower(), match[2].strip()
            yield Dialogue("country", f"Tell me about {country}: {field}.", f"{country}, {field}: {value}")


def reference_questions(text: str, rng: random.Random) -> Iterator[Dialogue]:
    """Python reference directives: signature -> description."""
    pattern = r"^\.\. (function|method|class|attribute|data):: ([^\n]+)\n((?:\n|   [^\n]*\n)+)"
    for match in re.finditer(pattern, text, flags=re.MULTILINE):
        body = textwrap.dedent(match[3]).strip()
        body = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", body.split("\n.. ")[0]).strip()
        if 60 < len(body) < 1000 and not body.startswith(".."):
            name = match[2].split("(")[0].strip()
            ask = rng.choice(
                ["What does Python's `{}` do?", "Explain `{}` in Python.", "How do I use `{}` in Python?"]
            )
            yield Dialogue("python", ask.format(name), body)


def section_questions(text: str) -> Iterator[Dialogue]:
    """Manual pages: the title -> the first paragraphs."""
    title, _, body = text.partition("\n")
    title = re.sub(r"^[\d.]+\s+", "", title).strip(" ¶")
    paragraphs = [p for p in re.split(r"\n\s*\n", body.strip()) if len(p.strip()) > 60][:3]
    answer = "\n\n".join(p.strip() for p in paragraphs)[:1400]
    if 3 < len(title) < 70 and len(answer) > 200:
        yield Dialogue("manual", f"Explain this topic: {title}", answer)


def arithmetic(rng: random.Random) -> Dialogue:
    """A made-up word problem that is solved step by step."""
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    a, b, c = rng.randint(2, 60), rng.randint(2, 12), rng.randint(2, 40)
    form = rng.randrange(4)
    if form == 0:
        q = f"{name} has {a} {thing} and buys {b} bags with {c} {thing} each. "
        q += f"How many {thing} does {name} have now?"
        s = f"The bags hold {b} * {c} = {b * c} {thing}. "
        s += f"Together with the first {a} that is {a} + {b * c} = {a + b * c}."
        r = a + b * c
    elif form == 1:
        q = f"{name} had {a + c} {thing} and gave {c} of them to a friend. How many {thing} are left?"
        s, r = f"We subtract what was given away: {a + c} - {c} = {a}.", a
    elif form == 2:
        q = f"{b} children share {b * c} {thing} equally. How many {thing} does each child get?"
        s, r = f"We divide the {thing} by the number of children: {b * c} / {b} = {c}.", c
    else:
        q = f"What is {a} + {b} * {c}?"
        s, r = (
            f"Multiplication comes first: {b} * {c} = {b * c}. Then {a} + {b * c} = {a + b * c}.",
            a + b * c,
        )
    return Dialogue("arithmetic", q, f"{s} The answer is {r}.")


def small_talk(text: str) -> list[dict[str, str]]:
    """A two-speaker transcript as chat messages; at most 12 turns."""
    turns = re.findall(r"^([AB]): (.+)$", text, flags=re.MULTILINE)[:12]
    roles = {"A": "user", "B": "assistant"}
    return [{"role": roles[speaker], "content": words} for speaker, words in turns]


def render(messages: Iterable[dict[str, str]]) -> str:
    """Chat messages in V3's layout, without the leading BOS and the trailing EOS."""
    text = ""
    for message in messages:
        text += (USER if message["role"] == "user" else ASSISTANT) + message["content"]
        text += EOS if message["role"] == "assistant" else ""
    return text.removesuffix(EOS)


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: BOS, EOS, pad are ids 0, 1, 2 and the chat and tool markers the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLIT_PATTERNS]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(
            f"the corpus is too small for a vocabulary of {vocab_size}: got {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """tokenizer_config.json in the form of the V3 family."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def write_stream(path: Path, texts: list[str], tokenizer_json: str, seed: int) -> int:
    """Encode documents in shuffled order as BOS ... EOS and write them as one xz-packed uint16 array."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    random.Random(seed).shuffle(texts)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), 256):
        encodings = tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False)
        pieces.extend(np.array([0, *encoding.ids, 1], dtype=np.uint16) for encoding in encodings)
    tokens = np.concatenate(pieces)
    buffer = io.BytesIO()
    np.save(buffer, tokens)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=2))
    return len(tokens)


# ---------------------------------------------------------------- held-out prompts


def document_prompt(stream: str, text: str, rng: random.Random) -> str | None:
    """The beginning of a document (of a function, for code), ended at a word or line."""
    if stream.startswith("code"):
        cut = [m.end() for m in re.finditer(r'^ *def \w+\([^)]*\).*:\n +"""[^\n]+', text, flags=re.MULTILINE)]
        if not cut:
            return None
        end = rng.choice(cut)
        start = text.rfind("\n", 0, max(0, end - 600)) + 1
        return text[start:end]
    match = re.search(r"[\s,.;:]", text[rng.randint(120, 300) :])
    if len(text) < 700 or not match:
        return None
    return text[: rng.randint(120, 300)].rsplit(" ", 1)[0]


def held_out_prompts(
    documents: dict[str, list[str]], dialogues: list[Dialogue], count: int, rng: random.Random
) -> list[dict[str, object]]:
    """Prompts in the proportions of the training mix, as text or as chat messages."""
    prompts: list[dict[str, object]] = []
    by_kind: dict[str, list[Dialogue]] = defaultdict(list)
    for dialogue in dialogues:
        by_kind[dialogue.kind].append(dialogue)
    for name, stream in STREAMS.items():
        wanted = max(3, round(count * stream.weight))
        if name == "instruct":
            kinds = sorted(by_kind)
            chosen = [rng.choice(by_kind[kinds[i % len(kinds)]]) for i in range(wanted)]
            found = [{"domain": f"instruct/{d.kind}", "messages": [{"role": "user", "content": d.question}]}
                     for d in chosen]  # fmt: skip
        elif name == "chat":
            talks = [small_talk(text) for text in documents[name]]
            found = [{"domain": name, "messages": talk[:3]} for talk in talks if len(talk) > 4][:wanted]
        else:
            texts = [
                document_prompt(name, text, rng) for text in rng.sample(documents[name], len(documents[name]))
            ]
            found = [{"domain": name, "prompt": text} for text in texts if text][:wanted]
        prompts.extend({"id": f"{name}-{i:03d}", **entry} for i, entry in enumerate(found))
    return prompts


# ---------------------------------------------------------------- main


def collect(
    corpus: Path, rng: random.Random
) -> tuple[dict[str, dict[str, list[str]]], dict[str, list[Dialogue]]]:
    """Sort documents and derived dialogues into {split: {stream: texts}} and {split: dialogues}."""
    stream_of = {source: (name, n) for name, s in STREAMS.items() for source, n in s.sources.items()}
    documents: dict[str, dict[str, list[str]]] = {"train": defaultdict(list), "val": defaultdict(list)}
    dialogues: dict[str, list[Dialogue]] = {"train": [], "val": []}
    for source, text in read_documents(corpus):
        split = "val" if held_out(text) else "train"
        dialogues[split] += dialogues_of(source, text, rng)
        if source in stream_of:
            name, repeats = stream_of[source]
            documents[split][name] += [text] * (repeats if split == "train" else 1)
    made_up: dict[str, list[Dialogue]] = {"train": [arithmetic(rng) for _ in range(60000)], "val": []}
    known = {d.question for d in made_up["train"]}
    made_up["val"] = [d for d in (arithmetic(rng) for _ in range(2000)) if d.question not in known][:400]
    return documents, {split: dialogues[split] + made_up[split] for split in dialogues}


def main() -> None:
    """Command line: corpus in, data directory out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="JSON lines of {source, text}, plain or .xz"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory for the tokenizer and the token streams"
    )
    parser.add_argument("--prompts", type=Path, help="also write held-out prompts to this JSON-lines file")
    parser.add_argument("--prompt-count", type=int, default=200, help="about how many prompts (default 200)")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="entries of the tokenizer (default 4096)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of every random choice (default 1)")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    documents, dialogues = collect(args.corpus, rng)
    kinds = {
        kind: sum(d.kind == kind for d in dialogues["train"]) for kind in {d.kind for d in dialogues["train"]}
    }
    print("dialogues for training:", kinds, flush=True)
    if args.prompts:
        prompts = held_out_prompts(documents["val"], dialogues["val"], args.prompt_count, rng)
        args.prompts.parent.mkdir(parents=True, exist_ok=True)
        args.prompts.write_text(
            "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8"
        )
    for split, streams in documents.items():
        streams["instruct"] = [f"{USER}{d.question}{ASSISTANT}{d.answer}" for d in dialogues[split]]
        streams["chat"] = [render(small_talk(text)) for text in streams["chat"]]

    sample: list[str] = []
    for name, stream in STREAMS.items():
        texts, budget = documents["train"][name], 40e6 * stream.weight
        while texts and budget > 0:
            sample.append(rng.choice(texts)[:20000])
            budget -= len(sample[-1])
    tokenizer = train_tokenizer((re.sub("<｜.*?｜>", "\n", text) for text in sample), args.vocab_size)
    tokenizer.save(str(args.output / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (args.output / "tokenizer_config.json").write_text(config, encoding="utf-8")
    print("tokenizer trained", flush=True)

    sizes: dict[str, int] = {}
    with ProcessPoolExecutor(2) as pool:
        jobs = {
            f"{split}_{name}": pool.submit(write_stream, args.output / f"{split}_{name}.npy.xz", texts,
                                           tokenizer.to_str(), args.seed)
            for split, streams in documents.items() for name, texts in streams.items()
        }  # fmt: skip
        for name, job in jobs.items():
            sizes[name] = job.result()
            print(f"{name}: {sizes[name]:,} tokens", flush=True)
    meta = {"weights": {name: stream.weight for name, stream in STREAMS.items()}, "tokens": sizes}
    (args.output / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
