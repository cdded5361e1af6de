"""Model classes of transformers, built so small that a survey can run them all."""

from __future__ import annotations

import torch

SECONDS, PARAMETERS, AGREE = 120, 30_000_000, 1e-4
WIDTHS = "hidden_size n_embd d_model embedding_size dim emb_dim word_embed_proj_dim".split()
INNER = "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim".split()
INNER += ["ffn_hidden_size", "hidden_dim"]
LAYERS = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers".split()
HEADS = "num_attention_heads n_head num_heads encoder_attention_heads".split()
HEADS += "decoder_attention_heads n_heads num_experts num_local_experts n_routed_experts".split()
POSITIONS = "max_position_embeddings n_positions n_ctx max_seq_len vocab_size".split()
SMALL: dict[str, object] = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(INNER, 48),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(POSITIONS, 64),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "sliding_window": 4,
    "attention_window": 8,
    "rotary_dim": 4,
    "attention_types": [[["global", "local"], 1]],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "state_size": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 7,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "embed_dim": 16,
    "embed_dims": [16, 32],
    "window_size": 4,
}
# What some configurations do not take together with the rest, and are then built without.
OPTIONAL = (
    (),
    ("hidden_sizes", "depths", "embed_dim", "embed_dims", "window_size"),
    ("head_dim", "num_key_value_heads"),
)
OPTIONAL += (("sliding_window", "rotary_dim"),)


def built(transformers, config: type, name: str, attention: str | None) -> torch.nn.Module:
    """The model with the small sizes that its configuration has."""
    defaults = config()
    known = {key: value for key, value in SMALL.items() if hasattr(defaults, key)}
    for without in OPTIONAL:
        try:
            settings = config(**{key: value for key, value in known.items() if key not in without})
            if attention:
                settings._attn_implementation = attention
            with torch.device("meta"):
                size = sum(p.numel() for p in getattr(transformers, name)(settings).parameters())
            break
        except (
            Exception
        ) as error:  # sizes that do not go together: the next attempt has fewer of them
            problem = error
    else:
        raise problem
    if size > PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return getattr(transformers, name)(settings).eval()


def inputs(kind: str, model: torch.nn.Module) -> dict:
    """Tokens with padding, in causal models on the left, so that some queries see nothing; or
    images.
    """
    torch.manual_seed(1)
    if kind == "image":
        return dict(pixel_values=torch.randn(2, getattr(model.config, "num_channels", 3), 32, 32))
    ids, mask = torch.randint(3, 64, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, slice(3) if kind == "causal" else slice(-5, None)] = 0
    found = dict(input_ids=ids, attention_mask=mask)
    if kind == "seq2seq":
        found["decoder_input_ids"] = torch.randint(3, 64, (2, 12))
    return found if kind == "masked" else found | dict(use_cache=False)
