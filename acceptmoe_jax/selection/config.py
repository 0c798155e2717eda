"""The frozen settings of one expert-selection policy: everything static that `select` needs."""

import dataclasses
import math

POLICIES = ("native", "acceptmoe", "acceptmoe_fix", "moe_spec", "cache_conditional")
ACCEPTMOE_POLICIES = ("acceptmoe", "acceptmoe_fix")
BUDGETED_POLICIES = ("acceptmoe_fix", "moe_spec")
SIZE_RULES = ("effective_rank", "participation_ratio", "mass")
MOE_SPEC_MODES = ("substitute", "truncate")


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """Which experts a verification block may route to, and how it routes inside that set.

    Hashable, so it can be a static argument of a jitted step. What varies from block to block
    (logits, tree, residency) and the calibrated commitment probabilities are data: arguments of
    `select`.

    Attributes:
      policy: "native" (all experts: Standard SD), "acceptmoe" (arXiv 2608.02989: anchor plus as
        many experts as the residual demand's effective rank), "acceptmoe_fix" (the same ranking
        at a fixed size), "moe_spec" (arXiv 2602.16052: the `budget` experts of largest summed
        router probability) or "cache_conditional" (arXiv 2412.00099: all experts, and logits
        that favour resident ones).
      top_k: experts a token (`num_experts_per_tok` in the target's config.json).
      budget: experts a layer, B, of "acceptmoe_fix" and "moe_spec"; the others ignore it.
      beta: exponent of the commitment probability in a node's weight.
      gamma: exponent of the number of nodes at a depth; the weight falls with that power.
      protect_anchor: residency pruning never removes the root's own experts.
      anchor: the root's natural experts are always eligible. False is the no-anchor ablation:
        demand is ranked over all experts, and at least `top_k` are kept.
      prune: drop cheap experts that are not on the device, where `select` is told the residency.
        "native" and "moe_spec" never prune.
      admit: of "acceptmoe" and "acceptmoe_fix", where `select` is told the residency: the most
        experts outside the set that are let back in for being resident, which costs no transfer.
        They come on top of the size or budget; the displacement that they undo is pruned more.
        0 is the paper's method.
      size_rule: how "acceptmoe" sizes its set; see `demand.residual_size`.
      mass: share of the residual demand that the size rule "mass" must cover.
      uniform: every valid node weighs 1 (the ablation without commitment weights).
      path: nodes weigh `path_phat^beta`, their own probability of commitment, instead of what
        their depth weighs; gamma plays no part. Pruning and admission then count a displaced
        assignment by its node's weight instead of 1. "acceptmoe" and "acceptmoe_fix" only: the
        other policies weigh no node.
      norm_topk_prob: as in the target's config.json. True: weights are a softmax over the chosen
        logits. False: they are the softmax over all experts, gathered.
      moe_spec_mode: "substitute" takes a row's best experts inside the set; "truncate" drops the
        row's natural experts that are outside it and keeps the natural weights of the rest.
      renormalize_truncated: "truncate" scales a row's remaining weights up to the row's natural
        total.
      cache_bias: of "cache_conditional": what resident experts are favoured by, as a multiple of
        the block's mean range of router logits. 0 is natural routing.
      cache_keep: of "cache_conditional": each row's so many best experts stay chosen. Beyond them
        no row is protected, the root's neither.

    Raises:
      ValueError: naming the field, when a value is out of its range.
    """

    policy: str = "acceptmoe"
    top_k: int = 8
    budget: int | None = None
    beta: float = 0.5
    gamma: float = 0.5
    protect_anchor: bool = True
    anchor: bool = True
    prune: bool = True
    admit: int = 0
    size_rule: str = "effective_rank"
    mass: float = 0.9
    uniform: bool = False
    path: bool = False
    norm_topk_prob: bool = True
    moe_spec_mode: str = "substitute"
    renormalize_truncated: bool = False
    cache_bias: float = 0.5
    cache_keep: int = 1

    def __post_init__(self):
        _require_one_of("policy", self.policy, POLICIES)
        _require_one_of("size_rule", self.size_rule, SIZE_RULES)
        _require_one_of("moe_spec_mode", self.moe_spec_mode, MOE_SPEC_MODES)
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.budget is None and self.policy in BUDGETED_POLICIES:
            raise ValueError(f"policy {self.policy!r} needs a budget (experts a layer)")
        if self.budget is not None and self.budget < self.top_k:
            raise ValueError(
                f"budget must be at least top_k = {self.top_k} experts, got {self.budget}"
            )
        for name in ("beta", "gamma", "cache_bias"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 < self.mass <= 1:
            raise ValueError(f"mass must lie in (0, 1], got {self.mass}")
        if self.admit < 0:
            raise ValueError(f"admit must not be negative, got {self.admit}")
        if self.path and self.uniform:
            raise ValueError("path weighs every node by itself, uniform all alike: choose one")
        if not 0 <= self.cache_keep <= self.top_k:
            raise ValueError(
                f"cache_keep must lie between 0 and top_k = {self.top_k}, got {self.cache_keep}"
            )
        if self.renormalize_truncated and not self.truncates:
            raise ValueError(
                "renormalize_truncated applies to policy 'moe_spec' with moe_spec_mode 'truncate'"
            )

    @property
    def truncates(self) -> bool:
        """Whether picks outside the set are dropped instead of substituted."""
        return self.policy == "moe_spec" and self.moe_spec_mode == "truncate"

    @property
    def prunes(self) -> bool:
        """Whether experts that are not on the device are dropped, where residency is known."""
        return self.prune and self.policy in ACCEPTMOE_POLICIES

    @property
    def admits(self) -> bool:
        """Whether experts outside the set are let back in, where residency is known."""
        return self.admit > 0 and self.policy in ACCEPTMOE_POLICIES

    @property
    def weighs_paths(self) -> bool:
        """Whether `select` needs `path_phat`."""
        return self.path and self.policy in ACCEPTMOE_POLICIES

    def check_experts(self, num_experts: int) -> None:
        """Refuses a layer with fewer experts than the policy needs.

        Raises:
          ValueError: if `top_k` or the budget exceeds `num_experts`.
        """
        if self.top_k > num_experts:
            raise ValueError(f"top_k = {self.top_k} exceeds the layer's {num_experts} experts")
        if self.policy in BUDGETED_POLICIES and self.budget > num_experts:
            raise ValueError(f"budget = {self.budget} exceeds the layer's {num_experts} experts")


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
