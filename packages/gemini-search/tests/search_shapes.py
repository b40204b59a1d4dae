"""Parameter shapes of well-known models, written out from their configurations: name -> number of elements."""

from __future__ import annotations


def _linear(sizes: dict[str, int], name: str, inputs: int, outputs: int, *, bias: bool) -> None:
    sizes[f"{name}.weight"] = inputs * outputs
    if bias:
        sizes[f"{name}.bias"] = outputs


def _layer_norm(sizes: dict[str, int], name: str, width: int) -> None:
    sizes[f"{name}.weight"] = width
    sizes[f"{name}.bias"] = width


def gpt2(*, layers: int, width: int, vocabulary: int = 50257, positions: int = 1024) -> dict[str, int]:
    sizes = {"wte.weight": vocabulary * width, "wpe.weight": positions * width}
    for layer in range(layers):
        block = f"h.{layer}"
        _layer_norm(sizes, f"{block}.ln_1", width)
        _linear(sizes, f"{block}.attn.c_attn", width, 3 * width, bias=True)
        _linear(sizes, f"{block}.attn.c_proj", width, width, bias=True)
        _layer_norm(sizes, f"{block}.ln_2", width)
        _linear(sizes, f"{block}.mlp.c_fc", width, 4 * width, bias=True)
        _linear(sizes, f"{block}.mlp.c_proj", 4 * width, width, bias=True)
    _layer_norm(sizes, "ln_f", width)
    return sizes


def opt(*, layers: int, width: int) -> dict[str, int]:
    sizes = {"embed_tokens.weight": 50272 * width, "embed_positions.weight": 2050 * width}
    _layer_norm(sizes, "final_layer_norm", width)
    for layer in range(layers):
        block = f"layers.{layer}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            _linear(sizes, f"{block}.self_attn.{projection}", width, width, bias=True)
        _layer_norm(sizes, f"{block}.self_attn_layer_norm", width)
        _linear(sizes, f"{block}.fc1", width, 4 * width, bias=True)
        _linear(sizes, f"{block}.fc2", 4 * width, width, bias=True)
        _layer_norm(sizes, f"{block}.final_layer_norm", width)
    return sizes


def llama(
    *, layers: int, width: int, inner: int, key_value: int | None = None, vocabulary: int = 32000
) -> dict[str, int]:
    key_value = key_value or width
    sizes = {"embed_tokens.weight": vocabulary * width}
    for layer in range(layers):
        block = f"layers.{layer}"
        for projection, outputs in (("q", width), ("k", key_value), ("v", key_value), ("o", width)):
            sizes[f"{block}.self_attn.{projection}_proj.weight"] = width * outputs
        for projection in ("gate", "up", "down"):
            sizes[f"{block}.mlp.{projection}_proj.weight"] = width * inner
        sizes[f"{block}.input_layernorm.weight"] = width
        sizes[f"{block}.post_attention_layernorm.weight"] = width
    sizes["norm.weight"] = width
    sizes["lm_head.weight"] = vocabulary * width
    return sizes


def mixtral(*, fused_experts: bool) -> dict[str, int]:
    width, inner, experts = 4096, 14336, 8
    sizes = {"embed_tokens.weight": 32000 * width}
    for layer in range(32):
        block = f"layers.{layer}"
        for projection, outputs in (("q", width), ("k", 1024), ("v", 1024), ("o", width)):
            sizes[f"{block}.self_attn.{projection}_proj.weight"] = width * outputs
        sizes[f"{block}.gate.weight"] = width * experts
        if fused_experts:
            sizes[f"{block}.experts.gate_up_proj"] = experts * 2 * inner * width
            sizes[f"{block}.experts.down_proj"] = experts * inner * width
        else:
            for expert in range(experts):
                for projection in ("w1", "w2", "w3"):
                    sizes[f"{block}.experts.{expert}.{projection}.weight"] = width * inner
        sizes[f"{block}.input_layernorm.weight"] = width
        sizes[f"{block}.post_attention_layernorm.weight"] = width
    sizes["norm.weight"] = width
    sizes["lm_head.weight"] = 32000 * width
    return sizes


def t5_xl() -> dict[str, int]:
    width, inner, attention = 2048, 5120, 32 * 64
    sizes = {"shared.weight": 32128 * width}
    for side in ("encoder", "decoder"):
        for layer in range(24):
            block = f"{side}.block.{layer}"
            for attention_name in ("SelfAttention", "EncDecAttention")[: 1 if side == "encoder" else 2]:
                for projection in "qkvo":
                    sizes[f"{block}.{attention_name}.{projection}.weight"] = width * attention
                if attention_name == "SelfAttention" and layer == 0:
                    sizes[f"{block}.{attention_name}.relative_attention_bias.weight"] = 32 * 32
                sizes[f"{block}.{attention_name}.layer_norm.weight"] = width
            for projection in ("wi_0", "wi_1", "wo"):
                sizes[f"{block}.DenseReluDense.{projection}.weight"] = width * inner
            sizes[f"{block}.DenseReluDense.layer_norm.weight"] = width
        sizes[f"{side}.final_layer_norm.weight"] = width
    sizes["lm_head.weight"] = 32128 * width
    return sizes


def vit_large() -> dict[str, int]:
    width = 1024
    sizes = {"cls_token": width, "position_embeddings": 197 * width}
    _linear(sizes, "patch_embeddings", 3 * 16 * 16, width, bias=True)
    for layer in range(24):
        block = f"encoder.layer.{layer}"
        for projection in ("query", "key", "value", "output"):
            _linear(sizes, f"{block}.attention.{projection}", width, width, bias=True)
        _linear(sizes, f"{block}.intermediate", width, 4 * width, bias=True)
        _linear(sizes, f"{block}.output", 4 * width, width, bias=True)
        _layer_norm(sizes, f"{block}.layernorm_before", width)
        _layer_norm(sizes, f"{block}.layernorm_after", width)
    _layer_norm(sizes, "layernorm", width)
    _linear(sizes, "classifier", width, 1000, bias=True)
    return sizes


def whisper_large() -> dict[str, int]:
    width = 1280
    sizes: dict[str, int] = {}
    _linear(sizes, "encoder.conv1", 80 * 3, width, bias=True)
    _linear(sizes, "encoder.conv2", width * 3, width, bias=True)
    sizes["encoder.embed_positions.weight"] = 1500 * width
    for side in ("encoder", "decoder"):
        if side == "decoder":
            sizes["decoder.embed_tokens.weight"] = 51865 * width
            sizes["decoder.embed_positions.weight"] = 448 * width
        for layer in range(32):
            block = f"{side}.layers.{layer}"
            for attention in ("self_attn", "encoder_attn")[: 1 if side == "encoder" else 2]:
                for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    has_bias = projection != "k_proj"
                    _linear(sizes, f"{block}.{attention}.{projection}", width, width, bias=has_bias)
                _layer_norm(sizes, f"{block}.{attention}_layer_norm", width)
            _linear(sizes, f"{block}.fc1", width, 4 * width, bias=True)
            _linear(sizes, f"{block}.fc2", 4 * width, width, bias=True)
            _layer_norm(sizes, f"{block}.final_layer_norm", width)
        _layer_norm(sizes, f"{side}.layer_norm", width)
    return sizes


MODELS = {
    "GPT-2 XL": gpt2(layers=48, width=1600),
    "OPT-6.7B": opt(layers=32, width=4096),
    "Llama-2 7B": llama(layers=32, width=4096, inner=11008),
    "Llama-2 13B": llama(layers=40, width=5120, inner=13824),
    "Llama-2 70B": llama(layers=80, width=8192, inner=28672, key_value=1024),
    "Llama-3 8B": llama(layers=32, width=4096, inner=14336, key_value=1024, vocabulary=128256),
    "Mixtral 8x7B": mixtral(fused_experts=False),
    "Mixtral 8x7B, fused experts": mixtral(fused_experts=True),
    "T5-XL": t5_xl(),
    "ViT-L": vit_large(),
    "Whisper-large": whisper_large(),
}
