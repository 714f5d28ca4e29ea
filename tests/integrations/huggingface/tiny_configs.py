"""Small configurations of any model of transformers, by rules on the names of their fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tests.integrations.huggingface.tiny_models import END, VOCABULARY

RULES: tuple[tuple[str, int | None], ...] = (
    (r".*dropout.*|.*pdrop|initializer.*|acoustic_tokenizer_chunk_size|.*start_layer_prefix", None),
    (r"(.*_)?vocab_size(_per_layer_input)?|.*_vocab", VOCABULARY),
    (r"pad_token_id|pad_index", 0),
    (r"bos_token_id|decoder_start_token_id|bos_index|cls_token_id", 1),
    (r"eos_token_id|eos_index|sep_token_id", 2),
    (r".*(token|_start|_end|newline|patch)_(id|index|idx)|mask_index", END),
    # few experts, groups and layers
    (r"indexer_kv_heads|.*shared_experts|n_group|topk_group|.*n_?groups|o_groups", 1),
    (r"index_topk_blocks", 1),
    (r"first_k_dense_replace|num_kv_shared_layers|.*dense_layers|.*nextn_predict_layers", 1),
    (r"max_window_layers", 1),
    (r"(num_(local_|routed_)?|n_routed_|moe_num_)experts|zero_expert_num", 4),
    (r".*(experts_per_tok|moe_topk|moe_k|moe_top_k|top_k_experts)", 2),
    (r"(.*_)?(hidden_)?layers|n_layers?|depth|num_blocks|.*_depth", 2),
    # few keys, so that windows hide some, and sparse attention chooses
    (r"(.*_)?sliding_window(_size)?|(keep_)?window_size|.*window_len", 5),
    (r"attention_chunk_size|local_attention", 5),
    (r"attention_window(_size)?|local_radius", 4),
    (r"index_topk|indexer_budget", 6),
    (r"index_kpool|indexer_compress_ratio|chunk_(left|right)_context", 2),
    (r"(.*_)?(chunk|block|context)_size|.*chunk_length", 8),
    # heads
    (r"mamba_(n|num)_heads", 8),
    (r".*(key_value_heads|kv_heads|kv_n_heads|linear_num_key_heads)", 2),
    (r"(.*_)?heads|n_head|.*_heads_per_layer", 4),
    (r"qk_rope_head_dim", 4),
    (r"qk_head_dim", 12),
    (r"(.*_)?(head_dim|d_head|kv_channels|d_kv|dim_head|head_size|rotary_dim)", 8),
    # widths
    (r".*(_rank|state_size|d_state)", 8),
    (r".*(intermediate|ffn|ff|d_inner|mlp)_?(size|dim|hidden_size)?(_mlp)?", 48),
    (r"(max_)?(image|img)_size", 16),
    (r"patch_size|num_filters", 4),
    (r".*positions?(_embeddings)?|n_ctx|max_seq_len|max_source.*|seq_len|.*context_length", 64),
    (
        r"(.*_)?(hidden|embed|embedding|model|conv|in|out|output|proj|projection|latents|embd|emb)"
        r"_?(size|dim|channels)?|.*hidden_size(s|_global)?|.*channels|adapter_input_size"
        r"|condition_dim|d_model|dim|lru_width",
        32,
    ),
)
"""The first pattern that fits the name of an integer says how large it may be."""

REQUIRED = re.compile(
    "vocab_size|head_dim|num_(key_value_heads|hidden_layers|experts|experts_per_tok)|n_group"
    "|topk_group|n_(shared|routed)_experts|moe_intermediate_size|top_k_experts|indexer_.*"
    "|(pad|bos|eos|decoder_start)_token_id"
)
"""These get that value where the default is None."""

AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
"""A rotation by positions on three axes."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bros": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": END}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": AXES, "sliding_attention": AXES}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    | {"swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
    | {"swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "head_dim": 12},
    "emu3": {"vocabulary_map": {"<image>": END}},
    "ernie4_5_vl_moe_text": {"rope_parameters": AXES | {"mrope_section": [1, 1, 2]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"head_dim": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    | {"index_n_heads": 2},
    "mamba2": {"num_heads": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "neomme": {"head_dim": 16},
    "paddleocr_vl_text": {"rope_parameters": AXES},
    "qwen2_5_omni_thinker": {"vision_start_token_id": END},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": END},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["hybrid", "linear_attention"] * 2}
    | {"num_hidden_layers": 4, "attention_head_dim": 16, "attention_hidden_size": 64},
}
"""What the rules get wrong, by model_type."""


def small_config(kind: Any, **given: Any) -> Any:
    """Returns a small configuration, in its parts too.

    Args:
        kind: a class of configurations.
        given: arguments; what is large is made small.
    """
    default = vars(kind(**given))
    values = {
        field.name: default.get(kind.attribute_map.get(field.name, field.name))
        for field in fields(kind)
        if field.name not in ("id2label", "label2id")
    }
    if set(values.get("layer_types") or ()) == {"full_attention"} and "sliding_window" in values:
        values["layer_types"] = [*values["layer_types"][:-1], "sliding_attention"]
    small = {}
    for name, value in values.items():
        if hasattr(value, "sub_configs_defaults"):
            spec = kind.sub_configs_defaults.get(name)
            small[name] = small_config(type(value), **getattr(spec, "init_kwargs", {}))
        elif name != "rope_parameters" and (new := _small(name, value)) != value:
            small[name] = new
    overrides = OVERRIDES.get(kind.model_type, {})
    return kind(**given | small | _layers(values) | _related(kind, values) | overrides)


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _small(str(key), one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_small(name, one) for one in value)
    if isinstance(value, bool | float | str):
        return value
    most = next((most for pattern, most in RULES if re.fullmatch(pattern, name)), None)
    if value is None:
        return most if REQUIRED.fullmatch(name) else None
    return min(value, most) if isinstance(value, int) and most is not None else value


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns layer lists with one layer of each kind, at least two, and the number of layers."""
    number = next(
        (x for x in values if re.fullmatch("num_hidden_layers|n_layers?|num_layers", x)), ""
    )
    lists = {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == values.get(number)
    }
    indices = [name for name, value in lists.items() if value == list(range(len(value)))]
    kinds = [value for name, value in lists.items() if name not in indices]
    keep = {value.index(one) for value in kinds for one in value}
    if len(keep) < 2:
        keep = {0, 1}
    reduced = {
        name: type(values[name])(_small(name, value[i]) for i in sorted(keep))
        for name, value in lists.items()
    }
    reduced |= {name: list(range(len(keep))) for name in indices}
    return reduced | {number: len(keep)} if lists else {}


def _related(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what follows from several fields.

    Windows are in use, heads are ungrouped where they are so by default, and the parts of a
    rotation by axes fit the width of the heads.
    """
    found: dict[str, Any] = {}
    if "sliding_window" in values:
        found["sliding_window"] = _small("sliding_window", values["sliding_window"] or END)
    if "use_sliding_window" in values:
        found["use_sliding_window"] = True
    heads, rope = values.get("num_attention_heads"), values.get("rope_parameters")
    if heads is not None and heads == values.get("num_key_value_heads"):
        found["num_key_value_heads"] = _small("num_attention_heads", heads)
    if rope and "mrope_section" in {*rope, *kind.ignore_keys_at_rope_validation}:
        width = int(4 * rope.get("partial_rotary_factor", 1.0))
        section = [width - 2 * (width // 4), width // 4, width // 4]
        found["rope_parameters"] = rope | {"mrope_section": section}
    return found
