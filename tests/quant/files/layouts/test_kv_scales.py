"""Names of the scales of a quantized KV cache."""

from fulgurite.quant import find_kv_scales, is_unused_attention_scale


def test_names_of_all_projects():
    names = [
        "a.0.self_attn.k_proj.k_scale", "a.0.self_attn.v_proj.v_scale",
        "a.1.self_attn.k_scale", "a.1.self_attn.v_scale",
        "a.2.self_attn.attn.k_scale", "a.2.self_attn.attn.v_scale",
        "a.3.self_attn.kv_scale",
        "a.4.self_attn.k_proj.output_scale", "a.4.self_attn.v_proj.output_scale",
        "a.5.attn.k_scale", "a.5.attn.v_scale",
        "a.6.self_attn.k_scale",
        "a.7.self_attn.q_proj.weight_scale", "a.7.mlp.up_proj.input_scale",
    ]  # fmt: skip
    found = {module: tuple(scales) for module, scales in find_kv_scales(names).items()}
    assert found == {
        "a.0.self_attn": (names[0], names[1]),
        "a.1.self_attn": (names[2], names[3]),
        "a.2.self_attn": (names[4], names[5]),
        "a.3.self_attn": (names[6], names[6]),
        "a.4.self_attn": (names[7], names[8]),
        "a.5.attn": (names[9], names[10]),
    }


def test_unused_scales():
    assert is_unused_attention_scale("a.0.self_attn.q_scale")
    assert is_unused_attention_scale("a.0.self_attn.k_proj.k_bias")
    assert not is_unused_attention_scale("a.0.self_attn.k_scale")
