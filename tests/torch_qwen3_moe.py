"""What transformers computes for tiny Qwen3-MoE checkpoints: the numbers ours are held against.

Everything here is torch in float32 on the CPU, with the eager attention and the eager expert
implementation (newer transformers default to a grouped one). Nothing of our own model is used. A
case is a pure function of a loaded reference model and a seed; it returns named NumPy arrays.

Weights come from NumPy, not from torch's generators, so that a seed means the same checkpoint
under every release of torch.
"""

import pathlib
from collections.abc import Callable

import numpy as np
import torch
import transformers

# Every dimension of a configuration is a different number: two equal ones hide a transposed axis.
_CONFIGS = {
    "qwen3_moe_norm": dict(
        vocab_size=199,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        num_experts=13,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        intermediate_size=56,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        rms_norm_eps=1e-6,
    ),
    "qwen3_moe_nonorm": dict(
        vocab_size=211,
        hidden_size=44,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=14,
        num_experts=17,
        num_experts_per_tok=5,
        moe_intermediate_size=18,
        intermediate_size=58,
        mlp_only_layers=[],
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-5,
    ),
}
# The first checkpoint is one file; the second is cut into shards with an index.
_SHARD_SIZE = {"qwen3_moe_norm": "1GB", "qwen3_moe_nonorm": "200KB"}

_WEIGHT_STD = 0.2  # ten times transformers' default, so that a wrong weight shows in the logits
_LAST_LOGITS = 32  # positions of a prompt whose logits are recorded
_PREFIX_LENGTH = 23
_BLOCK_NODES = 11
_MAX_DEPTH = 4

# A near tie may fall either way in another framework and would say nothing about it. A seed whose
# smallest gap between the last chosen and the first rejected router logit is below this is refused.
_MIN_ROUTING_GAP = 1e-4


class RoutingTieError(ValueError):
    """A seed whose routing is too close to call; choose another."""


def save_checkpoint(name: str, directory: pathlib.Path, seed: int) -> None:
    """Saves a random checkpoint with transformers' own `save_pretrained`.

    Args:
      name: one of `reference_cases.CHECKPOINTS`.
      directory: where config.json and the safetensors file or files go.
      seed: of the weights.
    """
    config = transformers.Qwen3MoeConfig(max_position_embeddings=512, **_CONFIGS[name])
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.float32)
    randomise(model, seed, lambda parameter: _WEIGHT_STD)
    model.save_pretrained(directory, max_shard_size=_SHARD_SIZE[name])


def randomise(
    module: torch.nn.Module, seed: int, std: Callable[[torch.nn.Parameter], float]
) -> None:
    """Fills matrices with normal values of deviation `std(parameter)`, norms with 0.5 to 1.5."""
    rng = np.random.default_rng(seed)
    for _, parameter in sorted(module.named_parameters()):
        if parameter.ndim > 1:
            values = rng.normal(scale=std(parameter), size=parameter.shape)
        else:
            values = rng.uniform(0.5, 1.5, size=parameter.shape)
        parameter.data = torch.from_numpy(values.astype(np.float32))


def load_model(directory: pathlib.Path) -> transformers.Qwen3MoeForCausalLM:
    """Loads the reference model that transformers makes of a checkpoint directory."""
    return transformers.Qwen3MoeForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def prompt_case(
    model: transformers.Qwen3MoeForCausalLM, length: int, seed: int
) -> dict[str, np.ndarray]:
    """A causal pass over one random prompt.

    Returns:
      input_ids int32 [T]; logits float32 [<= 32, V] of the last positions; for each layer l
      hidden/l [T, D], its output; for each MoE layer router_logits/l [T, E].
    """
    rng = np.random.default_rng([seed, length])
    input_ids = rng.integers(model.config.vocab_size, size=length)
    record = _forward(model, input_ids)
    record["logits"] = record["logits"][-_LAST_LOGITS:]
    return {"input_ids": input_ids.astype(np.int32), **record}


def block_case(model: transformers.Qwen3MoeForCausalLM, seed: int) -> dict[str, np.ndarray]:
    """One verification block after a prefix, natural and restricted to a set of experts a layer.

    The prefix routes naturally in both passes; the block's rows see the prefix, their ancestors
    and themselves, and sit at the position prefix length + depth.

    Returns:
      prefix_ids int32 [P]; block_ids, parents, depth int32 [T] (the root's parent is -1);
      allowed bool [L, E], the set of each layer (rows of dense layers mean nothing);
      natural/* and restricted/*: logits [T, V], hidden/l [T, D] and router_logits/l [T, E] of the
      block's rows. Router logits are those before the restriction.
    """
    config = model.config
    rng = np.random.default_rng([seed, config.vocab_size])
    prefix_ids = rng.integers(config.vocab_size, size=_PREFIX_LENGTH)
    block_ids = rng.integers(config.vocab_size, size=_BLOCK_NODES)
    parents, depth = _random_tree(rng)
    allowed = _random_sets(rng, config)
    pass_inputs = dict(
        input_ids=np.concatenate([prefix_ids, block_ids]),
        positions=np.concatenate([np.arange(_PREFIX_LENGTH), _PREFIX_LENGTH + depth]),
        visible=visible_keys(_PREFIX_LENGTH, parents),
    )
    natural = _forward(model, **pass_inputs)
    restricted = _forward(model, **pass_inputs, allowed=allowed, first_restricted=_PREFIX_LENGTH)
    record = {
        "prefix_ids": prefix_ids.astype(np.int32),
        "block_ids": block_ids.astype(np.int32),
        "parents": parents.astype(np.int32),
        "depth": depth.astype(np.int32),
        "allowed": allowed,
    }
    for title, arrays in (("natural", natural), ("restricted", restricted)):
        for key, value in arrays.items():
            record[f"{title}/{key}"] = value[_PREFIX_LENGTH:]
    return record


def visible_keys(prefix_length: int, parents: np.ndarray) -> np.ndarray:
    """Which keys each row of prefix + block attends to, bool [P + T, P + T].

    The prefix is causal; a node sees the prefix, its ancestors and itself. Built by walking up
    from every node, so that it shares no idea with a mask that is propagated downwards.
    """
    nodes = len(parents)
    visible = np.tri(prefix_length + nodes, dtype=bool)
    visible[prefix_length:, prefix_length:] = False
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            visible[prefix_length + node, prefix_length + ancestor] = True
            ancestor = parents[ancestor]
    return visible


def additive_mask(visible: np.ndarray) -> torch.Tensor:
    """The 4-D additive attention mask [1, 1, T, S] that transformers takes."""
    mask = torch.zeros(visible.shape, dtype=torch.float32)
    mask.masked_fill_(~torch.from_numpy(visible), torch.finfo(torch.float32).min)
    return mask[None, None]


def _random_tree(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of a tree in which parents precede children.

    It reaches the greatest depth, and some node's children are not neighbours in the block.
    """
    while True:
        parents = np.full(_BLOCK_NODES, -1)
        depth = np.zeros(_BLOCK_NODES, np.int64)
        for node in range(1, _BLOCK_NODES):
            parents[node] = rng.choice(np.flatnonzero(depth[:node] < _MAX_DEPTH))
            depth[node] = depth[parents[node]] + 1
        gaps = [np.diff(np.flatnonzero(parents == node)) for node in range(_BLOCK_NODES)]
        if depth.max() == _MAX_DEPTH and any((gap > 1).any() for gap in gaps):
            return parents, depth


def _random_sets(rng: np.random.Generator, config: transformers.Qwen3MoeConfig) -> np.ndarray:
    """A random set of experts for each layer, at least top-k of them: bool [L, E]."""
    allowed = np.zeros((config.num_hidden_layers, config.num_experts), bool)
    for row in allowed:
        size = rng.integers(config.num_experts_per_tok, config.num_experts - 1)
        row[rng.permutation(config.num_experts)[:size]] = True
    return allowed


def _forward(
    model: transformers.Qwen3MoeForCausalLM,
    input_ids: np.ndarray,
    positions: np.ndarray | None = None,
    visible: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    first_restricted: int = 0,
) -> dict[str, np.ndarray]:
    """One pass, with the outputs of all layers and routers taken by forward hooks.

    With `allowed` [L, E], rows from `first_restricted` on route inside their layer's set.
    """
    record: dict[str, np.ndarray] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):

        def keep_hidden(module, args, output, index=index):
            record[f"hidden/{index}"] = output[0].numpy()

        handles.append(layer.register_forward_hook(keep_hidden))
        if not hasattr(layer.mlp, "gate"):
            continue

        def route(module, args, output, index=index):
            router_logits = output[0]
            record[f"router_logits/{index}"] = router_logits.numpy()
            if allowed is None:
                _refuse_ties(router_logits, module.top_k)
                return output
            return _restrict(module, output, torch.from_numpy(allowed[index]), first_restricted)

        handles.append(layer.mlp.gate.register_forward_hook(route))
    try:
        with torch.no_grad():
            output = model(
                input_ids=torch.from_numpy(input_ids)[None],
                position_ids=None if positions is None else torch.from_numpy(positions)[None],
                attention_mask=None if visible is None else additive_mask(visible),
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    record["logits"] = output.logits[0].numpy()
    return record


def _restrict(
    router: torch.nn.Module,
    output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    allowed: torch.Tensor,
    first_restricted: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router's output with the rows from `first_restricted` on routed inside `allowed` [E].

    Masking the logits decides which experts a row gets. With norm_topk_prob the weights are the
    softmax over the k chosen. Without it transformers' formula on masked logits would be a softmax
    over the allowed experts alone, which inflates every weight as soon as an expert is masked;
    the method keeps the model's own gate values, softmax over ALL experts gathered at the chosen.
    """
    logits, weights, indices = output
    masked = logits.masked_fill(~allowed, -torch.inf)
    _refuse_ties(masked[first_restricted:], router.top_k)
    chosen = torch.topk(masked, router.top_k, dim=-1).indices
    if router.norm_topk_prob:
        restricted = torch.softmax(masked.gather(-1, chosen), dim=-1)
    else:
        restricted = torch.softmax(logits, dim=-1).gather(-1, chosen)
    weights, indices = weights.clone(), indices.clone()
    weights[first_restricted:] = restricted[first_restricted:]
    indices[first_restricted:] = chosen[first_restricted:]
    return logits, weights, indices


def _refuse_ties(logits: torch.Tensor, top_k: int) -> None:
    """Raises RoutingTieError if a row's k-th and k+1-th logits are almost equal."""
    best = torch.topk(logits, top_k + 1, dim=-1).values
    gap = (best[:, -2] - best[:, -1]).min().item()
    if gap < _MIN_ROUTING_GAP:
        raise RoutingTieError(f"the smallest routing gap is {gap:.1e}: choose another seed")
