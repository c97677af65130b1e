"""How many prompt tokens a step may compute while requests decode, so that none waits long for its token.

A step's time is predicted from its arithmetic, by the model's sizes, and what the steps so far took.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from nextn.config import ModelConfig

MIN_CHUNK = 128
"""Tokens that a step may compute in any case, so that every prompt ends: those of one tile."""

MANY_TILES = 4
"""Chunks of fewer are not cut to whole tiles: they could hardly grow."""

OUTLIER = 4.0
"""A step that takes so many times what was predicted is taken for a kernel's first compilation, once."""

NEWEST = 0.5
"""Weight of the latest step that teaches something."""

READING = 256
"""Tokens' arithmetic for which reading all the weights takes about as long, which every step does once."""

PRODUCTS = 2.5
"""How many times as long the layers' products take as attention of as many FLOPs: on an H200 about 200
TFLOP/s, the experts' dequantising included, against 515."""


class Span(Protocol):
    """`length` tokens of one request from `start`."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


class PrefillPace:
    """Chunks that take at most `max_seconds`, by what the steps before took. It has no clock of its own.

    A step of chunks (start, length) costs fixed + the sum of linear * length + attended * length * (start +
    length / 2) + reread * (start + length), each in attention's FLOPs: the layers' products, attention's, and
    those that make keys and values of the latents so far. Seconds are a factor times that, which is learnt.

    A short step takes longer than its arithmetic says, which tells nothing of longer ones. So the factor goes
    down with any step that was faster than predicted, and up only with one that took longer than it may.
    """

    def __init__(
        self, linear: float, attended: float, reread: float, max_seconds: float, fixed: float = 0.0
    ) -> None:
        self.max_seconds = max_seconds
        self._linear = linear
        self._attended = attended
        self._reread = reread
        self._fixed = fixed
        self._scale: float | None = None
        self._is_warm = False
        self._skipped = False

    @staticmethod
    def of(cfg: ModelConfig, max_seconds: float) -> PrefillPace:
        """The pace of a model, target and NextN layer together."""
        layers = cfg.num_hidden_layers + cfg.has_nextn
        heads, hidden = cfg.num_attention_heads, cfg.hidden_size
        widths = (hidden, cfg.q_lora_rank, heads * cfg.qk_head_dim)
        queries = sum(a * b for a, b in pairwise(width for width in widths if width is not None))
        attention = queries + hidden * cfg.latent_dim + heads * cfg.v_head_dim * hidden
        experts = cfg.num_experts_per_tok + cfg.n_shared_experts
        routed = 3 * hidden * cfg.moe_intermediate_size * experts + hidden * cfg.n_routed_experts
        dense = 3 * hidden * cfg.intermediate_size
        feed_forward = sum(routed if cfg.is_moe(layer) else dense for layer in range(layers))
        merge = 2 * hidden * hidden * cfg.has_nextn
        linear = PRODUCTS * 2.0 * (layers * attention + feed_forward + merge)
        return PrefillPace(
            linear=linear,
            attended=2.0 * layers * heads * (cfg.qk_head_dim + cfg.v_head_dim),
            reread=2.0 * layers * heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) * cfg.kv_lora_rank,
            max_seconds=max_seconds,
            fixed=READING * linear,
        )

    def limit(self, start: int, wanted: int, beside: Sequence[Span] = ()) -> int:
        """Of `wanted` tokens from `start`, how many to compute in a step that computes `beside` too.

        All of them until a step was measured. At least `MIN_CHUNK`, or `wanted`, in a step of their own.
        Where it is many but not all, whole tiles of attention's: the rest of one would take as long.
        """
        if self._scale is None:
            return wanted
        left = self.max_seconds / self._scale - self._fixed - sum(map(self._cost, beside))
        fits = self._fits(start, left)
        if fits >= MANY_TILES * MIN_CHUNK:
            fits -= fits % MIN_CHUNK
        return min(wanted, max(0 if beside else MIN_CHUNK, fits))

    def observe(self, chunks: Sequence[Span], seconds: float) -> None:
        """Learn from a step's time, but for the process's first one and for one that took far too long."""
        if not self._is_warm:
            self._is_warm = True
            return
        measured = seconds / (self._fixed + sum(map(self._cost, chunks)))
        if self._scale is None:
            self._scale = measured
            return
        if measured >= self._scale and seconds <= self.max_seconds:
            return
        if measured > OUTLIER * self._scale and not self._skipped:
            self._skipped = True
            return
        self._skipped = False
        self._scale += NEWEST * (measured - self._scale)

    def _cost(self, span: Span) -> float:
        start, length = span.start, span.length
        stop = start + length
        return self._linear * length + self._attended * length * (start + stop) / 2 + self._reread * stop

    def _fits(self, start: int, cost: float) -> int:
        """Most tokens from `start` that cost at most `cost`: the root of a quadratic; 0 if none does."""
        half = self._attended / 2
        slope = self._linear + self._attended * start + self._reread
        left = cost - self._reread * start
        if left <= 0:
            return 0
        # The form that loses no digits, and holds for half = 0.
        return int(2 * left / (slope + (slope**2 + 4 * half * left) ** 0.5))
