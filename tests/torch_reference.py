"""What transformers computes for tiny targets: the numbers ours are held against.

Everything here is torch in float32 on the CPU, with the eager attention and the eager expert
implementation (newer transformers default to a grouped one). Nothing of our own model is used. A
case is a pure function of a loaded reference model and a seed; it returns named NumPy arrays.
What is particular to a family is in `torch_qwen3_moe` and `torch_gpt_oss`.

Weights come from NumPy, not from torch's generators, so that a seed means the same checkpoint
under every release of torch.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import torch
import transformers

_LAST_LOGITS = 32  # positions of a prompt whose logits are recorded
_PREFIX_LENGTH = 23

# A near tie may fall either way in another framework and would say nothing about it. A seed whose
# smallest gap between the last chosen and the first rejected router logit is below this is refused.
_MIN_ROUTING_GAP = 1e-4

# Additive attention masks [1, 1, T, S], one for all layers or one for each type of layer.
Masks = torch.Tensor | dict[str, torch.Tensor]


class UnfitSeedError(ValueError):
    """A seed whose numbers would not tell right from wrong; choose another."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model of transformers, and how its family routes and masks."""

    model: transformers.PreTrainedModel
    routers: dict[int, torch.nn.Module]  # by MoE layer; they return (logits, weights, experts)
    # (router, its input [T, D], its logits [T, E], allowed [E]) -> (weights, experts), [T, k] each
    route_inside: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (visible [T, S], positions [T]) -> what the model takes as attention_mask
    masks: Callable[[np.ndarray, np.ndarray], Masks]
    block_nodes: int = 11
    max_depth: int = 4  # of a block's tree


def randomise(
    module: torch.nn.Module, seed: int, std: Callable[[str, torch.nn.Parameter], float]
) -> None:
    """Fills norms with 0.5 to 1.5, all else with normal values of deviation `std(name, value)`."""
    rng = np.random.default_rng(seed)
    for name, parameter in sorted(module.named_parameters()):
        if name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, size=parameter.shape)
        else:
            values = rng.normal(scale=std(name, parameter), size=parameter.shape)
        parameter.data = torch.from_numpy(values.astype(np.float32))


def load_eagerly(family: type, directory: pathlib.Path, **kwargs) -> transformers.PreTrainedModel:
    """Loads a checkpoint as `family`, a class of transformers, in float32."""
    model = family.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        **kwargs,
    )
    return model.to(torch.float32).eval()


def prompt_case(reference: Reference, length: int, seed: int) -> dict[str, np.ndarray]:
    """A causal pass over one random prompt.

    Returns:
      input_ids int32 [T]; logits float32 [<= 32, V] of the last positions; for each layer l
      hidden/l [T, D], its output; for each MoE layer router_logits/l [T, E].
    """
    rng = np.random.default_rng([seed, length])
    input_ids = rng.integers(reference.model.config.vocab_size, size=length)
    record = forward(reference, input_ids)
    record["logits"] = record["logits"][-_LAST_LOGITS:]
    return {"input_ids": input_ids.astype(np.int32), **record}


def block_case(reference: Reference, seed: int) -> dict[str, np.ndarray]:
    """One verification block after a prefix, natural and restricted to a set of experts a layer.

    The prefix routes naturally in both passes; the block's rows see the prefix, their ancestors
    and themselves, and sit at the position prefix length + depth.

    Returns:
      prefix_ids int32 [P]; block_ids, parents, depth int32 [T] (the root's parent is -1);
      allowed bool [L, E], the set of each layer (rows of dense layers mean nothing);
      natural/* and restricted/*: logits [T, V], hidden/l [T, D] and router_logits/l [T, E] of the
      block's rows. Router logits are those before the restriction.
    """
    config = reference.model.config
    rng = np.random.default_rng([seed, config.vocab_size])
    prefix_ids = rng.integers(config.vocab_size, size=_PREFIX_LENGTH)
    block_ids = rng.integers(config.vocab_size, size=reference.block_nodes)
    parents, depth = _random_tree(rng, reference.block_nodes, reference.max_depth)
    allowed = _random_sets(rng, config)
    record = {
        "prefix_ids": prefix_ids.astype(np.int32),
        "block_ids": block_ids.astype(np.int32),
        "parents": parents.astype(np.int32),
        "depth": depth.astype(np.int32),
        "allowed": allowed,
    }
    for title, restriction in (("natural", None), ("restricted", allowed)):
        for key, value in block_forward(reference, record, restriction).items():
            record[f"{title}/{key}"] = value
    return record


def block_forward(
    reference: Reference,
    case: dict[str, np.ndarray],
    allowed: np.ndarray | None = None,
    masks: Masks | None = None,
) -> dict[str, np.ndarray]:
    """The block of a `block_case`: logits, hidden states and router logits of its rows.

    Args:
      allowed: bool [L, E]; the block's rows route inside their layer's set. None: naturally.
      masks: in place of those that the tree asks for.
    """
    prefix = len(case["prefix_ids"])
    input_ids = np.concatenate([case["prefix_ids"], case["block_ids"]]).astype(np.int64)
    positions = np.concatenate([np.arange(prefix), prefix + case["depth"]])
    if masks is None:
        masks = reference.masks(visible_keys(prefix, case["parents"]), positions)
    arrays = forward(reference, input_ids, positions, masks, allowed, prefix)
    return {key: value[prefix:] for key, value in arrays.items()}


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


def _random_tree(
    rng: np.random.Generator, nodes: int, max_depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of a tree in which parents precede children.

    It reaches the greatest depth, and some node's children are not neighbours in the block.
    """
    while True:
        parents = np.full(nodes, -1)
        depth = np.zeros(nodes, np.int64)
        for node in range(1, nodes):
            parents[node] = rng.choice(np.flatnonzero(depth[:node] < max_depth))
            depth[node] = depth[parents[node]] + 1
        gaps = [np.diff(np.flatnonzero(parents == node)) for node in range(nodes)]
        if depth.max() == max_depth and any((gap > 1).any() for gap in gaps):
            return parents, depth


def _random_sets(rng: np.random.Generator, config: transformers.PreTrainedConfig) -> np.ndarray:
    """A random set of experts for each layer, at least top-k of them: bool [L, E]."""
    allowed = np.zeros((config.num_hidden_layers, config.num_experts), bool)
    for row in allowed:
        size = rng.integers(config.num_experts_per_tok, config.num_experts - 1)
        row[rng.permutation(config.num_experts)[:size]] = True
    return allowed


def forward(
    reference: Reference,
    input_ids: np.ndarray,
    positions: np.ndarray | None = None,
    masks: Masks | None = None,
    allowed: np.ndarray | None = None,
    first_restricted: int = 0,
) -> dict[str, np.ndarray]:
    """One pass, with the outputs of all layers and routers taken by forward hooks.

    With `allowed` [L, E], rows from `first_restricted` on route inside their layer's set. Without
    positions and masks transformers makes its own, for a causal pass.

    Raises:
      UnfitSeedError: if the routing of a row is too close to call.
    """
    record: dict[str, np.ndarray] = {}
    handles = []
    for index, layer in enumerate(reference.model.model.layers):

        def keep_hidden(module, args, output, index=index):
            record[f"hidden/{index}"] = output[0].numpy()

        handles.append(layer.register_forward_hook(keep_hidden))
    for index, router in reference.routers.items():

        def route(module, args, output, index=index):
            logits = output[0]
            record[f"router_logits/{index}"] = logits.numpy()
            if allowed is None:
                _refuse_ties(logits, module.top_k)
                return output
            inside = torch.from_numpy(allowed[index])
            _refuse_ties(logits.masked_fill(~inside, -torch.inf)[first_restricted:], module.top_k)
            restricted = reference.route_inside(module, args[0], logits, inside)
            return logits, *(
                torch.cat([natural[:first_restricted], new[first_restricted:]])
                for natural, new in zip(output[1:], restricted)
            )

        handles.append(router.register_forward_hook(route))
    try:
        with torch.no_grad():
            output = reference.model(
                input_ids=torch.from_numpy(input_ids)[None],
                position_ids=None if positions is None else torch.from_numpy(positions)[None],
                attention_mask=masks,
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    record["logits"] = output.logits[0].numpy()
    return record


def _refuse_ties(logits: torch.Tensor, top_k: int) -> None:
    """Raises UnfitSeedError if a row's k-th and k+1-th logits are almost equal."""
    best = torch.topk(logits, top_k + 1, dim=-1).values
    gap = (best[:, -2] - best[:, -1]).min().item()
    if gap < _MIN_ROUTING_GAP:
        raise UnfitSeedError(f"the smallest routing gap is {gap:.1e}: choose another seed")
