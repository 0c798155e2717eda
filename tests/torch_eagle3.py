"""What torch computes for an EAGLE-3 head, built from transformers' Llama parts.

The head is LlamaForCausalLMEagle3 of the published checkpoints: one Llama layer whose attention
reads the token's embedding beside the target's fused hidden state. Norms, MLP, rotary embedding
and attention are transformers' own; only the wiring is written here, after the EAGLE-3 paper
(arXiv 2503.01840) and the tensor names of the published heads. The reference keeps no cache: it
runs the whole sequence again at every step.
"""

import json
import pathlib

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.models.llama import modeling_llama

from tests.torch_reference import additive_mask, randomise

AUX_LAYERS = (0, 1, 2)  # the target's layers whose outputs the head reads
_DRAFT_VOCAB = 67
_PREFILL = 19
# Two levels of a draft tree: four beams after the prefill, then three whose parents among the
# four are neither in order nor all different.
_BEAMS = 4
_SECOND_PARENTS = np.array([2, 0, 2])


class Eagle3Head(torch.nn.Module):
    """The head, with parameters named as in the published checkpoints.

    With EAGLE-3.1's `norm_before_residual` the residual stream starts from the normed hidden state.
    """

    def __init__(self, config: transformers.LlamaConfig, norm_before_residual: bool = False):
        super().__init__()
        width = config.hidden_size
        self.norm_before_residual = norm_before_residual
        self.fc = torch.nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        self.midlayer = torch.nn.Module()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            norm = modeling_llama.LlamaRMSNorm(width, eps=config.rms_norm_eps)
            self.midlayer.register_module(name, norm)
        self.midlayer.self_attn = modeling_llama.LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = self.midlayer.self_attn.get_submodule(name)
            widened = torch.nn.Linear(2 * width, projection.out_features, bias=False)
            self.midlayer.self_attn.register_module(name, widened)
        self.midlayer.mlp = modeling_llama.LlamaMLP(config)
        self.norm = modeling_llama.LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(width, _DRAFT_VOCAB, bias=False)
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)

    def forward(
        self,
        embeddings: torch.Tensor,
        carried: torch.Tensor,
        positions: np.ndarray,
        visible: np.ndarray,
    ) -> torch.Tensor:
        """One pass over all rows: [T, D] and [T, D] in, the hidden state before the norm out."""
        layer = self.midlayer
        normed = layer.hidden_norm(carried)
        inputs = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        rotation = self.rotary(inputs[None], torch.from_numpy(positions)[None])
        attended, _ = layer.self_attn(inputs[None], rotation, additive_mask(visible))
        residual = (normed if self.norm_before_residual else carried) + attended[0]
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, D] before the norm to draft logits [T, V_draft]."""
        return self.lm_head(self.norm(hidden))


def save_head(directory: pathlib.Path, target: transformers.Qwen3MoeConfig, seed: int) -> None:
    """Saves a random head for `target` in the published format: config.json, model.safetensors."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 88,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 14,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": _DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_aux_hidden_state": True,
        },
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    head = Eagle3Head(_llama_config(directory))
    randomise(head, seed, lambda name, parameter: parameter.shape[-1] ** -0.5)
    kept = np.sort(
        np.random.default_rng(seed).choice(target.vocab_size, size=_DRAFT_VOCAB, replace=False)
    )
    in_draft = np.zeros(target.vocab_size, bool)
    in_draft[kept] = True
    tensors = head.state_dict() | {
        "d2t": torch.from_numpy(kept - np.arange(_DRAFT_VOCAB)),  # offsets, as published
        "t2d": torch.from_numpy(in_draft),
    }
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def load_head(directory: pathlib.Path, norm_before_residual: bool = False) -> Eagle3Head:
    """Loads the reference head of a directory, with or without the flag."""
    head = Eagle3Head(_llama_config(directory), norm_before_residual).eval()
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    head.load_state_dict({k: v for k, v in tensors.items() if k not in ("d2t", "t2d")})
    return head


def _llama_config(directory: pathlib.Path) -> transformers.LlamaConfig:
    return transformers.LlamaConfig.from_pretrained(directory, attn_implementation="eager")


@torch.no_grad()
def head_case(
    head: Eagle3Head, target: transformers.Qwen3MoeForCausalLM, seed: int
) -> dict[str, np.ndarray]:
    """A causal pass with the target's hidden states, then two levels of a tree on the head's own.

    The auxiliary states are what transformers gives for the target's layers `AUX_LAYERS`.

    Returns, for the passes prefill, first and second:
      PASS/tokens int32 [T], PASS/embeddings [T, D], PASS/positions int32 [T],
      PASS/visible bool [T, S] over all rows so far, PASS/hidden [T, D] before the norm,
      PASS/logits [T, V_draft]; prefill/aux [T, 3 D], prefill/fused [T, D]; first/parents and
      second/parents int32 [T], the row among all rows so far whose hidden state a beam carries.
    """
    rng = np.random.default_rng(seed)
    vocab = target.config.vocab_size
    prompt = torch.from_numpy(rng.integers(vocab, size=_PREFILL))
    states = target.model(prompt[None], output_hidden_states=True).hidden_states
    aux = torch.cat([states[layer + 1][0] for layer in AUX_LAYERS], dim=-1)

    tokens = np.append(prompt[1:].numpy(), rng.integers(vocab))  # shifted left by one
    positions = np.arange(_PREFILL)
    visible = np.tri(_PREFILL, dtype=bool)
    carried = head.fc(aux)
    record = {"prefill/aux": aux.numpy(), "prefill/fused": carried.numpy()}

    def run(title: str, start: int) -> torch.Tensor:
        """Runs all rows so far and records those from `start` on."""
        embeddings = target.model.embed_tokens(torch.from_numpy(tokens))
        hidden = head(embeddings, carried, positions, visible)
        record.update(
            {
                f"{title}/tokens": tokens[start:].astype(np.int32),
                f"{title}/embeddings": embeddings[start:].numpy(),
                f"{title}/positions": positions[start:].astype(np.int32),
                f"{title}/visible": visible[start:],
                f"{title}/hidden": hidden[start:].numpy(),
                f"{title}/logits": head.logits(hidden)[start:].numpy(),
            }
        )
        return hidden

    hidden = run("prefill", 0)
    for title, parents in (
        ("first", np.full(_BEAMS, _PREFILL - 1)),
        ("second", _PREFILL + _SECOND_PARENTS),
    ):
        start, beams = len(tokens), len(parents)
        tokens = np.append(tokens, rng.integers(vocab, size=beams))
        positions = np.append(positions, positions[parents] + 1)
        visible = np.block(
            [
                [visible, np.zeros((start, beams), bool)],
                [visible[parents], np.eye(beams, dtype=bool)],
            ]
        )
        carried = torch.cat([carried, hidden[parents]])
        record[f"{title}/parents"] = parents.astype(np.int32)
        hidden = run(title, start)
    return record
