"""The shape of a draft tree: three settings, from which every static shape follows."""

import dataclasses

from acceptmoe_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Settings of an EAGLE-3 draft tree (arXiv 2503.01840); the defaults are the published runs'.

    Attributes:
      steps: deepest level of the tree, hence the most drafts one verification can accept.
      top_k: beams a level, and children a beam.
      nodes: rows of the verification block, the root counted (T).

    Raises:
      UserError: if a setting is below its minimum, if the candidate pool is too small to fill the
        tree, or if the tree is too small to hold one full path.
    """

    steps: int = 5
    top_k: int = 10
    nodes: int = 64

    def __post_init__(self):
        for name in ("steps", "top_k"):
            if getattr(self, name) < 1:
                raise UserError(f"tree {name} must be at least 1, not {getattr(self, name)}")
        if self.nodes - 1 > self.pool_size:
            raise UserError(
                f"tree nodes = {self.nodes} needs {self.nodes - 1} candidates, but steps = "
                f"{self.steps} and top_k = {self.top_k} give only {self.pool_size}"
            )
        # Fewer nodes give the very tree that nodes - 1 steps give, with draft forwards wasted.
        if self.nodes < self.steps + 1:
            raise UserError(
                f"tree nodes = {self.nodes} cannot hold a path of steps = {self.steps} drafts "
                f"and the root; use at most {max(self.nodes - 1, 1)} steps or more nodes"
            )

    @property
    def pool_size(self) -> int:
        """Candidates the tree is chosen from: top_k at level 1, top_k^2 at each later level."""
        return self.top_k + (self.steps - 1) * self.top_k**2

    @property
    def draft_rows(self) -> int:
        """Rows the draft steps write to the draft's scratch cache: top_k a step, steps - 1 steps.

        Level 1 comes from the draft-extend pass (or the prefill), so it costs no step.
        """
        return (self.steps - 1) * self.top_k

    @property
    def max_accepted(self) -> int:
        """Most tokens one verification emits, the bonus token included (n + 1)."""
        return self.steps + 1
