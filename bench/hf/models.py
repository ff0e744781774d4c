"""Classes of `transformers`, `diffusers` and `peft` in small random configurations, and batches for them; they are
imported when one is built.

Some classes do otherwise while they are compiled: they make the mask of causal attention that they leave to the kernel
else, where nothing is padded (with torch below 2.14); scan associatively, not step by step; run experts in other
kernels. No compiler that keeps bits can give what these give in eager. So the last tokens are padding here, and a
configuration's settings choose what is done alike; `as_shipped` leaves out both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 64, 32, 4
LAYERS = 4  # of fewer equal blocks each is traced
BATCH, LENGTH = 2, 12
CLASSES, IMAGE, PATCH, MELS, FRAMES = 5, 16, 4, 8, 16
IMAGE_TOKEN = VOCABULARY - 1

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: on the command line.
        model: its class, by name.
        config: that of its configuration; ``""``: the settings are the class's own arguments.
        settings: of the configuration.
        batch: makes keyword arguments of the forward, a loss among their results.
        checkpoints: whether activations are computed again in backward.
        same_path: further settings, with which the class does the same compiled and in eager.
        package: that has the class.
        change: what is made of the model, such as adapters.
        reads_scalars: whether its forward looks at values of tensors, as whether a text has a place for each image: one
            graph with ``torch._dynamo.config.capture_scalar_outputs``, which is set then.
    """

    name: str
    model: str
    config: str
    settings: Mapping[str, Any]
    batch: Callable[[], Batch] = field(default_factory=lambda: padded_batch)
    checkpoints: bool = False
    same_path: Mapping[str, Any] = field(default_factory=dict)
    package: str = "transformers"
    change: Callable[[nn.Module], nn.Module] | None = None
    reads_scalars: bool = False

    def build(self, *, as_shipped: bool = False) -> nn.Module:
        """The model, in training mode.

        Raises:
            ImportError: a package that the class needs is missing.
        """
        torch._dynamo.config.capture_scalar_outputs = self.reads_scalars  # noqa: SLF001
        package = importlib.import_module(self.package)
        settings = {**self.settings, **({} if as_shipped else self.same_path)}
        cls = getattr(package, self.model)
        made: nn.Module = cls(getattr(package, self.config)(**settings)) if self.config else cls(**settings)
        if self.change is not None:
            made = self.change(made)
        if self.checkpoints:
            enable: Any = made.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return made.train()

    def arguments(self, *, as_shipped: bool = False) -> Batch:
        """Of one forward."""
        return language_batch() if as_shipped and self.batch is padded_batch else self.batch()


def language_batch() -> Batch:
    """Tokens that are their own labels."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def padded_batch() -> Batch:
    """Tokens, the last ones of the second text being padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH // 2 :] = 0
    return {**language_batch(), "attention_mask": mask}


def pair_batch() -> Batch:
    """Tokens, and those to translate them into."""
    return {"input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH)), "labels": torch.randint(VOCABULARY, (BATCH, 8))}


def speech_batch() -> Batch:
    """Spectrograms, and their text."""
    return {"input_features": torch.randn(BATCH, MELS, 2 * FRAMES), "labels": torch.randint(VOCABULARY, (BATCH, 8))}


def image_batch() -> Batch:
    """Images and their classes."""
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.randint(CLASSES, (BATCH,))}


def picture_batch() -> Batch:
    """Tokens, of which some stand for an image's patches."""
    tokens = torch.randint(VOCABULARY - 4, (BATCH, 2 * LENGTH))
    tokens[:, 1 : 1 + (IMAGE // PATCH) ** 2] = IMAGE_TOKEN
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "pixel_values": images}


def noise_batch() -> Batch:
    """Noisy latents, their times, and what they are to show."""
    times = torch.randint(1000, (BATCH,))
    return {
        "sample": torch.randn(BATCH, 4, 8, 8),
        "timestep": times,
        "encoder_hidden_states": torch.randn(BATCH, 6, WIDTH),
    }


def joint_batch() -> Batch:
    """The same for a transformer that has text beside latents."""
    given = noise_batch()
    given["hidden_states"] = given.pop("sample")
    return {**given, "pooled_projections": torch.randn(BATCH, 16)}


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA by `peft`: frozen weights, two trained factors beside some."""
    import peft

    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    adapted: nn.Module = peft.get_peft_model(model, settings)  # type: ignore[arg-type]
    return adapted


def with_adapters_on_bf16(model: nn.Module) -> nn.Module:
    """The same over frozen weights of another dtype than the factors, as of a quantized base."""
    adapted = with_adapters(model.bfloat16())
    for parameter in adapted.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    return adapted


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MASKED = {**_LAYERS, "intermediate_size": 2 * WIDTH, **_NO_DROPOUT}
_DECODER: dict[str, Any] = {**_TOKENS, **_LAYERS, "intermediate_size": 2 * WIDTH, "use_cache": False}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "max_position_embeddings": 64}
_SSM = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
_SSM = {**_SSM, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0}
_WHISPER: dict[str, Any] = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": MELS,
    "max_source_positions": FRAMES, "max_target_positions": 16, "dropout": 0.0, "decoder_start_token_id": 1,
    "use_cache": False,
}  # fmt: skip
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "use_cache": False}
_BART = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "dropout": 0.0, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_CLIP = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_CLIP = {**_CLIP, "image_size": IMAGE, "patch_size": PATCH, "model_type": "clip_vision_model"}
_LLAVA = {"image_token_index": IMAGE_TOKEN, "vision_feature_select_strategy": "default", "vision_feature_layer": -2}
_UNET = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64), "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": WIDTH,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8,
}  # fmt: skip
_SD3 = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS,
    "attention_head_dim": 8, "num_attention_heads": HEADS, "joint_attention_dim": WIDTH,
    "caption_projection_dim": WIDTH, "pooled_projection_dim": 16, "pos_embed_max_size": 8,
}  # fmt: skip
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA = {**_JAMBA, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}

CASES = (
    Case("t5", "T5ForConditionalGeneration", "T5Config",
         {**_TOKENS, **_T5, "decoder_start_token_id": 0, "use_cache": False}, pair_batch),
    Case("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {**_TOKENS, **_WHISPER}, speech_batch),
    Case("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED),
    Case("llama-checkpointed", "LlamaForCausalLM", "LlamaConfig", _GROUPED, checkpoints=True),
    Case("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_GROUPED, **_EXPERTS, "output_router_logits": True},
         same_path={"experts_implementation": "batched_mm"}),
    Case("mixtral-loop", "MixtralForCausalLM", "MixtralConfig",
         {**_GROUPED, **_EXPERTS, "experts_implementation": "eager"}),
    Case("mamba", "MambaForCausalLM", "MambaConfig",
         {**_TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8, "use_cache": False},
         same_path={"use_associative_scan": False}),
    Case("mamba2", "Mamba2ForCausalLM", "Mamba2Config",
         {**_TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8, "num_heads": 8, "head_dim": 8,
          "n_groups": 1, "chunk_size": 8, "use_cache": False}),
    Case("jamba", "JambaForCausalLM", "JambaConfig",
         {**_DECODER, **_JAMBA, "num_hidden_layers": 4, "num_key_value_heads": 2},
         same_path={"use_associative_scan": False, "experts_implementation": "batched_mm"}),
    Case("bamba", "BambaForCausalLM", "BambaConfig",
         {**_DECODER, **_SSM, "num_key_value_heads": 2, "attn_layer_indices": [1]}),
    Case("falcon-h1", "FalconH1ForCausalLM", "FalconH1Config", {**_GROUPED, **_SSM, "mamba_d_ssm": 64}),
    Case("zamba2", "Zamba2ForCausalLM", "Zamba2Config",
         {**_DECODER, "num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
          "num_mem_blocks": 1, "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_d_state": 8,
          "num_key_value_heads": HEADS, "attention_head_dim": 2 * WIDTH // HEADS, "mamba_ngroups": 1,
          "n_mamba_heads": 8, "chunk_size": 8}),
    Case("deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
         {**_DECODER, "num_key_value_heads": HEADS, "moe_intermediate_size": 16, "n_routed_experts": 4,
          "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
          "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
         same_path={"experts_implementation": "batched_mm"}),
    Case("gpt2", "GPT2LMHeadModel", "GPT2Config",
         {**_TOKENS, **_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    Case("bert", "BertForMaskedLM", "BertConfig", {**_TOKENS, **_MASKED}),
    Case("vit", "ViTForImageClassification", "ViTConfig",
         {**_MASKED, "image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}, image_batch),
    Case("resnet", "ResNetForImageClassification", "ResNetConfig",
         {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic",
          "num_labels": CLASSES}, image_batch),
    Case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    Case("gemma2", "Gemma2ForCausalLM", "Gemma2Config",
         {**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": WIDTH // HEADS}),
    Case("llama-lora", "LlamaForCausalLM", "LlamaConfig", _GROUPED, change=with_adapters),
    Case("llama-lora-bf16", "LlamaForCausalLM", "LlamaConfig", _GROUPED, change=with_adapters_on_bf16),
    Case("bart-cached", "BartForConditionalGeneration", "BartConfig",
         {**_TOKENS, **_BART, "use_cache": True}, pair_batch),
    Case("llava", "LlavaForConditionalGeneration", "LlavaConfig",
         {**_LLAVA, "vision_config": _CLIP, "text_config": {**_GROUPED, "model_type": "llama"}}, picture_batch,
         reads_scalars=True),
    Case("unet", "UNet2DConditionModel", "", _UNET, noise_batch, package="diffusers"),
    Case("sd3", "SD3Transformer2DModel", "", _SD3, joint_batch, package="diffusers"),
)  # fmt: skip

# With as many layers as show how blocks of several kinds in turns are compiled; only where they are named.
DEEP = (
    Case(
        "jamba-16",
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_DECODER,
            **_JAMBA,
            "num_hidden_layers": 16,
            "num_key_value_heads": 2,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
        },
        same_path={"use_associative_scan": False, "experts_implementation": "batched_mm"},
    ),
    Case(
        "nemotron-h-16",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_GROUPED,
            "hybrid_override_pattern": "M-M*M-M-M-M*M-M-",
            "num_hidden_layers": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "ssm_state_size": 8,
        },
    ),
    Case(
        "lfm2-16",
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **_GROUPED,
            "num_hidden_layers": 16,
            "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        },
    ),
)
