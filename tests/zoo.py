"""Tiny random models of the families that users serve, and what the predictor does with each.

A row names the family, transformers' model type, the runner or a part of the refusal's text, and what the configuration
has beyond a common one of two layers. Windows, chunks and limits of scaling are shorter than the prompts of the tests.
docs/models.md has the table; docs/generate_models.py writes it.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers as hf

VOCABULARY = 1536
PAGED, HYBRID, SEQ2SEQ, ROW, CACHELESS = RUNNERS = "paged", "hybrid", "encoder-decoder", "one row", "one row, no cache"

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    **_IDS,
}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    **_IDS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "max_position_embeddings": 256,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# Of every kind of vision tower; a configuration takes those that it knows.
_TOWER = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 16,
    "num_global_layers": 1,
    "vision_output_dim": 64,
    "deepstack_visual_indexes": [0],
    "intermediate_layers_indices": [0],
    "fullatt_block_indexes": [1],
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "position_embedding_size": 64,
}


@dataclass(frozen=True)
class Family:
    """`outcome` is the runner, or a part of the refusal's text; `fault` says what is wrong today: its test fails.

    `reason` is a part of why the runner is not a faster one.
    """

    name: str
    model_type: str
    outcome: str
    given: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=lambda: _DECODER)
    fault: str = ""
    architecture: str = ""
    reason: str = ""

    @property
    def is_served(self) -> bool:
        return self.outcome in RUNNERS

    def initialised(self, seed: int = 0) -> Any:
        """The model in float32, as transformers initialises it."""
        torch.manual_seed(seed)
        config_class = hf.CONFIG_MAPPING[self.model_type]
        config = config_class(**deepcopy({**_known(config_class, self.common), **self.given}))
        model_class = getattr(hf, self.architecture, None)
        for auto in (hf.AutoModelForSeq2SeqLM, hf.AutoModelForMultimodalLM, hf.AutoModelForCausalLM):
            model_class = model_class or auto._model_mapping.get(config_class, None)
        return model_class._from_config(config).eval()

    def model(self, seed: int = 0) -> Any:
        """With weights so large that outputs depend on the whole context; small ones would often repeat one token."""
        model = self.initialised(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                own = any(part in name for part in ("A_log", "conv1d", "vis")) or not parameter.requires_grad
                if parameter.dim() in (2, 3) and not own:
                    parameter.normal_(0, self._scale(name) / parameter.shape[-1] ** 0.5)
        model.generation_config.eos_token_id = 2
        return model

    def _scale(self, name: str) -> float:
        if "relative" in name:
            return 20
        if self.common is _SEQ2SEQ or self.model_type in ("bert", "minicpm3"):
            return 8 if "att" in name else 1  # Their answers would hardly depend on the prompt.
        if self.outcome == CACHELESS:
            return 4 if "attn" in name or "tokens_embed" in name else 1
        # Gemma multiplies its embeddings by the root of their size.
        return 1.5 / (8 if "embed_tokens" in name and "gemma" in self.model_type else 1)


def _known(config_class: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    known = {member.name for member in fields(config_class)} | {*config_class.attribute_map, "decoder_start_token_id"}
    return {name: value for name, value in values.items() if name in known}


def _decoder(name: str, model_type: str, outcome: str, fault: str = "", reason: str = "", **given: Any) -> Family:
    return Family(name, model_type, outcome, given, fault=fault, reason=reason)


def _vision(
    name: str, model_type: str, outcome: str, text: dict[str, Any], tower: str = "siglip_vision_model"
) -> Family:
    """A model of text and images or sound, whose configuration has one of a decoder."""
    configs: dict[str, Any] = {"text_config": {**_DECODER, **text}}
    for part, part_class in hf.CONFIG_MAPPING[model_type].sub_configs.items():
        if part in ("vision_config", "audio_config"):
            named = {"model_type": tower} if part_class is hf.AutoConfig else {}
            configs[part] = named | _known(hf.CONFIG_MAPPING[tower] if named else part_class, _TOWER)
    return Family(name, model_type, outcome, configs, {})


_COMPUTED_MASKS = "its layers compute with their masks"
_OTHERWISE = "is not what transformers' generate computes"
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_BETA = {**_YARN, "llama_4_scaling_beta": 0.1}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 24,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
_DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA4 = {**_EXPERTS, "intermediate_size_mlp": 128, "attention_chunk_size": 16, "no_rope_layers": [1, 0]}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
_WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_DEEPSEEK = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA3N = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
_TWELVE = {"hidden_size": 96, "num_attention_heads": 12}  # No power of two, so that products with slopes are rounded.
_BLOCK = {**_DECODER, **_WINDOWS, "query_pre_attn_scalar": 16}


def _families() -> Iterator[Family]:
    # fmt: off
    yield _decoder("Llama 2", "llama", PAGED)
    yield _decoder("Llama 3", "llama", PAGED, rope_parameters=_LLAMA3 | {"original_max_position_embeddings": 32})
    yield _decoder("Llama, dynamic scaling", "llama", PAGED, rope_parameters=_DYNAMIC, max_position_embeddings=24)
    yield _decoder("Llama, LongRoPE", "llama", PAGED, rope_parameters=_LONG)
    yield _decoder("Llama 4, text", "llama4_text", PAGED, **_LLAMA4, floor_scale=16, attn_scale=0.5)
    yield _decoder("Llama 4, text, untuned", "llama4_text", PAGED, **_LLAMA4, attn_temperature_tuning=False)
    yield _decoder("Qwen 2, Qwen 2.5", "qwen2", PAGED)
    yield _decoder("Qwen 2 with a window", "qwen2", PAGED, use_sliding_window=True, max_window_layers=1,
                   sliding_window=12)
    yield _decoder("Qwen 2 MoE", "qwen2_moe", PAGED, **_SHARED)
    yield _decoder("Qwen 3", "qwen3", PAGED)
    yield _decoder("Qwen 3, YaRN", "qwen3", PAGED, rope_parameters=_YARN)
    yield _decoder("Qwen 3 MoE", "qwen3_moe", PAGED, **_SHARED)
    yield _decoder("Qwen3-Next", "qwen3_next", HYBRID, **_SHARED, **_DELTA)
    yield _decoder("Qwen 3.5, text", "qwen3_5_text", HYBRID, **_DELTA)
    yield _decoder("Qwen 3.5 MoE, text", "qwen3_5_moe_text", HYBRID, **_SHARED, **_DELTA)
    yield _decoder("Gemma", "gemma", PAGED)
    yield _decoder("Gemma 2", "gemma2", PAGED, query_pre_attn_scalar=16, **_WINDOWS)
    yield _decoder("VaultGemma", "vaultgemma", PAGED, query_pre_attn_scalar=16, **_WINDOWS)
    yield _decoder("Gemma 3, text", "gemma3_text", PAGED, query_pre_attn_scalar=16, **_WINDOWS)
    yield _decoder("Gemma 3, LongRoPE", "gemma3_text", PAGED, query_pre_attn_scalar=16, **_WINDOWS,
                   rope_parameters=dict.fromkeys(_WINDOWS["layer_types"], _LONG))
    yield _decoder("Gemma 3n, text", "gemma3n_text", PAGED, **_GEMMA3N, num_hidden_layers=4, num_kv_shared_layers=2,
                   sliding_window=12, layer_types=["sliding_attention", "full_attention"] * 2)
    yield _decoder("Gemma 4, text", "gemma4_text", PAGED, **_GEMMA3N, **_WINDOWS, global_head_dim=32)
    yield _decoder("Gemma 4, shared keys", "gemma4_text", PAGED, **_GEMMA3N, num_hidden_layers=4,
                   num_kv_shared_layers=2, sliding_window=12, global_head_dim=32,
                   layer_types=["sliding_attention", "full_attention"] * 2)
    yield _decoder("Mistral", "mistral", PAGED, sliding_window=24)
    yield _decoder("Mixtral", "mixtral", PAGED, **_EXPERTS)
    yield _decoder("Ministral", "ministral", PAGED, **_WINDOWS)
    yield _decoder("Ministral 3, text", "ministral3", PAGED, rope_parameters=_BETA)
    yield _decoder("Mistral 4", "mistral4", PAGED, **_DEEPSEEK, rope_parameters=_BETA)
    yield _decoder("Phi, Phi 2", "phi", PAGED)
    yield _decoder("Phi 3, Phi 4", "phi3", PAGED)
    yield _decoder("Phi 3, Phi 4 mini: LongRoPE", "phi3", PAGED,
                   rope_parameters=_LONG, original_max_position_embeddings=24)
    yield _decoder("Phi 3.5 MoE", "phimoe", PAGED, **_EXPERTS, sliding_window=20,
                   rope_parameters={**_LONG, "short_mscale": 1.1, "long_mscale": 1.3})
    yield _decoder("GPT", "openai-gpt", CACHELESS)
    yield _decoder("GPT-2", "gpt2", PAGED)
    yield _decoder("GPT-J", "gptj", PAGED, rotary_dim=8)
    yield _decoder("GPT-Neo", "gpt_neo", PAGED, attention_types=[[["global", "local"], 1]], window_size=12)
    yield _decoder("GPT-NeoX, Pythia", "gpt_neox", PAGED)
    yield _decoder("GPTBigCode, StarCoder", "gpt_bigcode", PAGED)
    yield _decoder("GPT-OSS", "gpt_oss", PAGED, **_EXPERTS, **_WINDOWS)
    yield _decoder("OPT", "opt", PAGED, word_embed_proj_dim=64, ffn_dim=128)
    yield _decoder("BLOOM", "bloom", PAGED, tie_word_embeddings=False)
    yield _decoder("Falcon", "falcon", PAGED, num_kv_heads=2, new_decoder_architecture=True)
    yield _decoder("Falcon-H1", "falcon_h1", HYBRID, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=16)
    yield _decoder("Falcon Mamba", "falcon_mamba", HYBRID, state_size=8)
    yield _decoder("Falcon 7B", "falcon", PAGED)
    yield _decoder("Falcon RW", "falcon", PAGED, alibi=True, multi_query=False, bias=True, parallel_attn=False,
                   **_TWELVE)
    yield _decoder("MPT", "mpt", PAGED, **_TWELVE)
    yield _decoder("Persimmon", "persimmon", PAGED)
    yield _decoder("StableLM", "stablelm", PAGED)
    yield _decoder("OLMo", "olmo", PAGED)
    yield _decoder("OLMo 2", "olmo2", PAGED)
    yield _decoder("OLMo 3", "olmo3", PAGED, **_WINDOWS)
    yield _decoder("OLMoE", "olmoe", PAGED, **_EXPERTS)
    yield _decoder("Granite 3", "granite", PAGED)
    yield _decoder("Granite 3 MoE", "granitemoe", PAGED, **_EXPERTS)
    yield _decoder("Granite 4", "granitemoehybrid", HYBRID, **_EXPERTS, **_MAMBA, layer_types=["mamba", "attention"],
                   shared_intermediate_size=64)
    yield _decoder("DeepSeek V2", "deepseek_v2", PAGED, **_DEEPSEEK)
    yield _decoder("DeepSeek V3, R1, Kimi K2", "deepseek_v3", PAGED, **_DEEPSEEK)
    yield _decoder("DeepSeek V3.2", "deepseek_v32", ROW, reason=_COMPUTED_MASKS, **_DEEPSEEK, index_topk=8,
                   index_n_heads=2, index_head_dim=16)
    yield _decoder("GLM 4", "glm", PAGED)
    yield _decoder("GLM 4 0414", "glm4", PAGED)
    yield _decoder("GLM 4.5, GLM 4.6", "glm4_moe", PAGED, **_DEEPSEEK | {"n_group": 1, "head_dim": 16})
    yield _decoder("GLM 4.7 Flash", "glm4_moe_lite", PAGED, **_DEEPSEEK | {"n_group": 1})
    yield _decoder("SmolLM3", "smollm3", PAGED, no_rope_layers=[1, 0])
    yield _decoder("Command R", "cohere", PAGED)
    yield _decoder("Command R7B, Command A", "cohere2", PAGED, **_WINDOWS)
    yield _decoder("StarCoder2", "starcoder2", PAGED, sliding_window=24)
    yield _decoder("CodeGen", "codegen", PAGED, rotary_dim=8)
    yield _decoder("EXAONE 4", "exaone4", PAGED, **_WINDOWS)
    yield _decoder("ERNIE 4.5", "ernie4_5", PAGED)
    yield _decoder("Seed-OSS", "seed_oss", PAGED)
    yield _decoder("Hunyuan", "hunyuan_v1_dense", PAGED)
    yield _decoder("MiniCPM 3", "minicpm3", PAGED, **_LATENT, num_key_value_heads=4)
    yield _decoder("MiniMax", "minimax", HYBRID, **_EXPERTS, layer_types=["linear_attention", "full_attention"],
                   block_size=16)
    yield _decoder("MiniMax M2", "minimax_m2", PAGED, **_EXPERTS)
    yield _decoder("MiniMax M3, text", "minimax_m3_vl_text", ROW, reason="its attention is of another kind", **_EXPERTS,
                   index_block_size=48, index_topk_blocks=1, index_n_heads=2, index_head_dim=16,
                   layer_types=["full_attention", "minimax_m3_sparse"])
    yield _decoder("LongCat Flash", "longcat_flash", PAGED, **_LATENT, moe_topk=2, n_routed_experts=4,
                   zero_expert_num=2, expert_ffn_hidden_size=32, ffn_hidden_size=64, num_layers=2, head_dim=8,
                   num_key_value_heads=4)
    yield _decoder("LFM 2", "lfm2", HYBRID, layer_types=["conv", "full_attention"])
    yield _decoder("Doge", "doge", ROW, reason=_COMPUTED_MASKS, sliding_window=12)
    yield _decoder("Nemotron", "nemotron", PAGED)
    yield _decoder("Nemotron-H", "nemotron_h", HYBRID, layers_block_type=["mamba", "attention"], mamba_num_heads=8,
                   mamba_head_dim=16, ssm_state_size=16, n_groups=2)
    yield _decoder("Mamba", "mamba", HYBRID, state_size=8)
    yield _decoder("Mamba 2", "mamba2", HYBRID, state_size=8, num_heads=8, head_dim=16, n_groups=2)
    yield _decoder("Jamba", "jamba", HYBRID, **_EXPERTS, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8)
    yield _decoder("Bamba", "bamba", HYBRID, **_MAMBA, attn_layer_indices=[1])
    yield _decoder("Zamba 2", "zamba2", HYBRID, layers_block_type=["linear_attention", "hybrid"] * 2,
                   num_hidden_layers=4, mamba_d_state=16, mamba_ngroups=1, mamba_headdim=16, attention_head_dim=32,
                   num_mem_blocks=1, adapter_rank=8, num_key_value_heads=4)
    yield _decoder("RecurrentGemma", "recurrent_gemma", HYBRID, block_types=["recurrent", "attention"],
                   attention_window_size=12)
    yield _decoder("RWKV", "rwkv", ROW)
    yield _decoder("XLNet", "xlnet", _OTHERWISE, n_layer=2, d_model=64, n_head=4, d_inner=128)
    yield _decoder("Moshi, text", "moshi", PAGED)
    yield _decoder("Moshi, text, with a window", "moshi", _OTHERWISE, sliding_window=12)
    yield _decoder("BERT as a decoder", "bert", PAGED, is_decoder=True)
    yield _vision("Llama 4", "llama4", PAGED, {**_LLAMA4, "floor_scale": 16})
    yield _vision("Llama 3.2 Vision", "mllama", PAGED, {"cross_attention_layers": [1]})
    yield _vision("LLaVA", "llava", PAGED, {"model_type": "llama"})
    yield _vision("Qwen2-VL", "qwen2_vl", PAGED, _MROPE)
    yield _vision("Qwen2.5-VL", "qwen2_5_vl", PAGED, _MROPE)
    yield _vision("Qwen3-VL", "qwen3_vl", PAGED, {})
    yield _vision("Qwen3-VL MoE", "qwen3_vl_moe", PAGED, _SHARED)
    yield _vision("Qwen 3.5", "qwen3_5", HYBRID, _DELTA)
    yield _vision("Gemma 3", "gemma3", PAGED, {"query_pre_attn_scalar": 16, **_WINDOWS})
    yield _vision("Gemma 4", "gemma4", PAGED, {**_GEMMA3N, **_WINDOWS, "global_head_dim": 32})
    yield _vision("Mistral 3", "mistral3", PAGED, {"model_type": "mistral"}, "pixtral")
    yield _vision("Ministral 3", "mistral3", PAGED, {"model_type": "ministral3", "rope_parameters": _BETA}, "pixtral")
    yield _vision("InternVL 3", "internvl", PAGED, {"model_type": "qwen2"})
    yield _vision("SmolVLM, Idefics 3", "idefics3", PAGED, {"model_type": "llama"})
    yield _vision("PaliGemma", "paligemma", _OTHERWISE, {"model_type": "gemma"})
    yield _vision("GLM 4.1V", "glm4v", PAGED, _MROPE)
    yield _vision("Voxtral", "voxtral", PAGED, {"model_type": "llama"}, "voxtral_encoder")
    yield Family("T5", "t5", SEQ2SEQ, {}, _T5)
    yield Family("FLAN-T5", "t5", SEQ2SEQ, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, _T5)
    yield Family("mT5", "mt5", SEQ2SEQ, {}, _T5)
    yield Family("UMT5", "umt5", SEQ2SEQ, {}, _T5)
    yield Family("LongT5", "longt5", SEQ2SEQ, {}, _T5)
    yield Family("Switch Transformers", "switch_transformers", SEQ2SEQ, {"num_experts": 4}, _T5)
    yield Family("T5Gemma", "t5gemma", SEQ2SEQ, {"encoder": _BLOCK, "decoder": _BLOCK}, {})
    yield Family("BART", "bart", SEQ2SEQ, {}, _SEQ2SEQ)
    yield Family("mBART", "mbart", SEQ2SEQ, {}, _SEQ2SEQ)
    yield Family("Pegasus", "pegasus", SEQ2SEQ, {"scale_embedding": True}, _SEQ2SEQ)
    yield Family("BigBird-Pegasus", "bigbird_pegasus", "after a short text transformers leaves block-sparse attention",
                 {}, _SEQ2SEQ)
    yield Family("Marian", "marian", SEQ2SEQ, {"scale_embedding": True, "decoder_layers": 4}, _SEQ2SEQ)
    yield Family("M2M, NLLB", "m2m_100", SEQ2SEQ, {}, _SEQ2SEQ)
    yield Family("NLLB MoE", "nllb-moe", SEQ2SEQ, {"num_experts": 4}, _SEQ2SEQ)
    # With two layers one answer has a tie, which rounding decides.
    yield Family("Blenderbot", "blenderbot", SEQ2SEQ, {"decoder_layers": 3}, _SEQ2SEQ)
    yield Family("LED", "led", ROW, {"attention_window": 16, "max_encoder_position_embeddings": 256,
                 "max_decoder_position_embeddings": 256}, _SEQ2SEQ)
    yield Family("ProphetNet", "prophetnet", ROW, {"num_encoder_layers": 2, "num_decoder_layers": 2, "hidden_size": 64,
                 "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}, _SEQ2SEQ)
    yield Family("Whisper", "whisper", "is not an architecture that generates text", {"num_mel_bins": 8}, _SEQ2SEQ,
                 architecture="WhisperForConditionalGeneration")
    # fmt: on


FAMILIES = tuple(_families())
