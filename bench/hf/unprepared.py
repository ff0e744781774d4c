"""Classes of `transformers` that nobody prepared: what their configurations call by the usual names is made small."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from bench.hf.models import CLASSES, HEADS, IMAGE, LAYERS, PATCH, VOCABULARY, WIDTH, Case, image_batch, padded_batch

MAX_ELEMENTS = 20_000_000
# (size, what has it).
_SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCABULARY, ("vocab_size", "max_position_embeddings", "n_positions")),
    (WIDTH, ("hidden_size", "d_model", "n_embd", "embedding_size", "dim")),
    (2 * WIDTH, ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")),
    (2 * WIDTH, ("hidden_dim",)),
    (WIDTH // HEADS, ("d_kv", "head_dim", "rotary_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "state_size")),
    (WIDTH // HEADS // 2, ("qk_rope_head_dim", "qk_nope_head_dim")),
    (LAYERS, ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")),
    (HEADS, (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts", "n_routed_experts",
    )),
    (2, ("num_experts_per_tok", "n_group", "eos_token_id")),
    (WIDTH // 2, ("moe_intermediate_size",)),
    (CLASSES, ("num_labels",)),
    (IMAGE, ("image_size",)),
    (PATCH, ("patch_size",)),
    (1, ("topk_group", "n_shared_experts", "bos_token_id")),
    (0, ("pad_token_id", "decoder_start_token_id")),
)  # fmt: skip
_RATES = (
    "attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout", "attention_dropout", "dropout",
    "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "layerdrop", "encoder_layerdrop",
    "decoder_layerdrop", "drop_path_rate", "classifier_dropout", "dropout_rate",
)  # fmt: skip
_TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")


def every_class() -> list[str]:
    """Names of all classes for text, and for sorting images."""
    modeling: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    named = [getattr(modeling, f"MODEL_FOR_{task}_MAPPING_NAMES").values() for task in _TASKS]
    flat = [name for names in named for name in names]
    return list(dict.fromkeys(name if isinstance(name, str) else name[0] for name in flat))


def is_class(name: str) -> bool:
    """Whether `transformers` has a model of this name, with a configuration of its own."""
    return getattr(getattr(importlib.import_module("transformers"), name, None), "config_class", None) is not None


def case_of(name: str) -> Case:
    """A class in a small configuration, which it may refuse."""
    try:
        cls: Any = getattr(importlib.import_module("transformers"), name)
        settings = _small(cls.config_class())
    except Exception:  # it needs a package, arguments, or more: building it says what
        return Case(name, name, "", {})
    batch = image_batch if "ImageClassification" in name else padded_batch
    return Case(name, name, cls.config_class.__name__, settings, batch)


def check_size(case: Case) -> None:
    """Raises:
    ValueError: nothing made the configuration small, and what ranks hold of the model might not fit into memory.
    """
    try:
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in case.build().parameters())
    except Exception:  # it reads values of tensors, or cannot be built at all: building it with data says what
        return
    if elements > MAX_ELEMENTS:
        raise ValueError(f"parameters have {elements} elements, more than {MAX_ELEMENTS}: no usual name makes it small")


def _small(shipped: Any) -> dict[str, Any]:
    """What makes a configuration small, those inside it included."""
    small: dict[str, Any] = {field: size for size, fields in _SIZES for field in fields}
    small |= dict.fromkeys(_RATES, 0.0) | {"use_cache": False}
    settings = {field: value for field, value in small.items() if hasattr(shipped, field)}
    if "qk_rope_head_dim" in settings:
        settings.pop("head_dim", None)  # rotary embeddings would have this width
    if getattr(shipped, "is_encoder_decoder", False):
        settings |= {"decoder_start_token_id": 0, "pad_token_id": 0}  # some read what they do not have
    base = importlib.import_module("transformers").PretrainedConfig
    inside = {field: value for field, value in vars(shipped).items() if isinstance(value, base)}
    return settings | {field: type(value)(**_small(value)) for field, value in inside.items()}
