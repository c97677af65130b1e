"""The engine's command-line flags, shared by every command that builds an engine."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

from nextn.config import EngineConfig, SpecConfig
from nextn.errors import ConfigError

logger = logging.getLogger(__name__)

_TREE = "shape of the draft tree"
_TREE_HELP = (
    "Each cycle the NextN layer drafts a tree of possible next tokens, and the model checks the tree in one "
    "pass. The tree is --num-steps levels deep; of each node the --topk best children are kept, and of each "
    "level the --topk best nodes grow on. Of all of them the --draft-tokens best are checked, the last "
    "emitted token (the root) counted in. A cycle emits at most num-steps + 1 tokens; the text does not "
    "depend on the shape. It must hold 1 <= draft-tokens - 1 <= topk + (num-steps - 1) * topk^2; --topk 1 is "
    "a chain, with draft-tokens = num-steps + 1."
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and every flag that `engine_config` reads."""
    default = EngineConfig()
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="demo",
        help="checkpoint directory, or 'demo' for the small model that ships with nextn (default: demo)",
    )
    _add_tree_flags(parser)
    _add_draft_flags(parser, default)
    _add_size_flags(parser, default)
    _add_machine_flags(parser, default)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags ask for; raises `ConfigError` on a combination that cannot work."""
    _check_directories(args)
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        spec=_spec(args),
        draft_model=args.draft_model,
        draft_hidden=args.draft_hidden,
        coupled_drafting=args.coupled_drafting,
        max_model_len=args.max_model_len,
        max_running_requests=args.max_running_requests,
        max_waiting_requests=args.max_waiting_requests,
        page_size=args.page_size,
        num_pages=args.num_pages,
        mem_fraction=args.mem_fraction,
        prefix_cache=args.prefix_cache,
        chunked_prefill_size=args.chunked_prefill_size,
        max_prefill_ms=args.max_prefill_ms,
        load_format=args.load_format,
        seed=args.seed,
        cuda_graphs=args.cuda_graphs,
    )


def _check_directories(args: argparse.Namespace) -> None:
    """Refuse empty names, as an unset shell variable gives them: as paths they mean the working directory."""
    if args.model == "":
        raise ConfigError("MODEL is empty; give a checkpoint directory or 'demo', or leave it out")
    if args.draft_model == "":
        raise ConfigError("--draft-model is empty; give a directory, or leave it out")


def _spec(args: argparse.Namespace) -> SpecConfig | None:
    """Tree shape, or None for plain decoding; a number that is not given keeps its default."""
    numbers = {
        name: value
        for name in ("num_steps", "topk", "draft_tokens")
        if (value := getattr(args, name)) is not None
    }
    if args.spec is not None and numbers:
        given = " and ".join(f"--{name.replace('_', '-')} {value}" for name, value in numbers.items())
        raise ConfigError(f"--spec {args.spec} and {given} exclude each other; leave one of them out")
    if args.spec == "off":
        return None
    spec = SpecConfig(**numbers)
    if args.spec == "auto":
        logger.info(
            "--spec auto: there is no cost table of this machine and model yet, so the tree is %s", spec
        )
    return spec


def _add_tree_flags(parser: argparse.ArgumentParser) -> None:
    default = SpecConfig()
    group = parser.add_argument_group(_TREE, _TREE_HELP)
    group.add_argument(
        "--num-steps",
        type=_int,
        metavar="S",
        help=f"levels of the draft tree, so tokens drafted in a row (default: {default.num_steps})",
    )
    group.add_argument(
        "--topk",
        type=_int,
        metavar="K",
        help=f"children kept a node, and nodes of a level that grow on (default: {default.topk})",
    )
    group.add_argument(
        "--draft-tokens",
        type=_int,
        metavar="D",
        help=f"tokens verified a cycle, the root included; at most 64 (default: {default.draft_tokens})",
    )
    group.add_argument(
        "--spec",
        choices=("auto", "off"),
        help=f"auto: choose the shape by a cost table, so far always {default}; off: decode one token at a "
        "time, without drafts (default: the three numbers above)",
    )


def _add_draft_flags(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    group = parser.add_argument_group("draft model")
    group.add_argument(
        "--draft-model",
        metavar="DIR",
        help="directory to take the NextN layer from, exported or a whole checkpoint (default: MODEL itself)",
    )
    group.add_argument(
        "--draft-hidden",
        choices=("post-norm", "pre-norm"),
        default=default.draft_hidden,
        help="hidden states that the NextN layer gets: after or before the model's last norm "
        f"(default: {default.draft_hidden})",
    )
    group.add_argument(
        "--no-coupled-drafting",
        dest="coupled_drafting",
        action="store_false",
        help="rank drafts by probability alone when sampling; by default the noise that picks the token also "
        "ranks the drafts, which raises acceptance and changes no text",
    )


def _add_size_flags(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    group = parser.add_argument_group("sizes")
    group.add_argument(
        "--max-model-len",
        type=_int,
        metavar="TOKENS",
        help="most tokens of a request, prompt and output together (default: what model and memory allow)",
    )
    group.add_argument(
        "--max-running-requests",
        type=_int,
        metavar="N",
        default=default.max_running_requests,
        help=f"requests decoded at the same time (default: {default.max_running_requests})",
    )
    group.add_argument(
        "--max-waiting-requests",
        type=_int,
        metavar="N",
        default=default.max_waiting_requests,
        help=f"requests that may wait for their turn before others are refused (default: "
        f"{default.max_waiting_requests})",
    )
    group.add_argument(
        "--mem-fraction",
        type=_float,
        metavar="F",
        default=default.mem_fraction,
        help="share of a GPU's memory that may be in use in all, other processes included, 0 to 1; a CPU's "
        "cache has 1 GiB "
        f"(default: {default.mem_fraction})",
    )
    group.add_argument(
        "--num-pages",
        type=_int,
        metavar="N",
        help="pages of the cache (default: as many as --mem-fraction leaves room for)",
    )
    group.add_argument(
        "--page-size",
        type=_int,
        metavar="TOKENS",
        default=default.page_size,
        help=f"tokens a page of the cache (default: {default.page_size})",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=_int,
        metavar="TOKENS",
        default=default.chunked_prefill_size,
        help=f"most prompt tokens computed in one step (default: {default.chunked_prefill_size})",
    )
    group.add_argument(
        "--max-prefill-ms",
        type=_float,
        metavar="MS",
        default=default.max_prefill_ms,
        help="about how long such a step may take while other requests wait for their next tokens, in "
        f"milliseconds; 0 sets no limit (default: {default.max_prefill_ms:g})",
    )
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt from its start; by default the cache keeps the pages of earlier requests, "
        "as long as there is room, for prompts that begin alike",
    )


def _add_machine_flags(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    group = parser.add_argument_group("machine and weights")
    group.add_argument(
        "--device",
        default=default.device,
        help="cpu, cuda, or auto: the GPU if there is one (default: auto)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float64", "float32", "bfloat16"),
        default=default.dtype,
        help="type of activations and cache; auto chooses by device (default: auto)",
    )
    group.add_argument(
        "--load-format",
        choices=("safetensors", "dummy"),
        default=default.load_format,
        help="safetensors: read the checkpoint; dummy: random weights after config.json alone, to measure "
        "speed (default: safetensors)",
    )
    group.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="on a GPU, launch each kernel of a decode step from the host, which is much slower; to look for "
        "faults (default: recorded steps are replayed)",
    )
    group.add_argument(
        "--seed",
        type=_int,
        metavar="N",
        default=default.seed,
        help=f"seed of random weights and random prompts (default: {default.seed})",
    )


def _named(convert: Callable[[str], float], kind: str) -> Callable[[str], float]:
    """A converter whose error names what is expected."""

    def parse(text: str) -> float:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None

    return parse


_int = _named(int, "a whole number")
_float = _named(float, "a number")
