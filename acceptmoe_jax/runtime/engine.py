"""The engine: a small object around the programs, whether all experts are on the device or not."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.loads import Loads
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.pretrained import Pretrained, load_pretrained
from acceptmoe_jax.runtime.resident import ResidentRunner
from acceptmoe_jax.runtime.state import DecodeState, empty_state
from acceptmoe_jax.runtime.statistics import DecodeStatistics
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import CommitmentTable, SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.text import harmony
from acceptmoe_jax.text.stopping import StopReason, StopRules
from pallas_kernels.implementations import Implementations, implementations

COMMITMENT_FILE = "commitment.json"
AUTOREGRESSIVE = "autoregressive"

# A prompt is a text, a chat of {"role", "content"} messages, or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

_CHUNKS = (64, 256, 1024)  # rows of a prefill program; the smallest that holds what is left
_SMALLEST_CACHE = 256  # rows; caches grow by doubling, so few programs are compiled


@dataclasses.dataclass(frozen=True)
class Generation:
    """The answer to one prompt.

    Attributes:
      prompt_ids: what the target read.
      token_ids: what it emitted, the stop token included.
      text: decoded, cut before a stop string, without special tokens; of a model that speaks
        harmony (GPT-OSS) the final channel alone, empty if the answer ended before it.
      reasoning: what such a model wrote in its analysis channel; else empty.
      stop_reason: why it ended.
      statistics: what was counted on the way.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    reasoning: str
    stop_reason: StopReason
    statistics: DecodeStatistics


class Engine:
    """Decodes prompts one at a time: autoregressively, or with a draft tree under a policy.

        engine = Engine.from_pretrained("checkpoints/target", "checkpoints/head")
        [generation] = engine.generate(["..."], selector="acceptmoe", max_new_tokens=64)

    Programs are compiled once for each cache length and policy, when first needed; the time this
    takes is reported apart from decoding.
    """

    def __init__(
        self,
        model: Pretrained,
        commitment: CommitmentTable | None,
        *,
        dtype: jnp.dtype,
        max_length: int,
        offload: OffloadConfig | None = None,
    ):
        """See `from_pretrained`, which is the usual way to make one."""
        config = model.setup.target
        if not 0 < max_length <= config.max_positions:
            raise UserError(
                f"max_length = {max_length} is not between 1 and the model's "
                f"max_position_embeddings = {config.max_positions}"
            )
        if commitment is not None:
            commitment.check(*model.hashes)
            if len(commitment.phat) <= model.setup.tree.steps:
                raise UserError(
                    f"{commitment.source} knows depths up to {len(commitment.phat) - 1}, but the "
                    f"tree has steps = {model.setup.tree.steps}"
                )
        self.model = model
        self.commitment = commitment
        self.dtype = dtype
        self.max_length = max_length
        self.offload = offload
        self.runner: ResidentRunner | OffloadedRunner
        if offload is None:
            self.runner = ResidentRunner(model.setup, model.weights)
        else:
            self.runner = OffloadedRunner(model.setup, model.weights, model.store, offload)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: str | None = None,
        *,
        commitment: str | CommitmentTable | None = None,
        use_commitment: bool = True,
        dtype: str | jnp.dtype = "bfloat16",
        max_length: int | None = None,
        tree: TreeConfig = TreeConfig(),
        kernels: str | Implementations = "auto",
        offload: OffloadConfig | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> "Engine":
        """Loads a target, and a head to draft with.

        Args:
          target: directory or hub id of a Qwen3-MoE model.
          draft: directory or hub id of an EAGLE-3 head for it; without one only
            "autoregressive" is possible.
          commitment: a commitment table or its file; by default commitment.json beside the head,
            or else beside the target, if there is one. Only policies that weigh nodes need it.
          use_commitment: False looks for no table (to measure a new one).
          dtype: of weights and caches.
          max_length: longest prompt plus answer, in tokens; the model's own limit by default,
            at most 4096.
          tree: shape of the draft trees.
          kernels: "auto" chooses by the device, "xla" is plain JAX, "triton" and "mosaic" are
            Pallas kernels for NVIDIA GPUs; or an implementation for each op.
          offload: keep the experts in host memory, and this many slots a layer on the device.
          progress: called with the bytes of every leaf that was placed.

        Raises:
          UserError: naming the file, key or argument.
        """
        dtype = jnp.dtype(dtype)
        if isinstance(kernels, str):
            try:
                kernels = implementations(kernels)
            except (NotImplementedError, ValueError) as error:
                raise UserError(f"kernels: {error}") from None
        model = load_pretrained(
            target,
            draft,
            dtype=dtype,
            tree=tree,
            implementations=kernels,
            offload=offload,
            progress=progress,
        )
        if commitment is None and draft is not None and use_commitment:
            places = [model.head.directory, model.target.directory]
            found = [place / COMMITMENT_FILE for place in places]
            commitment = next((str(file) for file in found if file.exists()), None)
        if isinstance(commitment, str):
            commitment = CommitmentTable.load(commitment)
        if max_length is None:
            max_length = min(model.setup.target.max_positions, 4096)
        return cls(model, commitment, dtype=dtype, max_length=max_length, offload=offload)

    @property
    def tokenizer(self):
        return self.model.tokenizer

    def selector(self, selector: str | SelectorConfig) -> SelectorConfig:
        """The policy for this target: `top_k` and `norm_topk_prob` are the model's.

        Raises:
          UserError: if the policy is unknown, does not fit the model or lacks what it needs.
        """
        config = self.model.setup.target
        try:
            if isinstance(selector, str):
                selector = SelectorConfig(policy=selector, top_k=config.top_k)
            selector = dataclasses.replace(
                selector, top_k=config.top_k, norm_topk_prob=config.norm_topk_prob
            )
            selector.check_experts(config.num_experts)
        except ValueError as error:
            raise UserError(f"selector: {error}") from None
        if self.model.setup.head is None:
            raise UserError(f"selector {selector.policy!r} needs a draft head (--draft)")
        weighs = selector.policy in ("acceptmoe", "acceptmoe_fix") and not selector.uniform
        if weighs and self.commitment is None:
            raise UserError(
                f"selector {selector.policy!r} needs a commitment table: there is no "
                f"{COMMITMENT_FILE} beside the head; make it with python -m experiments.calibrate"
            )
        return selector

    def encode(
        self,
        prompt: Prompt,
        chat: bool | None = None,
        chat_variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a prompt.

        Args:
          prompt: see `Prompt`.
          chat: render a text as a user's message by the model's chat template; by default if the
            model has one.
          chat_variables: for the chat template, such as `{"reasoning_effort": "low"}`.

        Raises:
          UserError: if the prompt is empty or holds ids that the model does not know, or if a
            variable has no chat template that reads it.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("the prompt is empty")
            if self.tokenizer.has_chat_template if chat is None else chat:
                prompt = [{"role": "user", "content": prompt}]
            else:
                prompt = self.tokenizer.encode(prompt)
        variables = dict(chat_variables or {})
        if prompt and isinstance(prompt[0], Mapping):
            unknown = variables.keys() - self.tokenizer.template_variables
            if unknown and self.tokenizer.has_chat_template:
                raise UserError(
                    f"{', '.join(sorted(unknown))}: the chat template of "
                    f"{self.tokenizer.directory} knows no such setting"
                )
            prompt = self.tokenizer.encode_chat(prompt, **variables)
        elif variables:
            raise UserError(
                f"{', '.join(sorted(variables))}: a setting of chat templates, and the prompt is "
                "not rendered by one"
            )
        ids = tuple(int(token) for token in prompt)
        if not ids:
            raise UserError("the prompt is empty")
        vocab = self.model.setup.target.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise UserError(f"the prompt holds token ids outside the vocabulary of {vocab}")
        return ids

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        selector: str | SelectorConfig = "acceptmoe",
        max_new_tokens: int = 256,
        stop_strings: Sequence[str] = (),
        chat: bool | None = None,
        chat_variables: Mapping[str, Any] | None = None,
        audit: bool = False,
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
        observe: Callable[[int, Verification], None] | None = None,
        record: bool = False,
    ) -> list[Generation]:
        """Decodes the prompts greedily, one after the other.

        Args:
          prompts: see `Prompt`.
          selector: "autoregressive", a policy's name or its config.
          max_new_tokens: limit for each answer.
          stop_strings: texts that end an answer, beside the model's stop tokens; as `text`, they
            leave reasoning aside.
          chat, chat_variables: see `encode`.
          audit: verify every block once more under native routing, outside the timed seconds.
          on_tokens: called with the prompt's index and its new tokens after every forward.
          observe: called with the prompt's index and what happened after every verification.
          record: give `observe` router logits and sets too.

        Raises:
          UserError: before any decoding, if a prompt is empty or too long or a setting is wrong.
        """
        if selector != AUTOREGRESSIVE:
            selector = self.selector(selector)
        rules = StopRules(self.tokenizer.stop_ids, tuple(stop_strings), max_new_tokens)
        encoded = [self.encode(prompt, chat, chat_variables) for prompt in prompts]
        for index, ids in enumerate(encoded):
            if len(ids) + max_new_tokens > self.max_length:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens and max_new_tokens = {max_new_tokens}, "
                    f"together more than max_length = {self.max_length}"
                )
        return [
            self._generate_one(
                ids,
                selector,
                rules,
                audit,
                functools.partial(on_tokens or _ignore, index),
                functools.partial(observe or _ignore, index),
                record,
            )
            for index, ids in enumerate(encoded)
        ]

    def _generate_one(self, ids, selector, rules, audit, on_tokens, observe, record) -> Generation:
        setup = self.model.setup
        statistics = DecodeStatistics(
            num_layers=len(setup.target.moe_layers),
            max_depth=setup.tree.steps,
        )
        state = self._prefill(ids, rules.max_new_tokens, statistics)
        forward = self._plain_forward if selector == AUTOREGRESSIVE else self._tree_forward
        channels = harmony.ChannelReader(self.tokenizer, ids)
        emitted, shown, run = [], [], (int(state.last_token),)
        while True:
            kept, reason = rules.cut(shown, channels.shown(run), self.tokenizer.decode)
            run = run[: len(kept)]
            emitted.extend(run)
            shown.extend(kept)
            on_tokens(run)
            if reason is not None:
                break
            state, run = forward(state, selector, statistics, audit, observe, record)
        answer = harmony.read_answer(self.tokenizer, ids, emitted)
        text = rules.trim(answer.final)
        return Generation(ids, tuple(emitted), text, answer.analysis, reason, statistics)

    def _prefill(self, ids, max_new_tokens, statistics) -> DecodeState:
        self.runner.begin_request()
        chunks = _split(ids)
        padded = sum(size for _, size in chunks)
        rows = max(len(ids) + max_new_tokens + self.model.setup.spare_rows, padded)
        state = empty_state(self.model.setup, _cache_rows(rows), self.dtype)
        for at, size in chunks:
            part = ids[at : at + size]
            tokens = np.zeros(size, np.int32)
            tokens[: len(part)] = part
            following = ids[at + size] if at + size < len(ids) else -1
            args = (state, jnp.asarray(tokens), jnp.int32(len(part)), jnp.int32(following))
            with self._timed(statistics) as timed:
                state = jax.block_until_ready(self.runner.prefill(*args))
            statistics.prefill_seconds += timed.seconds
            statistics.prefill_bytes += timed.loads.streamed.bytes
        return state

    def _plain_forward(self, state, selector, statistics, audit, observe, record):
        del selector, audit, observe, record  # plain decoding is native by definition
        with self._timed(statistics) as timed:
            state, counts = self.runner.step(state)
            token, counts = jax.device_get((state.last_token, counts))
        statistics.add_forward(1, counts, np.zeros(1, int), timed.seconds, timed.loads)
        statistics.add_audit(rows=1, agreeing=1, kl=0.0)
        return state, (int(token),)

    def _tree_forward(self, state, selector, statistics, audit, observe, record):
        phat = self.commitment.phat if self.commitment is not None else (1.0,)
        with self._timed(statistics) as timed:
            phat = jnp.asarray(phat, jnp.float32)
            state, done = self.runner.round(state, phat, selector, record)
            tree, accepted, counts = jax.device_get((done.tree, done.acceptance, done.counts))
        length = int(accepted.length)
        statistics.add_forward(length, counts, tree.depth[tree.valid], timed.seconds, timed.loads)
        if audit:
            with self._timed(statistics):
                state, result = self.runner.audit(state, done)
            statistics.add_audit(length, int(result.agreeing), float(result.kl))
        observe(Verification.from_round(tree, accepted, jax.device_get(done.record)))
        return state, tuple(int(token) for token in accepted.tokens[:length])

    @contextlib.contextmanager
    def _timed(self, statistics: DecodeStatistics) -> Iterator["_Timed"]:
        """Times a forward without what it had to compile, which is added to the statistics."""
        timed = _Timed()
        loads, compiled = self.runner.loads, self.runner.compiled.seconds
        begin = time.perf_counter()
        yield timed
        elapsed = time.perf_counter() - begin
        compiling = self.runner.compiled.seconds - compiled
        statistics.compile_seconds += compiling
        timed.seconds = elapsed - compiling
        timed.loads = self.runner.loads - loads


@dataclasses.dataclass
class _Timed:
    """What a forward took."""

    seconds: float = 0.0
    loads: Loads = Loads()


def _ignore(index: int, event: Any) -> None:
    del index, event


def _split(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Prefill chunks as (first token, rows); the last one may be padded."""
    chunks, at = [], 0
    while at < len(ids):
        left = len(ids) - at
        size = next((chunk for chunk in _CHUNKS if chunk >= left), _CHUNKS[-1])
        chunks.append((at, size))
        at += size
    return chunks


def _cache_rows(needed: int) -> int:
    rows = _SMALLEST_CACHE
    while rows < needed:
        rows *= 2
    return rows
