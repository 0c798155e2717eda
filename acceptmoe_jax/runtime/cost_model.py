"""What expert sets cost on a device, from the bytes they move. Everything here is modelled.

    T_verify = T0 + sum over layers [ misses * bytes / BW_link + used * bytes / BW_memory
                                      + waves * t_sync ]
    tokens/s = accepted length / (T_draft + T_verify)

T0 is the time to read, once, all weights of the target that are not experts; T_draft the time to
read the head's weights once a pass. Both follow from the model's dimensions. Left out: the KV
cache (96 KiB a token at Qwen3-30B-A3B), activations, arithmetic, launches and host time. Times
are therefore floors of the memory traffic, and a ratio of two floors bounds the gain from above:
what is left out costs both methods the same and pulls a measured ratio towards 1.

Units: bytes, seconds, bytes a second.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallas_kernels.devices import Device


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """What the model needs to know of a target.

    Attributes:
      layers: MoE layers.
      experts: experts a layer.
      top_k: experts a token.
      bytes_per_expert: with scales and biases.
      dense_bytes: weights that every forward reads whole: attention, norms, routers and the
        unembedding. The embedding is left out: a forward reads only its tokens' rows.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    bytes_per_expert: int
    dense_bytes: int

    def slot_bytes(self, slots: int) -> int:
        """Bytes of `slots` experts in every layer."""
        return self.layers * slots * self.bytes_per_expert


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """An EAGLE-3 head: bytes read by each pass of its layer, and by fusing target states."""

    name: str
    bytes_per_pass: int
    fuse_bytes: int

    def round_bytes(self, draft_steps: int = 5) -> int:
        """Bytes a round: `draft_steps - 1` drafting passes, one draft-extend, one fusion."""
        return draft_steps * self.bytes_per_pass + self.fuse_bytes


def qwen3_moe_shape(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    top_k: int,
    expert_width: int,
    vocab: int,
    bytes_per_parameter: int = 2,
) -> TargetShape:
    """A Qwen3-MoE whose layers are all sparse, from the numbers of its config.json."""
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    norms = 2 * hidden + 2 * head_dim
    router = experts * hidden
    dense = layers * (attention + norms + router) + hidden + vocab * hidden
    return TargetShape(
        name=name,
        layers=layers,
        experts=experts,
        top_k=top_k,
        bytes_per_expert=3 * hidden * expert_width * bytes_per_parameter,
        dense_bytes=dense * bytes_per_parameter,
    )


def gpt_oss_shape(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    experts: int,
    top_k: int,
    expert_width: int,
    vocab: int,
) -> TargetShape:
    """A GPT-OSS with MXFP4 experts (32 weights and a scale in 17 bytes); the rest is bfloat16."""
    weights = 3 * hidden * expert_width
    biases = 2 * expert_width + hidden
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    attention_biases = (heads + 2 * kv_heads) * head_dim + hidden
    sinks = heads
    norms = 2 * hidden
    router = experts * hidden + experts
    layer = attention + attention_biases + sinks + norms + router
    return TargetShape(
        name=name,
        layers=layers,
        experts=experts,
        top_k=top_k,
        bytes_per_expert=weights * 17 // 32 + 2 * biases,
        dense_bytes=2 * (layers * layer + hidden + vocab * hidden),
    )


def eagle3_shape(
    name: str,
    *,
    hidden: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    draft_vocab: int,
    bytes_per_parameter: int = 2,
) -> HeadShape:
    """An EAGLE-3 head on a target of the same hidden width: q, k and v read twice that width."""
    qkv = 2 * hidden * (heads + 2 * kv_heads) * head_dim
    output = heads * head_dim * hidden
    mlp = 3 * hidden * width
    norms = 4 * hidden
    return HeadShape(
        name=name,
        bytes_per_pass=(qkv + output + mlp + norms + draft_vocab * hidden) * bytes_per_parameter,
        fuse_bytes=3 * hidden * hidden * bytes_per_parameter,
    )


# Dimensions: config.json of Qwen/Qwen3-30B-A3B-Instruct-2507 (the Coder has the same) and of
# openai/gpt-oss-120b, and of the heads that lmsys publishes for them.
QWEN3_30B_A3B = qwen3_moe_shape(
    "Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts=128,
    top_k=8,
    expert_width=768,
    vocab=151936,
)
GPT_OSS_120B = gpt_oss_shape(
    "GPT-OSS-120B",
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    experts=128,
    top_k=4,
    expert_width=2880,
    vocab=201088,
)
QWEN3_30B_A3B_EAGLE3 = eagle3_shape(
    "EAGLE-3 for Qwen3-30B-A3B",
    hidden=2048,
    width=12288,
    heads=32,
    kv_heads=4,
    head_dim=128,
    draft_vocab=32000,
)
GPT_OSS_120B_EAGLE3 = eagle3_shape(
    "EAGLE-3 for GPT-OSS-120B",
    hidden=2880,
    width=17280,
    heads=64,
    kv_heads=8,
    head_dim=64,
    draft_vocab=32000,
)


def verification_bytes(target: TargetShape, used: float | Sequence[float]) -> float:
    """Bytes of weights that a verification reads from device memory.

    Args:
      used: distinct experts used; one number for every layer (a mean will do) or one a layer.
    """
    return target.dense_bytes + _over_layers(target, "used", used) * target.bytes_per_expert


def verification_seconds(
    target: TargetShape,
    device: Device,
    used: float | Sequence[float],
    misses: float | Sequence[float] = 0.0,
    waves: float | Sequence[float] = 0.0,
    sync_seconds: float = 0.0,
) -> float:
    """T_verify: seconds of one target forward over a draft tree.

    Args:
      used: distinct experts used; one number for every layer (a mean will do) or one a layer.
      misses: those of them that come over the link first; 0 where all experts are resident.
      waves: groups in which a layer's experts are loaded and run.
      sync_seconds: t_sync, the host's cost of one wave.

    Raises:
      ValueError: if a count is negative, more than a layer has, or not one a layer.
    """
    loaded = _over_layers(target, "misses", misses) * target.bytes_per_expert
    syncs = np.broadcast_to(waves, (target.layers,)).sum() * sync_seconds
    read = verification_bytes(target, used)
    return float(loaded / device.link_bandwidth + read / device.memory_bandwidth + syncs)


def draft_seconds(head: HeadShape, device: Device, draft_steps: int = 5) -> float:
    """T_draft: seconds to read the head's weights in one round."""
    return head.round_bytes(draft_steps) / device.memory_bandwidth


def tokens_per_second(accepted_length: float, verify: float, draft: float = 0.0) -> float:
    """Tokens a second from a mean accepted length (bonus included), T_verify and T_draft."""
    return accepted_length / (draft + verify)


def loads_from_traffic(
    target: TargetShape, traffic_bytes_per_token: float, accepted_length: float
) -> float:
    """Expert loads a layer and verification that a host-to-device traffic a token implies."""
    return traffic_bytes_per_token * accepted_length / target.slot_bytes(1)


@dataclasses.dataclass(frozen=True)
class MeasuredSets:
    """What a run of a model of any size measured of one method.

    Attributes:
      method: its name.
      used_share: mean distinct experts used a layer and verification, as a share of the experts.
      accepted_length: mean tokens a verification, the bonus included.
      drafts: whether the method runs a draft head.
    """

    method: str
    used_share: float
    accepted_length: float
    drafts: bool = True


def autoregressive_sets(target: TargetShape) -> MeasuredSets:
    """Plain decoding, which needs no measurement: `top_k` experts, one token a forward."""
    return MeasuredSets("autoregressive", target.top_k / target.experts, 1.0, drafts=False)


@dataclasses.dataclass(frozen=True)
class ModelledRow:
    """One method at full size with all experts resident. Modelled, not measured.

    Attributes:
      experts_used: a layer and verification.
      bytes_per_verification: weights read from device memory.
      floor_milliseconds: T_verify, those bytes over the memory bandwidth.
      draft_milliseconds: T_draft.
      speed_ratio: tokens a second over the baseline's; an upper bound of the gain.
    """

    method: str
    target: str
    device: str
    experts_used: float
    bytes_per_verification: float
    floor_milliseconds: float
    draft_milliseconds: float
    speed_ratio: float


def modelled_rows(
    measurements: Sequence[MeasuredSets],
    target: TargetShape,
    head: HeadShape,
    device: Device,
    *,
    baseline: str = "native",
    draft_steps: int = 5,
) -> tuple[ModelledRow, ...]:
    """What measured shares of experts mean for a full-size target, all experts resident.

    The one assumption: the full-size target uses the same share of its experts, at the same
    accepted length. A small model's router may be more or less concentrated than a large one's.

    Args:
      measurements: the methods, the baseline among them.
      baseline: method whose speed is 1 (Standard SD).

    Returns:
      A row a measurement, in their order.

    Raises:
      ValueError: if the baseline was not measured or a share is not in [0, 1].
    """
    by_method = {sets.method: sets for sets in measurements}
    if baseline not in by_method:
        raise ValueError(f"no measurement of the baseline {baseline!r}")

    def seconds(sets):
        verify = verification_seconds(target, device, sets.used_share * target.experts)
        return verify, draft_seconds(head, device, draft_steps) if sets.drafts else 0.0

    def row(sets):
        verify, draft = seconds(sets)
        used = sets.used_share * target.experts
        return ModelledRow(
            method=sets.method,
            target=target.name,
            device=device.name,
            experts_used=used,
            bytes_per_verification=verification_bytes(target, used),
            floor_milliseconds=1e3 * verify,
            draft_milliseconds=1e3 * draft,
            speed_ratio=tokens_per_second(sets.accepted_length, verify, draft) / baseline_speed,
        )

    reference = by_method[baseline]
    baseline_speed = tokens_per_second(reference.accepted_length, *seconds(reference))
    return tuple(row(sets) for sets in measurements)


def _over_layers(target: TargetShape, name: str, experts: float | Sequence[float]) -> float:
    per_layer = np.asarray(experts, dtype=float)
    if per_layer.shape not in ((), (target.layers,)):
        raise ValueError(f"{name} must be one number or {target.layers}, one a layer")
    if not ((per_layer >= 0) & (per_layer <= target.experts)).all():
        raise ValueError(f"{name} must lie between 0 and {target.experts} experts a layer")
    return float(np.broadcast_to(per_layer, (target.layers,)).sum())
