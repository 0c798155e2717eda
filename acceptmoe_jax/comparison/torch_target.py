"""A checkpoint as transformers runs it on the CPU: passes over prompts and trees, greedy decoding.

torch and transformers are no requirement of this project: they are imported when a target is
loaded. Nothing of our own models is used.
"""

import dataclasses
import importlib
import pathlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from acceptmoe_jax.errors import UserError

EXPERTS = ("eager", "grouped_mm", "batched_mm")  # as transformers calls them


def require_torch() -> tuple[Any, Any]:
    """The modules torch and transformers.

    Raises:
      UserError: if one is not installed.
    """
    found = []
    for name in ("torch", "transformers"):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            raise UserError(
                f"the comparison needs torch and transformers, and {name} cannot be imported "
                f"({error}): pip install -r tests/requirements-torch.txt"
            ) from None
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class TorchForward:
    """What one pass over T rows gave; by MoE layer where a layer is named."""

    logits: Float[np.ndarray, "T V"]
    router_logits: dict[int, Float[np.ndarray, "T E"]]  # before any restriction
    experts: dict[int, Int[np.ndarray, "T k"]]  # where the rows went


@dataclasses.dataclass(frozen=True)
class TorchDecoding:
    """A greedy answer, the stop token included, and the wall time of its two parts."""

    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float


class TorchTarget:
    """A Qwen3-MoE or GPT-OSS model of transformers.

    Attributes:
      model: with eager attention, the one that knows trees and sinks in every release; MXFP4 is
        dequantised.
      routers: by MoE layer; they return (logits, weights, experts).
    """

    def __init__(self, directory: pathlib.Path, dtype: str = "float32", experts: str = "eager"):
        """Loads a checkpoint directory.

        Args:
          dtype: of the weights, "float32" or "bfloat16".
          experts: the implementation of the experts, one of `EXPERTS`.

        Raises:
          UserError: if torch or transformers is not installed.
        """
        self._torch, transformers = require_torch()
        self._empty_cache = transformers.DynamicCache
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it tells that it dequantises
        config = transformers.AutoConfig.from_pretrained(directory)
        packed = {}
        if hasattr(config, "quantization_config"):
            packed["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        kind = getattr(self._torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=kind,
            attn_implementation="eager",
            experts_implementation=experts,
            **packed,
        )
        self.model = model.to(kind).eval()
        self.routers = {
            index: router
            for index, layer in enumerate(model.model.layers)
            for name, router in layer.mlp.named_children()
            if name in ("gate", "router")
        }

    def forward(
        self,
        input_ids: Sequence[int],
        positions: Int[np.ndarray, "T"] | None = None,
        visible: Bool[np.ndarray, "T T"] | None = None,
        sets: dict[int, Bool[np.ndarray, "E"]] | None = None,
        first_restricted: int = 0,
    ) -> TorchForward:
        """One pass without a cache; causal where no positions and no mask are given.

        Args:
          positions: of each row.
          visible: which rows each row attends to, windows aside.
          sets: of each MoE layer; rows from `first_restricted` on route inside them.
        """
        torch = self._torch
        router_logits, experts, handles = {}, {}, []
        for layer, router in self.routers.items():

            def route(module, args, output, layer=layer):
                if sets is not None:
                    allowed = torch.from_numpy(np.array(sets[layer]))
                    inside = self._route_inside(module, output, allowed)
                    output = (
                        output[0],
                        *(
                            torch.cat([natural[:first_restricted], new[first_restricted:]])
                            for natural, new in zip(output[1:], inside)
                        ),
                    )
                router_logits[layer] = output[0].float().numpy()
                experts[layer] = output[2].numpy()
                return output

            handles.append(router.register_forward_hook(route))
        try:
            with torch.no_grad():
                output = self.model(
                    input_ids=torch.tensor([list(input_ids)]),
                    position_ids=None if positions is None else torch.from_numpy(positions)[None],
                    attention_mask=None if visible is None else self._masks(visible, positions),
                    use_cache=False,
                )
        finally:
            for handle in handles:
                handle.remove()
        return TorchForward(output.logits[0].float().numpy(), router_logits, experts)

    def decode(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]
    ) -> TorchDecoding:
        """Answers greedily, a token a forward through transformers' own cache."""
        torch = self._torch
        cache = self._empty_cache(config=self.model.config)
        tokens, left, seconds = [], list(input_ids), []
        with torch.no_grad():
            while len(tokens) < max_new_tokens and not set(stop_ids) & set(tokens[-1:]):
                begin = time.perf_counter()
                out = self.model(
                    input_ids=torch.tensor([left]),
                    cache=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                tokens.append(int(out.logits[0, -1].argmax()))
                seconds.append(time.perf_counter() - begin)
                left = tokens[-1:]
        return TorchDecoding(tuple(tokens), seconds[0], sum(seconds[1:]))

    def _route_inside(self, router: Any, output: tuple, allowed: Any) -> tuple[Any, Any]:
        """Weights and experts of rows that route inside `allowed` [E].

        With norm_topk_prob, and in GPT-OSS, weights are a softmax over the chosen logits; without
        it the model's own gate values: softmax over ALL experts, gathered at the chosen.
        """
        torch, (logits, weights, _) = self._torch, output
        top_k = output[2].shape[-1]
        chosen = torch.topk(logits.masked_fill(~allowed, -torch.inf), top_k, dim=-1).indices
        if getattr(router, "norm_topk_prob", True):
            inside = torch.softmax(logits.float().gather(-1, chosen), dim=-1)
        else:
            inside = torch.softmax(logits.float(), dim=-1).gather(-1, chosen)
        return inside.to(weights.dtype), chosen

    def _masks(self, visible: np.ndarray, positions: np.ndarray) -> Any:
        """The additive masks [1, 1, T, T] that the model takes; a window counts positions."""
        if self.model.config.model_type != "gpt_oss":
            return self._additive(visible)
        near = positions[:, None] - positions < self.model.config.sliding_window
        return {
            "full_attention": self._additive(visible),
            "sliding_attention": self._additive(visible & near),
        }

    def _additive(self, visible: np.ndarray) -> Any:
        torch, dtype = self._torch, self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype)
        return mask.masked_fill_(~torch.from_numpy(visible), torch.finfo(dtype).min)[None, None]
