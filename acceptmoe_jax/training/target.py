"""The target's training loss: next tokens of packed documents, and an even load of the experts."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.decoder import Decoder, Forward, init_banks, init_params
from acceptmoe_jax.models.experts import bank_weights, resident_bank
from acceptmoe_jax.training.batches import Batch, packed_mask, shift_left
from acceptmoe_jax.training.dispatch import RouterStats, training_moe
from pallas_kernels.masked_expert_gemm import ExpertBank, numbers
from pallas_kernels.mxfp4 import round_to_mxfp4

# {"dense": the module's parameters, "experts": the weights of a bank by name per layer, or None}
TargetParams = dict[str, Any]


@flax.struct.dataclass
class TargetMetrics:
    """Means over a batch; the router's are means over layers."""

    loss: Float[Array, ""]  # weighted cross-entropy, nats
    accuracy: Float[Array, ""]  # of next tokens, equally weighted over completions
    balance: Float[Array, ""]  # k is an even load
    top_mass: Float[Array, ""]  # softmax mass of the chosen k experts
    load_entropy: Float[Array, ""]  # 1 is an even load
    starved: Float[Array, ""]  # share of experts with less than a tenth of the mean load


def init_target(key: jax.Array, config: TargetConfig) -> TargetParams:
    """Random parameters in float32."""
    dense_key, expert_key = jax.random.split(key)
    return from_banks(init_params(dense_key, config), init_banks(expert_key, config))


def from_banks(dense: dict[str, Any], banks: tuple[ExpertBank | None, ...]) -> TargetParams:
    """Loaded weights in the form that is trained: packed experts as float32 numbers."""

    def unpacked(bank: ExpertBank | None) -> dict[str, jax.Array] | None:
        return bank and {name: numbers(leaf) for name, leaf in bank_weights(bank).items()}

    return {"dense": dense, "experts": tuple(unpacked(bank) for bank in banks)}


def expert_banks(params: TargetParams, config: TargetConfig) -> tuple[ExpertBank | None, ...]:
    """The trained experts as the model's banks."""
    return tuple(
        weights and resident_bank(weights, config.num_experts) for weights in params["experts"]
    )


def rounded(params: TargetParams) -> TargetParams:
    """The parameters with every expert matrix rounded to MXFP4, as it will be stored.

    Gradients pass straight through the rounding (Bengio et al. 2013).
    """

    def of(matrix: jax.Array) -> jax.Array:
        return matrix + jax.lax.stop_gradient(round_to_mxfp4(matrix) - matrix)

    experts = jax.tree.map(lambda leaf: of(leaf) if leaf.ndim == 3 else leaf, params["experts"])
    return params | {"experts": experts}


def forward(
    params: TargetParams, batch: Batch, config: TargetConfig, capture: tuple[int, ...] = ()
) -> Forward:
    """Runs packed rows; documents do not see each other."""
    valid = (batch.segments > 0).reshape(-1)
    return Decoder(config).apply(
        {"params": params["dense"]},
        batch.tokens,
        batch.positions,
        packed_mask(batch.segments),
        banks=expert_banks(params, config),
        moe=training_moe(config, valid),
        capture=capture,
    )


def unembed(params: TargetParams, hidden: Array, config: TargetConfig) -> Float[Array, "... V"]:
    """Logits of rows of `Forward.hidden`."""
    return Decoder(config).apply({"params": params["dense"]}, hidden, method="unembed")


def target_loss(
    params: TargetParams,
    batch: Batch,
    config: TargetConfig,
    balance_coefficient: float,
    mxfp4: bool = False,
) -> tuple[Float[Array, ""], TargetMetrics]:
    """Weighted cross-entropy of next tokens + coefficient * load-balancing loss.

    Row t predicts `tokens[t + 1]` with weight `loss_weights[t + 1]`, within its document.
    `mxfp4` puts the rounding of the experts into the loop.
    """
    if mxfp4:
        params = rounded(params)
    out = forward(params, batch, config)
    logits = unembed(params, out.hidden, config)
    labels = shift_left(batch.tokens, 1)
    same_document = shift_left(batch.segments, 1) == batch.segments
    weights = shift_left(batch.loss_weights, 1) * same_document
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = jnp.sum(weights * losses) / jnp.maximum(weights.sum(), 1e-6)
    graded = weights == 1
    right = jnp.sum(graded & (logits.argmax(axis=-1) == labels))
    metrics = TargetMetrics(
        loss=loss, accuracy=right / jnp.maximum(graded.sum(), 1), **_router_means(out.moe)
    )
    return loss + balance_coefficient * metrics.balance, metrics


def _router_means(stats: tuple[RouterStats, ...]) -> dict[str, jax.Array]:
    load = jnp.stack([layer.load for layer in stats])
    num_experts = load.shape[-1]
    entropy = -jnp.sum(load * jnp.log(jnp.maximum(load, 1e-9)), axis=-1) / jnp.log(num_experts)
    return {
        "balance": jnp.mean(jnp.stack([layer.balance for layer in stats])),
        "top_mass": jnp.mean(jnp.stack([layer.top_mass for layer in stats])),
        "load_entropy": entropy.mean(),
        "starved": jnp.mean(load < 0.1 / num_experts),
    }
