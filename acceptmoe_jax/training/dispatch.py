"""The mixture of experts as training runs it: many rows, every expert resident, no row dropped.

Assignments are sorted by expert into blocks of rows that belong to one expert each, so the experts
are batched products of static shape. The last block of an expert is filled up with zeros; at most
`block - 1` rows an expert are wasted, whatever the load, and no assignment is ever dropped.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.decoder import MoeFunction
from pallas_kernels.masked_expert_gemm import ExpertBank, GatedActivation


@flax.struct.dataclass
class RouterStats:
    """What one layer's router did with the valid rows of a batch."""

    balance: Float[Array, ""]  # E * sum_e f_e p_e; k when the load is even
    load: Float[Array, "E"]  # share of the assignments, sums to 1
    top_mass: Float[Array, ""]  # mean softmax mass of the k chosen experts


@flax.struct.dataclass
class Blocks:
    """Where each assignment lies in the P = blocks x block rows, and the way back.

    `row_of`, `assignment_of`: [P], R and R*k for rows that nothing fills; `slot_of`: [R, k].
    """

    slot_of: Int[Array, "R k"]
    row_of: Int[Array, "P"]
    assignment_of: Int[Array, "P"]
    expert_of_block: Int[Array, "G"]


def sort_into_blocks(expert_ids: Int[Array, "R k"], num_experts: int, block: int) -> Blocks:
    """Gives every assignment a row of a block of its expert; the order of rows is kept."""
    rows, k = expert_ids.shape
    count = rows * k
    # sum_e ceil(n_e / block) is at most this many blocks, for any load.
    num_blocks = count // block + min(num_experts, count)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=num_experts)
    padded = -(-sizes // block) * block
    ends = jnp.cumsum(padded)
    shift = (ends - padded) - (jnp.cumsum(sizes) - sizes)  # first slot - first sorted position
    slots = jnp.arange(count) + shift[flat[order]]
    places = num_blocks * block
    first_rows = jnp.arange(num_blocks) * block
    return Blocks(
        slot_of=jnp.zeros(count, jnp.int32).at[order].set(slots).reshape(rows, k),
        row_of=jnp.full(places, rows, jnp.int32).at[slots].set(order // k),
        assignment_of=jnp.full(places, count, jnp.int32).at[slots].set(order),
        expert_of_block=jnp.minimum(
            jnp.searchsorted(ends, first_rows, side="right"), num_experts - 1
        ),
    )


@jax.custom_vjp
def _take(
    x: Float[Array, "N D"], index: Int[Array, "M"], uses: Int[Array, "N u"]
) -> Float[Array, "M D"]:
    """`x[index]`, zeros where `index` is N. `uses[n]` lists where row n went, padded with M.

    Knowing the way back turns the gradient's scatter into a gather: it is 10 times faster here.
    """
    del uses
    return x.at[index].get(mode="fill", fill_value=0)


def _take_forward(x, index, uses):
    return _take(x, index, uses), uses


def _take_backward(uses, gradient):
    return gradient.at[uses].get(mode="fill", fill_value=0).sum(axis=1), None, None


_take.defvjp(_take_forward, _take_backward)


def run_experts(
    x: Float[Array, "R D"],
    expert_ids: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    bank: ExpertBank,
    activation: GatedActivation,
    block: int,
) -> Float[Array, "R D"]:
    """The weighted sum of each row's k experts; differentiable in x, the weights and the bank.

    Args:
      x: rows.
      expert_ids: distinct experts of each row. The bank holds all experts, in order.
      weights: of the experts' outputs.
      bank: the experts, as arrays.
      activation: between their products.
      block: rows of a block, a compromise between waste and the size of a product.
    """
    rows, k = expert_ids.shape
    blocks = sort_into_blocks(expert_ids, bank.num_slots, block)
    grouped = _take(x, blocks.row_of, blocks.slot_of).reshape(-1, block, x.shape[-1])
    experts = blocks.expert_of_block

    def project(rows: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.einsum("gbi,goi->gbo", rows, matrix[experts])
        return y if bias is None else y + bias[experts][:, None]

    gate, up = project(grouped, bank.gate, bank.gate_bias), project(grouped, bank.up, bank.up_bias)
    out = project(activation(gate, up), bank.down, bank.down_bias).reshape(-1, x.shape[-1])
    out = _take(out, blocks.slot_of.reshape(-1), blocks.assignment_of[:, None])
    return jnp.einsum("rk,rkd->rd", weights, out.reshape(rows, k, -1))


def balance_statistics(
    probs: Float[Array, "R E"], expert_ids: Int[Array, "R k"], valid: Bool[Array, "R"]
) -> RouterStats:
    """The load-balancing loss as Qwen3-MoE trains with it, over the whole batch.

    f_e is the mean number of assignments a row gives to e (sums to k), p_e the mean router
    probability. Rows that are padding count nowhere.
    """
    num_experts = probs.shape[-1]
    share = valid / jnp.maximum(valid.sum(), 1)
    spread = jnp.broadcast_to(share[:, None], expert_ids.shape)
    frequency = jnp.zeros(num_experts).at[expert_ids.reshape(-1)].add(spread.reshape(-1))
    chosen = jnp.take_along_axis(probs, expert_ids, axis=-1).sum(axis=-1)
    return RouterStats(
        balance=num_experts * jnp.dot(frequency, share @ probs),
        load=frequency / expert_ids.shape[-1],
        top_mass=share @ chosen,
    )


def training_moe(config: TargetConfig, valid: Bool[Array, "R"], block: int = 128) -> MoeFunction:
    """The `moe` function of `Decoder` for training; its statistics are `RouterStats`.

    Args:
      config: says how many experts a row takes, how they are weighted, and their activation.
      valid: rows that are not padding.
      block: see `run_experts`.
    """

    def moe(
        layer: int, x: jax.Array, logits: jax.Array, bank: ExpertBank
    ) -> tuple[jax.Array, RouterStats]:
        del layer
        probs = jax.nn.softmax(logits, axis=-1)
        weights, expert_ids = jax.lax.top_k(probs, config.top_k)
        if config.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        y = run_experts(x, expert_ids, weights.astype(x.dtype), bank, config.activation, block)
        return y, balance_statistics(probs, expert_ids, valid)

    return moe
