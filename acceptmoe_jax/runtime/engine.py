"""The engine: a small object around the programs, whether all experts are on the device or not."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.runtime.decoding import DecodeConfig, DecodingRun
from acceptmoe_jax.runtime.evict import EvictConfig
from acceptmoe_jax.runtime.offloaded import OffloadedRunner
from acceptmoe_jax.runtime.pretrained import Pretrained, load_pretrained
from acceptmoe_jax.runtime.quality_gate import AuditConfig
from acceptmoe_jax.runtime.requests import Generation, Request
from acceptmoe_jax.runtime.resident import ResidentRunner
from acceptmoe_jax.runtime.stages import NO_COMMITMENT
from acceptmoe_jax.runtime.statistics import DecodeStatistics
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import CommitmentTable, SelectorConfig
from acceptmoe_jax.speculation import CostTable, SamplingConfig, TreeConfig
from acceptmoe_jax.text.stopping import StopRules
from pallas_kernels.implementations import Implementations, implementations

COMMITMENT_FILE = "commitment.json"
AUTOREGRESSIVE = "autoregressive"

# A prompt is a text, a chat of {"role", "content"} messages, or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Engine:
    """Decodes prompts, one at a time or several: plainly, or with a draft tree under a policy.

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
        self._evict_costs: dict[Any, CostTable] = {}
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
        if selector.weighs_paths and self.commitment.path is None:
            raise UserError(
                f"selector {selector.policy!r} with path weights needs a path calibration, and "
                f"{self.commitment.source} holds none; measure it again with "
                "python -m experiments.calibrate"
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
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        batch_size: int = 1,
        evict: EvictConfig | None = None,
        audit_every: int = 0,
        max_disagreement: float | None = None,
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
        observe: Callable[[int, Verification], None] | None = None,
        record: bool = False,
    ) -> list[Generation]:
        """Decodes the prompts: greedily, or by draws whose distribution is the target's.

        Args:
          prompts: see `Prompt`.
          selector: "autoregressive", a policy's name or its config.
          max_new_tokens: limit for each answer.
          stop_strings: texts that end an answer, beside the model's stop tokens; as `text`, they
            leave reasoning aside.
          chat, chat_variables: see `encode`.
          sampling: temperature, top-k and top-p; greedy by default. Under a policy that restricts
            experts, the target is the restricted one.
          seed: of the draws; an answer depends on it, its prompt and its place among the prompts.
          batch_size: prompts that decode at the same time, each with a tree and expert sets of its
            own; more than one needs all experts on the device.
          evict: cut each draft tree to the length that pays on this device (EVICT); lossless.
          audit_every: verify every so manieth block once more under native routing, outside the
            timed seconds; 0 never.
          max_disagreement: of audited rows, the share whose top-1 may differ from native routing's;
            a call that passes it goes on natively, as `statistics` then say.
          on_tokens: called with the prompt's index and its new tokens after every forward.
          observe: called with the prompt's index and what happened after every verification.
          record: give `observe` router logits and sets too.

        Raises:
          UserError: before any decoding, if a prompt is empty or too long or a setting is wrong.
        """
        plain = selector == AUTOREGRESSIVE
        config = DecodeConfig(
            selector=None if plain else self.selector(selector),
            sampling=sampling,
            seed=seed,
            audit=AuditConfig(audit_every, max_disagreement),
            evict=evict,
            lanes=batch_size,
            record=record,
        )
        self._check(config)
        rules = StopRules(self.tokenizer.stop_ids, tuple(stop_strings), max_new_tokens)
        setup = self.model.setup
        requests = []
        for index, prompt in enumerate(prompts):
            ids = self.encode(prompt, chat, chat_variables)
            if len(ids) + max_new_tokens > self.max_length:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens and max_new_tokens = {max_new_tokens}, "
                    f"together more than max_length = {self.max_length}"
                )
            statistics = DecodeStatistics(len(setup.target.moe_layers), setup.tree.steps)
            requests.append(Request(index, ids, rules, self.tokenizer, statistics))
        commitment = NO_COMMITMENT if self.commitment is None else self.commitment.commitment()
        run = DecodingRun(
            self.runner,
            commitment,
            config,
            self.dtype,
            self._evict_costs,
            on_tokens or _ignore,
            observe or _ignore,
        )
        run.run(requests)
        return [request.generation() for request in requests]

    def _check(self, config: DecodeConfig) -> None:
        """Refuses settings that do not go together."""
        if config.lanes < 1:
            raise UserError(f"batch_size must be at least 1, not {config.lanes}")
        if config.lanes > 1 and self.offload is not None:
            raise UserError("a batch needs all experts on the device: batch_size is above 1")
        if config.evict is not None and config.selector is None:
            raise UserError("evict cuts draft trees, and autoregressive decoding has none")
        if config.evict is not None and config.lanes > 1:
            raise UserError("evict chooses the length of one tree at a time: batch_size is above 1")


def _ignore(index: int, event: Any) -> None:
    del index, event
