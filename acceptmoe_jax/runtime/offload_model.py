"""The cost model of offloading against the published figures: one constant a target is fitted.

    seconds a token = rest + bytes a token / link + used experts' bytes / memory bandwidth

`rest` (attention, drafting, launches, the host) is the free constant. It is fitted on Standard
SD's share of time spent waiting for experts, and taken over to AcceptMoE unchanged: whose share
and speed are then predictions. The paper gives the shares of its three targets as a range only, so
every target is fitted at both ends. Transfers hide behind nothing here. Everything is modelled.

Figures: AcceptMoE, arXiv 2608.02989, on an RTX 5090 with 48 slots a layer, LRU.
"""

import dataclasses

from acceptmoe_jax.runtime import cost_model
from acceptmoe_jax.runtime.cost_model import HeadShape, TargetShape
from pallas_kernels.devices import DEVICES, Device

_DEVICE = dataclasses.replace(DEVICES["rtx-5090"], link_bandwidth=56e9)
_ACCEPTED_LENGTH = 4.39
SPEED_RATIO = 2.06  # AcceptMoE over Standard SD, published as one number for all targets
NATIVE_WAIT_SHARES = (0.65, 0.78)  # the published range of Standard SD
WAIT_SHARES = (0.27, 0.35)  # and of AcceptMoE


@dataclasses.dataclass(frozen=True)
class OffloadedRun:
    """What a target moved in the published run.

    Attributes:
      native_bytes, acceptmoe_bytes: over the link, a token.
      native_used, acceptmoe_used: experts a layer and verification.
    """

    name: str
    target: TargetShape
    native_bytes: float
    acceptmoe_bytes: float
    native_used: float
    acceptmoe_used: float


def _run(name, target, mebibytes, reduction, used) -> OffloadedRun:
    moved = mebibytes * 2**20
    return OffloadedRun(name, target, moved / (1 - reduction), moved, *used)


# Used experts: the middle of the published 52 to 72 and of 23 to 34; for GPT-OSS, of which none
# are published, what pocket-gpt-oss uses.
PUBLISHED_RUNS = (
    _run("Instruct", cost_model.QWEN3_30B_A3B, 633, 0.736, (62, 28.5)),
    _run("Coder", cost_model.QWEN3_30B_A3B, 464, 0.771, (62, 28.5)),
    _run("GPT-OSS-120B", cost_model.GPT_OSS_120B, 298, 0.760, (41, 17)),
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the model says of a published run.

    Attributes:
      native_wait_share: what `rest` is fitted on.
      transfer_milliseconds: Standard SD's, a token.
      rest_milliseconds: the fitted constant, a token.
      wait_share: AcceptMoE's.
      wait_share_miss: how far that lies outside the published range, in share of time; 0 inside.
      speed_ratio: AcceptMoE's tokens a second over Standard SD's.
      speed_ratio_miss: relative to the published one.
    """

    name: str
    native_wait_share: float
    transfer_milliseconds: float
    rest_milliseconds: float
    wait_share: float
    wait_share_miss: float
    speed_ratio: float
    speed_ratio_miss: float


def predict(run: OffloadedRun, native_wait_share: float) -> Prediction:
    """Fits `rest` on Standard SD's share and predicts AcceptMoE."""
    native_wait = run.native_bytes / _DEVICE.link_bandwidth
    native_total = native_wait / native_wait_share
    rest = native_total - native_wait - _reading(run, run.native_used)
    wait = run.acceptmoe_bytes / _DEVICE.link_bandwidth
    total = rest + wait + _reading(run, run.acceptmoe_used)
    share, ratio = wait / total, native_total / total
    low, high = WAIT_SHARES
    return Prediction(
        name=run.name,
        native_wait_share=native_wait_share,
        transfer_milliseconds=1e3 * native_wait,
        rest_milliseconds=1e3 * rest,
        wait_share=share,
        wait_share_miss=max(low - share, share - high, 0.0),
        speed_ratio=ratio,
        speed_ratio_miss=ratio / SPEED_RATIO - 1,
    )


@dataclasses.dataclass(frozen=True)
class MeasuredLoads:
    """What a run of a model of any size measured of one method, a layer and verification.

    Attributes:
      used_share, miss_share: of the layer's experts.
      waves: groups in which they came.
      accepted_length: tokens a verification.
    """

    used_share: float
    miss_share: float
    waves: float
    accepted_length: float


def tokens_per_second(
    loads: MeasuredLoads,
    target: TargetShape,
    head: HeadShape,
    device: Device,
    sync_seconds: float = 0.0,
) -> tuple[float, float]:
    """A full-size target that uses and misses the same shares of its experts.

    Args:
      sync_seconds: the host's cost of a wave.

    Returns:
      Tokens a second, and the share of the time for which experts are on the link.
    """
    experts = target.experts
    misses = loads.miss_share * experts
    verify = cost_model.verification_seconds(
        target, device, loads.used_share * experts, misses, loads.waves, sync_seconds
    )
    total = verify + cost_model.draft_seconds(head, device)
    waiting = misses * target.slot_bytes(1) / device.link_bandwidth
    return cost_model.tokens_per_second(loads.accepted_length, total), waiting / total


def _reading(run: OffloadedRun, used: float) -> float:
    """Seconds a token for used experts' bytes over the memory bandwidth."""
    moved = used * run.target.slot_bytes(1)
    return moved / _DEVICE.memory_bandwidth / _ACCEPTED_LENGTH
