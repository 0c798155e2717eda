"""From model directories to weights on the device, with every mismatch refused before reading."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models import eagle3
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.models.experts import resident_bank
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.offload.config import OffloadConfig
from acceptmoe_jax.offload.host_store import HostStore
from acceptmoe_jax.runtime.state import Setup, Weights
from acceptmoe_jax.selection import config_hash
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.text.tokenizer import Tokenizer
from acceptmoe_jax.weights.checkpoint import Checkpoint, resolve_directory
from acceptmoe_jax.weights.eagle3 import load_eagle3, owns_embedding, owns_output
from acceptmoe_jax.weights.loading import check_complete, load_trees
from acceptmoe_jax.weights.targets import plan_target
from pallas_kernels.implementations import Implementations


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A loaded target and, if there is one, its head."""

    setup: Setup
    weights: Weights
    tokenizer: Tokenizer
    target: Checkpoint
    head: Checkpoint | None
    store: HostStore | None = None  # of the experts, where they are offloaded

    @property
    def hashes(self) -> tuple[str, str]:
        """Of the target's and the head's config, as a commitment table records them."""
        return config_hash(self.target.config), config_hash(self.head.config)


def load_pretrained(
    target: str,
    draft: str | None,
    *,
    dtype: jnp.dtype,
    tree: TreeConfig,
    implementations: Implementations = Implementations(),
    offload: OffloadConfig | None = None,
    progress: Callable[[int], None] | None = None,
) -> Pretrained:
    """Loads a target and a head from directories or hub ids.

    Args:
      target: of a Qwen3-MoE or GPT-OSS model.
      draft: of an EAGLE-3 head for it; None for plain decoding.
      dtype: of the weights in memory.
      tree: shape of the draft trees.
      implementations: of the kernels.
      offload: if given, the experts go to host memory.
      progress: called with the bytes of every leaf that was placed.

    Raises:
      UserError: naming the file, key or flag, for anything missing, damaged or mismatched.
    """
    checkpoint = Checkpoint.open(resolve_directory(target))
    config = target_config(checkpoint.config, checkpoint.config_file)
    tokenizer = Tokenizer.from_directory(checkpoint.directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{checkpoint.directory}: tokenizer.json has {tokenizer.vocab_size} tokens, but "
            f"config.json says vocab_size = {config.vocab_size}"
        )
    setup = Setup(config, None, (), False, tree, implementations)
    head_checkpoint = None
    if draft is not None:
        head_checkpoint = Checkpoint.open(resolve_directory(draft))
        setup = _with_head(setup, head_checkpoint)
    if offload is None:
        weights, store = load_target(checkpoint, config, dtype, progress), None
    else:
        try:
            offload.check_experts(config.num_experts, config.top_k)
        except ValueError as error:
            raise UserError(f"offload: {error}") from None
        weights, store = load_offloaded(checkpoint, config, dtype, progress)
    if head_checkpoint is not None:
        params, target_ids = load_eagle3(
            head_checkpoint,
            eagle3.abstract_params(setup.head, dtype, setup.owns_embedding),
            draft_vocab=setup.head.draft_vocab_size or config.vocab_size,
            target_vocab=config.vocab_size,
            dtype=dtype,
            progress=progress,
        )
        weights = weights.replace(head=params, target_ids=jnp.asarray(target_ids))
    return Pretrained(setup, weights, tokenizer, checkpoint, head_checkpoint, store)


def load_target(
    checkpoint: Checkpoint,
    config: TargetConfig,
    dtype: jnp.dtype,
    progress: Callable[[int], None] | None = None,
) -> Weights:
    """Loads the dense parameters and every expert of a target; arguments as `load_pretrained`.

    Experts that are stored as MXFP4 stay packed in memory.

    Raises:
      UserError: naming file and keys, if the tensors are not exactly those of the config.
    """
    plans = plan_target(checkpoint, config, dtype)
    params, *loaded = load_trees(checkpoint, plans, progress=progress)
    banks = dict(zip(config.moe_layers, loaded))
    return Weights(
        target=params,
        banks=tuple(
            resident_bank(banks[layer], config.num_experts) if layer in banks else None
            for layer in range(config.num_layers)
        ),
    )


def load_offloaded(
    checkpoint: Checkpoint,
    config: TargetConfig,
    dtype: jnp.dtype,
    progress: Callable[[int], None] | None = None,
) -> tuple[Weights, HostStore]:
    """Loads the dense parameters, and every expert into pinned host memory; see `load_target`."""
    dense, *banks = plan_target(checkpoint, config, dtype)
    check_complete(checkpoint, [dense, *banks])
    of_experts = {key for plan in banks for leaf in plan.leaves for key in leaf.keys}
    [params] = load_trees(checkpoint, [dense], ignore=of_experts, progress=progress)
    plans = dict(zip(config.moe_layers, banks))
    return Weights(params, banks=()), HostStore.from_checkpoint(checkpoint, plans, progress)


def _with_head(setup: Setup, checkpoint: Checkpoint) -> Setup:
    """The setup with a head, checked against the target."""
    head = Eagle3Config.from_hf(checkpoint.config, checkpoint.config_file)
    target = setup.target
    for name, ours, theirs in (
        ("vocab_size", head.vocab_size, target.vocab_size),
        ("target_hidden_size", head.target_hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise UserError(
                f"{checkpoint.config_file}: the head was made for another target: "
                f"{name} = {ours}, but the target has {theirs}"
            )
    if head.draft_vocab_size is None and owns_output(checkpoint):
        head = dataclasses.replace(head, draft_vocab_size=head.vocab_size)
    owns = owns_embedding(checkpoint)
    if not owns and head.hidden_size != target.hidden_size:
        raise UserError(
            f"{checkpoint.config_file}: hidden_size = {head.hidden_size} cannot share the "
            f"target's embedding of width {target.hidden_size}"
        )
    capture = head.aux_layer_ids or target.default_aux_layers()
    if len(capture) != 3 or list(capture) != sorted(set(capture)):
        raise UserError(
            f"{checkpoint.config_file}: EAGLE-3 reads three distinct layers in ascending order, "
            f"not {list(capture)}; set eagle_aux_hidden_state_layer_ids"
        )
    if not 0 <= capture[0] <= capture[-1] <= target.num_layers - 2:
        raise UserError(
            f"{checkpoint.config_file}: eagle_aux_hidden_state_layer_ids = {list(capture)} do not "
            f"fit a target of {target.num_layers} layers"
        )
    draft_vocab = head.draft_vocab_size or target.vocab_size
    if setup.tree.top_k > draft_vocab:
        raise UserError(f"tree top_k = {setup.tree.top_k} exceeds the draft's {draft_vocab} tokens")
    return dataclasses.replace(setup, head=head, capture=capture, owns_embedding=owns)
