"""What a trace is: verifications with their router logits, and the layout of a folder of them.

    index.json                {"version": 1, "settings": {...}, "shards": [{...}, ...]}
    trace-00000.safetensors   the verifications of one request, stacked; one shard a request

`settings` are the fields of `TraceSettings`: what was decoded, and how. A shard's entry in the
index names its `file`, the `prompt_id` and `prompt_hash` of its request and its `verifications`,
N; the shard's own metadata repeats the `prompt_id`. Its tensors are the fields of `Verifications`,
with axes L MoE layers, T nodes, E experts and n draft steps:

    logits          F32   [N, L, T, E]   router logits after the router's bias
    tokens          I32   [N, T]         of the nodes; node 0 is the root
    parent          I32   [N, T]         node number, -1 for the root
    depth           I32   [N, T]         edges from the root
    score           F32   [N, T]         log-probability of the path under the draft; 0 at the root
    valid           BOOL  [N, T]         False for nodes that only fill the shape
    path            I32   [N, n + 1]     accepted nodes, the root first; 0 from `length` on
    length          I32   [N]            accepted length, bonus included, before cuts
    eligible        BOOL  [N, L, E]      S' of the run
    used            BOOL  [N, L, E]      experts that live picks of the run went to

A shard appears whole, and the index names it after that: files that the index does not name are
leftovers of a run that was killed, and are nothing.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import Commitment, PathTable, SelectorConfig
from acceptmoe_jax.speculation import TreeConfig

VERSION = 1
INDEX_FILE = "index.json"

# Tensor -> its axes and dtype.
TENSORS: Mapping[str, tuple[str, np.dtype]] = {
    name: (axes, np.dtype(kind))
    for name, (axes, kind) in {
        "logits": ("NLTE", np.float32),
        "tokens": ("NT", np.int32),
        "parent": ("NT", np.int32),
        "depth": ("NT", np.int32),
        "score": ("NT", np.float32),
        "valid": ("NT", np.bool_),
        "path": ("NA", np.int32),
        "length": ("N", np.int32),
        "eligible": ("NLE", np.bool_),
        "used": ("NLE", np.bool_),
    }.items()
}


@struct.dataclass
class Verifications:
    """The verifications of a request in their order, stacked; see the module for the fields.

    A pytree, so that jitted functions take it; arrays of NumPy or JAX.
    """

    logits: Float[Array, "N L T E"]
    tokens: Int[Array, "N T"]
    parent: Int[Array, "N T"]
    depth: Int[Array, "N T"]
    score: Float[Array, "N T"]
    valid: Bool[Array, "N T"]
    path: Int[Array, "N n+1"]
    length: Int[Array, "N"]
    eligible: Bool[Array, "N L E"]
    used: Bool[Array, "N L E"]

    def __len__(self) -> int:
        """N."""
        return len(self.length)


@dataclasses.dataclass(frozen=True)
class TraceSettings:
    """What a trace was recorded with. Traces of equal settings can be continued.

    Attributes:
      target_hash, head_hash: `config_hash` of the two config.json files.
      target: name of the target, for people.
      family: `model_type` of the target's config.json.
      dtype: of weights and caches.
      platform: that computed the logits, such as "cpu".
      selector: the policy of the run.
      tree: shape of the draft trees.
      phat, path: of the run's commitment table; (1.0,) and None without one.
      offload: slots, eviction and keep_residency; None with all experts on the device.
      expert_bytes: of one expert's weights, where they are known.
      max_new_tokens: limit of each answer.
      num_layers: L, MoE layers.
      num_experts: E.
    """

    target_hash: str
    head_hash: str
    target: str
    family: str
    dtype: str
    platform: str
    selector: SelectorConfig
    tree: TreeConfig
    phat: tuple[float, ...]
    path: PathTable | None
    offload: dict[str, Any] | None
    expert_bytes: int | None
    max_new_tokens: int
    num_layers: int
    num_experts: int

    @classmethod
    def from_json(cls, raw: Any, path: pathlib.Path) -> "TraceSettings":
        """Of what `dataclasses.asdict` made.

        Raises:
          UserError: naming the file `path`, if a setting is missing, unknown or out of range.
        """
        try:
            typed = {
                "selector": SelectorConfig(**raw["selector"]),
                "tree": TreeConfig(**raw["tree"]),
                "phat": tuple(raw["phat"]),
                "path": raw["path"] and PathTable(**_tuples(raw["path"])),
            }
            return cls(**{**raw, **typed})
        except (TypeError, KeyError, ValueError, UserError) as error:
            raise UserError(f"{path} has settings that are not understood: {error}") from None

    @property
    def keeps_residency(self) -> bool:
        """Whether a request began with the experts that the one before left."""
        return self.offload is not None and self.offload["keep_residency"]

    def differences(self, other: "TraceSettings") -> list[str]:
        """Where the two differ, in words: this one's value first."""
        mine, theirs = (dict(_leaves("", dataclasses.asdict(s))) for s in (self, other))
        return [
            f"{name} is {_shown(mine.get(name))}, not {_shown(theirs.get(name))}"
            for name in dict.fromkeys((*mine, *theirs))
            if mine.get(name) != theirs.get(name)
        ]

    def commitment(self) -> Commitment:
        """What the recorded run weighed nodes by."""
        path = None if self.path is None else self.path.arrays()
        return Commitment(jnp.array(self.phat, jnp.float32), path)

    def shape(self, name: str, verifications: int) -> tuple[int, ...]:
        """The shape of a tensor in a shard of so many verifications."""
        sizes = {
            "N": verifications,
            "L": self.num_layers,
            "T": self.tree.nodes,
            "E": self.num_experts,
            "A": self.tree.max_accepted,
        }
        return tuple(sizes[axis] for axis in TENSORS[name][0])

    def stack(self, verifications: Sequence[Verification]) -> Verifications:
        """The verifications of a request, recorded ones, as arrays; perhaps none.

        Raises:
          ValueError: if one does not have the shapes of these settings.
        """
        arrays = {}
        for name, (_, dtype) in TENSORS.items():
            shape = self.shape(name, len(verifications))
            rows = [np.asarray(getattr(v, name), dtype) for v in verifications]
            for row in rows:
                if row.shape != shape[1:]:
                    raise ValueError(f"{name} must have shape {shape[1:]}, got {row.shape}")
            arrays[name] = np.stack(rows) if rows else np.zeros(shape, dtype)
        return Verifications(**arrays)


def shard_name(index: int) -> str:
    """The file of the shard at a place in the index."""
    return f"trace-{index:05d}.safetensors"


def prompt_hash(token_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of a prompt's token ids, which tells whether an id stands for the same one."""
    return hashlib.sha256(np.asarray(token_ids, "<i8").tobytes()).hexdigest()


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(map(tuple, rows)) for name, rows in raw.items()}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
