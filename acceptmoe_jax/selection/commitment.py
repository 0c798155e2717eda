"""Calibrated commitment probabilities: how often a node position ends on the accepted prefix.

Measured once for a target and a head by Standard SD on training prompts, then frozen and kept
beside the checkpoint as commitment.json. `phat[d]` is the marginal probability of depth d, not
the conditional acceptance rate of a child given its parent.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from acceptmoe_jax import files
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.selection.path_calibration import PathTable
from acceptmoe_jax.selection.path_commitment import Commitment

VERSION = 1
PHAT_FLOOR = 1e-3

# Keys of a Hugging Face config.json that say who wrote the file or how to load it, not what the
# model computes.
_KEYS_WITHOUT_EFFECT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)


def config_hash(raw: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a config.json's content, as canonical JSON.

    Key order, white space and the keys that do not change what the model computes play no part.
    Weights do not either: two models trained from one config share a hash.
    """
    canonical = json.dumps(_essential(raw), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _essential(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _essential(v) for k, v in value.items() if k not in _KEYS_WITHOUT_EFFECT}
    if isinstance(value, (list, tuple)):
        return [_essential(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True)
class CommitmentTable:
    """The commitment probabilities of one target and head, and where they come from.

    Attributes:
      target_hash, head_hash: `config_hash` of the two config.json files.
      phat: probability by depth, the root first; phat[0] = 1, none below 1e-3.
      reach: verifications whose accepted path held a node at that depth (the root included).
      nodes: valid nodes seen at that depth, over all verifications.
      verifications: target forwards over a draft tree that were counted.
      data: the prompts that were decoded, in words.
      seed: of their choice.
      per_node: phat divides by the nodes of a depth instead of by the verifications.
      path: rate of commitment by depth and path score; None where it was not calibrated.
      version: of the file format.
      source: the file it was loaded from, for messages; not saved and not compared.
    """

    target_hash: str
    head_hash: str
    phat: tuple[float, ...]
    reach: tuple[int, ...]
    nodes: tuple[int, ...]
    verifications: int
    data: str
    seed: int
    per_node: bool = False
    path: PathTable | None = None
    version: int = VERSION
    source: str = dataclasses.field(default="commitment table", compare=False, repr=False)

    def __post_init__(self):
        if self.verifications < 1:
            raise ValueError(f"verifications must be at least 1, got {self.verifications}")
        if not len(self.phat) == len(self.reach) == len(self.nodes) > 0:
            raise ValueError("phat, reach and nodes must have one entry a depth each")
        if self.reach[0] != self.verifications or self.nodes[0] != self.verifications:
            raise ValueError("reach[0] and nodes[0] count the root: both equal verifications")
        if any(deeper > upper for upper, deeper in zip(self.reach, self.reach[1:])):
            raise ValueError("reach must not grow with depth: an accepted path has no gaps")
        if any(not 0 <= r <= n for r, n in zip(self.reach, self.nodes)):
            raise ValueError("reach must lie between 0 and nodes at every depth")
        if self.phat[0] != 1 or any(not 0 < p <= 1 for p in self.phat):
            raise ValueError("phat must lie in (0, 1] and start with 1")
        if self.path is not None and len(self.path.knots) != len(self.phat):
            raise ValueError("path must have one row a depth, as phat has one entry")

    @classmethod
    def from_counts(
        cls,
        reach: Sequence[int],
        nodes: Sequence[int],
        verifications: int,
        *,
        target_hash: str,
        head_hash: str,
        data: str,
        seed: int,
        per_node: bool = False,
        path: PathTable | None = None,
    ) -> "CommitmentTable":
        """Estimates `phat[d] = reach[d] / verifications`, at least 1e-3.

        With `per_node` the divisor is `nodes[d]`: the probability of one node of that depth
        rather than of the depth's accepted position.

        Args:
          path: of the same verifications, from `fit_path_commitment`.

        Raises:
          ValueError: if the counts contradict each other.
        """
        return cls(
            target_hash=target_hash,
            head_hash=head_hash,
            phat=_estimate(reach, nodes, verifications, per_node),
            reach=tuple(int(count) for count in reach),
            nodes=tuple(int(count) for count in nodes),
            verifications=int(verifications),
            data=data,
            seed=int(seed),
            per_node=per_node,
            path=path,
        )

    def with_per_node(self, per_node: bool) -> "CommitmentTable":
        """The table with phat estimated anew from its own counts; see `from_counts`."""
        phat = _estimate(self.reach, self.nodes, self.verifications, per_node)
        return dataclasses.replace(self, phat=phat, per_node=per_node)

    def commitment(self) -> Commitment:
        """What a compiled step takes of the table."""
        path = None if self.path is None else self.path.arrays()
        return Commitment(jnp.array(self.phat, jnp.float32), path)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verification, the bonus included, before any cut by a stop or a limit.

        `sum_d reach[d] / verifications`: the root's count stands for the bonus token.
        """
        return sum(self.reach) / self.verifications

    def save(self, path: str | os.PathLike) -> None:
        """Writes the table as JSON, whole or not at all."""
        record = {name: getattr(self, name) for name in _FIELD_TYPES}
        if self.path is not None:
            record["path"] = dataclasses.asdict(self.path)
        files.write_json(path, {"version": self.version} | record)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CommitmentTable":
        """Reads a table.

        Raises:
          UserError: naming the file, and the key, if it is missing or malformed or of another
            version.
        """
        raw = files.read_json(path)
        if not isinstance(raw, dict):
            raise UserError(f"{path} must hold a JSON object")
        if raw.get("version") != VERSION:
            raise UserError(
                f"{path} has version {raw.get('version')!r}, expected {VERSION}; "
                "measure it again with python -m experiments.calibrate"
            )
        raw.setdefault("per_node", False)
        unknown = sorted(raw.keys() - _FIELD_TYPES.keys() - {"version", "path"})
        if unknown:
            raise UserError(f"{path} has unknown keys: {', '.join(unknown)}")
        values = {name: _read_field(path, raw, name, kind) for name, kind in _FIELD_TYPES.items()}
        try:
            return cls(**values, path=_read_path(path, raw), source=str(path))
        except ValueError as error:
            raise UserError(f"{path} is not a valid commitment table: {error}") from None

    def check(self, target_hash: str, head_hash: str) -> None:
        """Refuses a table that was measured with another target or head.

        Raises:
          UserError: naming the table's file and the config that differs.
        """
        pairs = {
            "target": (self.target_hash, target_hash),
            "head": (self.head_hash, head_hash),
        }
        differing = [
            f"another {name} config" for name, (mine, given) in pairs.items() if mine != given
        ]
        if differing:
            raise UserError(
                f"{self.source} was measured with {' and '.join(differing)}; "
                "measure it again with python -m experiments.calibrate"
            )


def _estimate(reach, nodes, verifications, per_node):
    divisors = nodes if per_node else [verifications] * len(reach)
    return tuple(
        max(count / divisor, PHAT_FLOOR) if divisor else PHAT_FLOOR
        for count, divisor in zip(reach, divisors)
    )


# JSON type of each saved field; a tuple's entry is the type of its elements.
_FIELD_TYPES = {
    "target_hash": str,
    "head_hash": str,
    "phat": (float,),
    "reach": (int,),
    "nodes": (int,),
    "verifications": int,
    "data": str,
    "seed": int,
    "per_node": bool,
}


def _read_field(path, raw, name, kind):
    if name not in raw:
        raise UserError(f"{path} lacks the key {name!r}")
    value = raw[name]
    if isinstance(kind, tuple):
        (element,) = kind
        if isinstance(value, list) and all(_is_a(item, element) for item in value):
            return tuple(element(item) for item in value)
        raise UserError(f"{path}: {name!r} must be a list of {element.__name__} values")
    if not _is_a(value, kind):
        raise UserError(f"{path}: {name!r} must be of type {kind.__name__}")
    return value


def _read_path(path, raw):
    if "path" not in raw:
        return None
    record = raw["path"]
    if not isinstance(record, dict) or record.keys() != {"knots", "rates"}:
        raise UserError(f"{path}: 'path' must hold knots and rates")
    if not all(
        isinstance(rows, list)
        and all(isinstance(row, list) and all(_is_a(x, float) for x in row) for row in rows)
        for rows in record.values()
    ):
        raise UserError(f"{path}: 'path' must hold lists of numbers, one list a depth")
    return PathTable(
        **{name: tuple(tuple(map(float, row)) for row in rows) for name, rows in record.items()}
    )


def _is_a(value, kind):
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
