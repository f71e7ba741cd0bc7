"""What quantisation at rest costs in fidelity, space and time.

A model reads the beginning of a recorded session and then goes on with it twice: once on the KV
that it computed, once on that KV after a way through the codec. The difference is the KL
divergence of the next-token distributions, position by position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.errors import TraceError
from kvws.kernels.rerope import rotate, rotation_between
from kvws.kernels.rotary import RotaryTable
from kvws.models import resolve_model
from kvws.replay.loaders import load_trace
from kvws.tiers.codec import PayloadCodec, make_codec
from kvws.tiers.formats import PAYLOAD_FORMATS
from kvws.tiers.geometry import PayloadGeometry

_TIMING_REPETITIONS = 3


@dataclass(frozen=True)
class FormatCost:
    """One format, measured.

    Attributes:
        format: the payload format.
        bytes_per_token: at rest, whole sectors included.
        ratio: bytes of 16-bit KV over bytes at rest.
        mean_kl: nats, over the continued tokens, against the KV as computed.
        p99_kl: the 99th percentile.
        top1_agreement: share of tokens whose most likely successor stays the same.
        encode_mb_s: of payload in the pool's dtype, on one thread.
        decode_mb_s: likewise.
    """

    format: str
    bytes_per_token: float
    ratio: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    encode_mb_s: float
    decode_mb_s: float


def measure_quantisation(
    trace: Path,
    *,
    model: str = "smollm2",
    formats: Sequence[str] = PAYLOAD_FORMATS,
    context_tokens: int = 1504,
    continued_tokens: int = 256,
    progress: Callable[[str], None] = lambda message: None,
) -> list[FormatCost]:
    """Measure payload formats on the longest thread of a recorded session, in fp32 on the CPU.

    Args:
        trace: the recording.
        model: a Llama-like model, as `resolve_model` takes it.
        formats: payload formats.
        context_tokens: tokens whose KV goes through the codec; a multiple of BLOCK_TOKENS.
        continued_tokens: tokens read on top of it, whose distributions are compared.
        progress: told what is being done.

    Raises:
        TraceError: the recording cannot be read, or is too short.
        ModelError: the model cannot be loaded.
        ConfigError: a format is unknown.
        ValueError: context_tokens is not a multiple of BLOCK_TOKENS.
    """
    if context_tokens % BLOCK_TOKENS:
        raise ValueError(f"context_tokens must be a multiple of {BLOCK_TOKENS}")
    folder = resolve_model(model)
    tokens = _trace_tokens(trace, folder, context_tokens + continued_tokens)
    reader = _Reader(folder)
    progress(f"reading {context_tokens} tokens")
    payload = reader.payload_after(tokens[:context_tokens])
    first_positions = torch.arange(0, context_tokens, BLOCK_TOKENS)
    exact = reader.log_probabilities(payload, tokens[context_tokens:])
    costs: list[FormatCost] = []
    for format in formats:
        progress(f"measuring {format}")
        codec = make_codec(format, reader.geometry, [reader.rotary] * reader.geometry.layers)
        decoded, encode_s, decode_s = _round_trip(codec, payload, first_positions)
        if codec.raw_keys:
            reader.rotate_keys(decoded)
        got = reader.log_probabilities(decoded, tokens[context_tokens:])
        kl = (exact.exp() * (exact - got)).sum(dim=-1)
        megabytes = payload.nbytes / 1e6
        two_byte_block = reader.geometry.block_bytes / reader.geometry.dtype.itemsize * 2
        costs.append(
            FormatCost(
                format=format,
                bytes_per_token=codec.payload_bytes / BLOCK_TOKENS,
                ratio=two_byte_block / codec.payload_bytes,
                mean_kl=float(kl.mean()),
                p99_kl=float(kl.quantile(0.99)),
                top1_agreement=float((exact.argmax(-1) == got.argmax(-1)).double().mean()),
                encode_mb_s=megabytes / encode_s,
                decode_mb_s=megabytes / decode_s,
            )
        )
    return costs


def quantisation_table(costs: Sequence[FormatCost]) -> Table:
    """One row a format."""
    table = Table(box=None, header_style="bold")
    for name in (
        "format", "bytes/token", "of 16 bits", "mean KL", "p99 KL", "top-1", "encode MB/s",
        "decode MB/s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            cost.format,
            f"{cost.bytes_per_token:,.0f}",
            f"{cost.ratio:.2f}x",
            f"{cost.mean_kl:.1e}",
            f"{cost.p99_kl:.1e}",
            f"{100 * cost.top1_agreement:.1f} %",
            f"{cost.encode_mb_s:,.0f}",
            f"{cost.decode_mb_s:,.0f}",
        )
    return table


def _trace_tokens(path: Path, model: str | Path, count: int) -> list[int]:
    """The first `count` tokens of the trace's longest thread."""
    trace = load_trace(path)
    thread = max(trace.threads.values(), key=len)
    tokens = ChatRenderer(model).tokens(thread, trace.tools, add_generation_prompt=False)
    if len(tokens) < count:
        raise TraceError(
            f"the trace {trace.name} renders to {len(tokens)} tokens, {count} are needed",
            hint="measure fewer tokens, or a longer session",
        )
    return tokens[:count]


def _round_trip(
    codec: PayloadCodec, payload: torch.Tensor, first_positions: torch.Tensor
) -> tuple[torch.Tensor, float, float]:
    """The payload after encoding and decoding, and the best seconds of each on one thread."""
    data = torch.empty((len(payload), codec.payload_bytes), dtype=torch.uint8)
    decoded = torch.empty_like(payload)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encode_s = _best_seconds(lambda: codec.encode(payload, first_positions, data))
        decode_s = _best_seconds(lambda: codec.decode(data, decoded))
    finally:
        torch.set_num_threads(threads)
    return decoded, encode_s, decode_s


def _best_seconds(work: Callable[[], None]) -> float:
    taken: list[float] = []
    for _ in range(_TIMING_REPETITIONS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


class _Reader:
    """A model that reads tokens on top of given KV."""

    def __init__(self, folder: str | Path) -> None:
        declare_torchvision_ops()
        from transformers import AutoModelForCausalLM  # slow: only this measurement pays

        loader: Any = AutoModelForCausalLM
        self._model: Any = loader.from_pretrained(str(folder), dtype=torch.float32).eval()
        config = self._model.config
        self.geometry = PayloadGeometry(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
        )
        positions = torch.arange(config.max_position_embeddings).unsqueeze(0)
        cos, sin = self._model.model.rotary_emb(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        self.rotary = RotaryTable(cos[0, :, :half], sin[0, :, :half], interleaved=False)

    @torch.no_grad()
    def payload_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """KV of the tokens, by block: [n, 2, layers, BLOCK_TOKENS, kv_heads, head_dim]."""
        # Logits of the last token only: those of all would take more memory than the model.
        answer = self._model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        layers = answer.past_key_values.layers
        sides = [torch.stack([layer.keys[0] for layer in layers])]
        sides.append(torch.stack([layer.values[0] for layer in layers]))
        both = torch.stack(sides)  # [2, layers, kv_heads, tokens, head_dim]
        shape = (*both.shape[:3], -1, BLOCK_TOKENS, both.shape[4])
        return both.view(shape).permute(3, 0, 1, 4, 2, 5).contiguous()

    @torch.no_grad()
    def log_probabilities(self, payload: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Of every token's successor, read on top of the payload: [tokens, vocabulary] fp64."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        both = payload.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
        for layer in range(self.geometry.layers):
            cache.update(both[0, layer].unsqueeze(0), both[1, layer].unsqueeze(0), layer)
        logits = self._model(torch.tensor([tokens]), past_key_values=cache).logits[0]
        return logits.double().log_softmax(dim=-1)

    def rotate_keys(self, payload: torch.Tensor) -> None:
        """Rotate raw keys to positions 0, 1, …. Mutates: K of `payload`."""
        rotation = rotation_between(self.rotary, None, torch.arange(len(payload) * BLOCK_TOKENS))
        for layer in range(self.geometry.layers):
            keys = payload[:, 0, layer]
            keys.copy_(rotate(keys.flatten(0, 1), rotation).view(keys.shape))
