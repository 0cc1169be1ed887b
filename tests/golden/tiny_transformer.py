# inference 0 · final
import fulgurite
import fulgurite.kernels.conv.direct
import torch

@fulgurite.region('frozen')
def packed_weights(
    layers_0_attention_qkv_proj_weight: "f32[192, 64]",
    layers_0_attention_o_proj_weight: "f32[64, 64]",
    layers_0_feed_forward_gate_proj_weight: "f32[160, 64]",
    layers_0_feed_forward_up_proj_weight: "f32[160, 64]",
    layers_0_feed_forward_down_proj_weight: "f32[64, 160]",
    layers_1_attention_qkv_proj_weight: "f32[192, 64]",
    layers_1_attention_o_proj_weight: "f32[64, 64]",
    layers_1_feed_forward_gate_proj_weight: "f32[160, 64]",
    layers_1_feed_forward_up_proj_weight: "f32[160, 64]",
    layers_1_feed_forward_down_proj_weight: "f32[64, 160]",
    lm_head_weight: "f32[256, 64]",
):
    pack_weight_default = torch.ops.fulgurite.pack_weight.default(layers_0_attention_qkv_proj_weight, 1); del layers_0_attention_qkv_proj_weight
    pack_weight_default_1 = torch.ops.fulgurite.pack_weight.default(layers_0_attention_o_proj_weight, 1); del layers_0_attention_o_proj_weight
    pack_weight_default_2 = torch.ops.fulgurite.pack_weight.default(layers_0_feed_forward_gate_proj_weight, 1); del layers_0_feed_forward_gate_proj_weight
    pack_weight_default_3 = torch.ops.fulgurite.pack_weight.default(layers_0_feed_forward_up_proj_weight, 1); del layers_0_feed_forward_up_proj_weight
    pack_weight_default_4 = torch.ops.fulgurite.pack_weight.default(layers_0_feed_forward_down_proj_weight, 1); del layers_0_feed_forward_down_proj_weight
    pack_weight_default_5 = torch.ops.fulgurite.pack_weight.default(layers_1_attention_qkv_proj_weight, 1); del layers_1_attention_qkv_proj_weight
    pack_weight_default_6 = torch.ops.fulgurite.pack_weight.default(layers_1_attention_o_proj_weight, 1); del layers_1_attention_o_proj_weight
    pack_weight_default_7 = torch.ops.fulgurite.pack_weight.default(layers_1_feed_forward_gate_proj_weight, 1); del layers_1_feed_forward_gate_proj_weight
    pack_weight_default_8 = torch.ops.fulgurite.pack_weight.default(layers_1_feed_forward_up_proj_weight, 1); del layers_1_feed_forward_up_proj_weight
    pack_weight_default_9 = torch.ops.fulgurite.pack_weight.default(layers_1_feed_forward_down_proj_weight, 1); del layers_1_feed_forward_down_proj_weight
    pack_weight_default_10 = torch.ops.fulgurite.pack_weight.default(lm_head_weight, 1); del lm_head_weight
    return (
        pack_weight_default, pack_weight_default_1, pack_weight_default_2, pack_weight_default_3,
        pack_weight_default_4, pack_weight_default_5, pack_weight_default_6, pack_weight_default_7,
        pack_weight_default_8, pack_weight_default_9, pack_weight_default_10,
    )

@fulgurite.region('fuser')
def embedding_pow_0(
    embed_tokens_weight: "f32[256, 64]",
    tokens_bt: "i64[2, 32]",
    layers_0_attention_norm_weight: "f32[64]",
):
    # self.embed_tokens         tiny.py:96          x = self.embed_tokens(tokens_BT)
    x = torch.ops.aten.embedding.default(embed_tokens_weight, tokens_bt); del embed_tokens_weight, tokens_bt  # fuser   80.5 KiB
    # self.layers.0.attention_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square = torch.ops.aten.pow.Tensor_Scalar(x, 2)                   # fuser   32.0 KiB
    mean = torch.ops.aten.mean.dim(square, [-1], True); del square    # fuser   16.2 KiB
    add = torch.ops.aten.add.Tensor(mean, 1e-06); del mean            # fuser   512 B
    scale = torch.ops.aten.rsqrt.default(add); del add                # fuser   512 B
    # self.layers.0.attention_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_21 = torch.ops.aten.mul.Tensor(x, scale); del scale           # fuser   32.2 KiB
    mul_22 = torch.ops.aten.mul.Tensor(mul_21, layers_0_attention_norm_weight); del mul_21, layers_0_attention_norm_weight  # fuser   32.2 KiB
    # self.layers.0.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    view_1 = torch.ops.aten.view.default(mul_22, [64, 64]); del mul_22  # fuser   view
    return (x, view_1)

@fulgurite.region('fuser')
def arange_repeat_1(folded_0: "f32[8]", mm: "f32[64, 192]"):
    #                           tiny.py:91          position = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    position = torch.ops.aten.arange.default(32, device=torch.device('cpu'), pin_memory=False)  # fuser   256 B
    #                           tiny.py:92          angle = torch.outer(position, 10_000.0**-channel).repeat(1, 2)
    view = torch.ops.aten.view.default(position, [32, 1]); del position  # fuser   view
    outer = torch.ops.aten.mul.Tensor(view, folded_0); del view, folded_0  # fuser   1.3 KiB
    angle = torch.ops.aten.repeat.default(outer, [1, 2]); del outer   # fuser   3.0 KiB
    #                           tiny.py:93          return angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)
    cos = torch.ops.aten.cos.default(angle)                           # fuser   4.0 KiB
    sin = torch.ops.aten.sin.default(angle); del angle                # fuser   4.0 KiB
    # self.layers.0.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    linear = torch.ops.aten._unsafe_view.default(mm, [2, 32, 192]); del mm  # fuser   view
    # self.layers.0.attention   tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    qkv = torch.ops.aten.view.default(linear, [2, 32, 3, 4, 16]); del linear  # fuser   view
    # self.layers.0.attention   tiny.py:41          q, k, v = qkv.permute(2, 0, 3, 1, 4)
    permute = torch.ops.aten.permute.default(qkv, [2, 0, 3, 1, 4]); del qkv  # fuser   view
    q = torch.ops.aten.select.int(permute, 0, 0)                      # fuser   view
    k = torch.ops.aten.select.int(permute, 0, 1)                      # fuser   view
    v = torch.ops.aten.select.int(permute, 0, 2); del permute         # fuser   view
    # self.layers.0.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem, getitem_1 = torch.ops.aten.split.Tensor(q, 8, -1)        # fuser   view
    # self.layers.0.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_23 = torch.ops.aten.mul.Tensor(q, cos); del q                 # fuser   34.0 KiB
    neg_1 = torch.ops.aten.neg.default(getitem_1); del getitem_1      # fuser   16.0 KiB
    cat = torch.ops.aten.cat.default([neg_1, getitem], -1); del neg_1, getitem  # fuser   32.0 KiB
    mul_24 = torch.ops.aten.mul.Tensor(cat, sin); del cat             # fuser   34.0 KiB
    q_1 = torch.ops.aten.add.Tensor(mul_23, mul_24); del mul_23, mul_24  # fuser   48.0 KiB
    # self.layers.0.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_2, getitem_3 = torch.ops.aten.split.Tensor(k, 8, -1)      # fuser   view
    # self.layers.0.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_25 = torch.ops.aten.mul.Tensor(k, cos); del k                 # fuser   34.0 KiB
    neg_2 = torch.ops.aten.neg.default(getitem_3); del getitem_3      # fuser   16.0 KiB
    cat_1 = torch.ops.aten.cat.default([neg_2, getitem_2], -1); del neg_2, getitem_2  # fuser   32.0 KiB
    mul_26 = torch.ops.aten.mul.Tensor(cat_1, sin); del cat_1         # fuser   34.0 KiB
    k_1 = torch.ops.aten.add.Tensor(mul_25, mul_26); del mul_25, mul_26  # fuser   48.0 KiB
    return (cos, sin, v, q_1, k_1)

folded_0_1 = torch.tensor([1.0, 0.3162277638912201, 0.10000000149011612, 0.03162277489900589, 0.009999999776482582, 0.003162277629598975, 0.0010000000474974513, 0.0003162277571391314], dtype=torch.float32)

@fulgurite.region('fuser')
def pow_rsqrt_2(
    mm_1: "f32[64, 64]",
    x: "f32[2, 32, 64]",
    layers_0_feed_forward_norm_weight: "f32[64]",
):
    # self.layers.0.attention.o_proj  tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    linear_1 = torch.ops.aten._unsafe_view.default(mm_1, [2, 32, 64]); del mm_1  # fuser   view
    # self.layers.0             tiny.py:67          x = x + self.attention(self.attention_norm(x), cos, sin)
    x_1 = torch.ops.aten.add.Tensor(x, linear_1); del x, linear_1     # fuser   48.0 KiB
    # self.layers.0.feed_forward_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_1 = torch.ops.aten.pow.Tensor_Scalar(x_1, 2)               # fuser   32.0 KiB
    mean_1 = torch.ops.aten.mean.dim(square_1, [-1], True); del square_1  # fuser   16.2 KiB
    add_4 = torch.ops.aten.add.Tensor(mean_1, 1e-06); del mean_1      # fuser   512 B
    scale_1 = torch.ops.aten.rsqrt.default(add_4); del add_4          # fuser   512 B
    # self.layers.0.feed_forward_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_27 = torch.ops.aten.mul.Tensor(x_1, scale_1); del scale_1     # fuser   32.2 KiB
    mul_28 = torch.ops.aten.mul.Tensor(mul_27, layers_0_feed_forward_norm_weight); del mul_27, layers_0_feed_forward_norm_weight  # fuser   32.2 KiB
    # self.layers.0.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_5 = torch.ops.aten.view.default(mul_28, [64, 64]); del mul_28  # fuser   view
    return (x_1, view_5)

@fulgurite.region('fuser')
def mul_3(mm_2: "f32[64, 160]", mm_3: "f32[64, 160]"):
    # self.layers.0.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    silu = torch.ops.aten._unsafe_view.default(mm_2, [2, 32, 160]); del mm_2  # fuser   view
    # self.layers.0.feed_forward.up_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    linear_3 = torch.ops.aten._unsafe_view.default(mm_3, [2, 32, 160]); del mm_3  # fuser   view
    # self.layers.0.feed_forward  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mul_29 = torch.ops.aten.mul.Tensor(silu, linear_3); del silu, linear_3  # fuser   120.0 KiB
    # self.layers.0.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_7 = torch.ops.aten.view.default(mul_29, [64, 160]); del mul_29  # fuser   view
    return (view_7,)

@fulgurite.region('fuser')
def pow_rsqrt_4(
    mm_4: "f32[64, 64]",
    x_1: "f32[2, 32, 64]",
    layers_1_attention_norm_weight: "f32[64]",
):
    # self.layers.0.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    linear_4 = torch.ops.aten._unsafe_view.default(mm_4, [2, 32, 64]); del mm_4  # fuser   view
    # self.layers.0             tiny.py:68          return x + self.feed_forward(self.feed_forward_norm(x))
    x_2 = torch.ops.aten.add.Tensor(x_1, linear_4); del x_1, linear_4  # fuser   48.0 KiB
    # self.layers.1.attention_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_2 = torch.ops.aten.pow.Tensor_Scalar(x_2, 2)               # fuser   32.0 KiB
    mean_2 = torch.ops.aten.mean.dim(square_2, [-1], True); del square_2  # fuser   16.2 KiB
    add_6 = torch.ops.aten.add.Tensor(mean_2, 1e-06); del mean_2      # fuser   512 B
    scale_2 = torch.ops.aten.rsqrt.default(add_6); del add_6          # fuser   512 B
    # self.layers.1.attention_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_30 = torch.ops.aten.mul.Tensor(x_2, scale_2); del scale_2     # fuser   32.2 KiB
    mul_31 = torch.ops.aten.mul.Tensor(mul_30, layers_1_attention_norm_weight); del mul_30, layers_1_attention_norm_weight  # fuser   32.2 KiB
    # self.layers.1.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    view_8 = torch.ops.aten.view.default(mul_31, [64, 64]); del mul_31  # fuser   view
    return (x_2, view_8)

@fulgurite.region('fuser')
def cat_5(mm_5: "f32[64, 192]", cos: "f32[32, 16]", sin: "f32[32, 16]"):
    # self.layers.1.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    linear_5 = torch.ops.aten._unsafe_view.default(mm_5, [2, 32, 192]); del mm_5  # fuser   view
    # self.layers.1.attention   tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    qkv_1 = torch.ops.aten.view.default(linear_5, [2, 32, 3, 4, 16]); del linear_5  # fuser   view
    # self.layers.1.attention   tiny.py:41          q, k, v = qkv.permute(2, 0, 3, 1, 4)
    permute_1 = torch.ops.aten.permute.default(qkv_1, [2, 0, 3, 1, 4]); del qkv_1  # fuser   view
    q_2 = torch.ops.aten.select.int(permute_1, 0, 0)                  # fuser   view
    k_2 = torch.ops.aten.select.int(permute_1, 0, 1)                  # fuser   view
    v_1 = torch.ops.aten.select.int(permute_1, 0, 2); del permute_1   # fuser   view
    # self.layers.1.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_6, getitem_7 = torch.ops.aten.split.Tensor(q_2, 8, -1)    # fuser   view
    # self.layers.1.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_32 = torch.ops.aten.mul.Tensor(q_2, cos); del q_2             # fuser   34.0 KiB
    neg_3 = torch.ops.aten.neg.default(getitem_7); del getitem_7      # fuser   16.0 KiB
    cat_2 = torch.ops.aten.cat.default([neg_3, getitem_6], -1); del neg_3, getitem_6  # fuser   32.0 KiB
    mul_33 = torch.ops.aten.mul.Tensor(cat_2, sin); del cat_2         # fuser   34.0 KiB
    q_3 = torch.ops.aten.add.Tensor(mul_32, mul_33); del mul_32, mul_33  # fuser   48.0 KiB
    # self.layers.1.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_8, getitem_9 = torch.ops.aten.split.Tensor(k_2, 8, -1)    # fuser   view
    # self.layers.1.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_34 = torch.ops.aten.mul.Tensor(k_2, cos); del cos, k_2        # fuser   34.0 KiB
    neg_4 = torch.ops.aten.neg.default(getitem_9); del getitem_9      # fuser   16.0 KiB
    cat_3 = torch.ops.aten.cat.default([neg_4, getitem_8], -1); del neg_4, getitem_8  # fuser   32.0 KiB
    mul_35 = torch.ops.aten.mul.Tensor(cat_3, sin); del sin, cat_3    # fuser   34.0 KiB
    k_3 = torch.ops.aten.add.Tensor(mul_34, mul_35); del mul_34, mul_35  # fuser   48.0 KiB
    return (v_1, q_3, k_3)

@fulgurite.region('fuser')
def pow_rsqrt_6(
    mm_6: "f32[64, 64]",
    x_2: "f32[2, 32, 64]",
    layers_1_feed_forward_norm_weight: "f32[64]",
):
    # self.layers.1.attention.o_proj  tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    linear_6 = torch.ops.aten._unsafe_view.default(mm_6, [2, 32, 64]); del mm_6  # fuser   view
    # self.layers.1             tiny.py:67          x = x + self.attention(self.attention_norm(x), cos, sin)
    x_3 = torch.ops.aten.add.Tensor(x_2, linear_6); del x_2, linear_6  # fuser   48.0 KiB
    # self.layers.1.feed_forward_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_3 = torch.ops.aten.pow.Tensor_Scalar(x_3, 2)               # fuser   32.0 KiB
    mean_3 = torch.ops.aten.mean.dim(square_3, [-1], True); del square_3  # fuser   16.2 KiB
    add_10 = torch.ops.aten.add.Tensor(mean_3, 1e-06); del mean_3     # fuser   512 B
    scale_3 = torch.ops.aten.rsqrt.default(add_10); del add_10        # fuser   512 B
    # self.layers.1.feed_forward_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_36 = torch.ops.aten.mul.Tensor(x_3, scale_3); del scale_3     # fuser   32.2 KiB
    mul_37 = torch.ops.aten.mul.Tensor(mul_36, layers_1_feed_forward_norm_weight); del mul_36, layers_1_feed_forward_norm_weight  # fuser   32.2 KiB
    # self.layers.1.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_12 = torch.ops.aten.view.default(mul_37, [64, 64]); del mul_37  # fuser   view
    return (x_3, view_12)

@fulgurite.region('fuser')
def mul_7(mm_7: "f32[64, 160]", mm_8: "f32[64, 160]"):
    # self.layers.1.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    silu_1 = torch.ops.aten._unsafe_view.default(mm_7, [2, 32, 160]); del mm_7  # fuser   view
    # self.layers.1.feed_forward.up_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    linear_8 = torch.ops.aten._unsafe_view.default(mm_8, [2, 32, 160]); del mm_8  # fuser   view
    # self.layers.1.feed_forward  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mul_38 = torch.ops.aten.mul.Tensor(silu_1, linear_8); del silu_1, linear_8  # fuser   120.0 KiB
    # self.layers.1.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_14 = torch.ops.aten.view.default(mul_38, [64, 160]); del mul_38  # fuser   view
    return (view_14,)

@fulgurite.region('fuser')
def pow_rsqrt_8(mm_9: "f32[64, 64]", x_3: "f32[2, 32, 64]", norm_weight: "f32[64]"):
    # self.layers.1.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    linear_9 = torch.ops.aten._unsafe_view.default(mm_9, [2, 32, 64]); del mm_9  # fuser   view
    # self.layers.1             tiny.py:68          return x + self.feed_forward(self.feed_forward_norm(x))
    x_4 = torch.ops.aten.add.Tensor(x_3, linear_9); del x_3, linear_9  # fuser   48.0 KiB
    # self.norm                 tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_4 = torch.ops.aten.pow.Tensor_Scalar(x_4, 2)               # fuser   32.0 KiB
    mean_4 = torch.ops.aten.mean.dim(square_4, [-1], True); del square_4  # fuser   16.2 KiB
    add_12 = torch.ops.aten.add.Tensor(mean_4, 1e-06); del mean_4     # fuser   512 B
    scale_4 = torch.ops.aten.rsqrt.default(add_12); del add_12        # fuser   512 B
    # self.norm                 tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_39 = torch.ops.aten.mul.Tensor(x_4, scale_4); del x_4, scale_4  # fuser   32.2 KiB
    mul_40 = torch.ops.aten.mul.Tensor(mul_39, norm_weight); del mul_39, norm_weight  # fuser   32.2 KiB
    # self.lm_head              tiny.py:100         logits = self.lm_head(self.norm(x))
    view_15 = torch.ops.aten.view.default(mul_40, [64, 64]); del mul_40  # fuser   view
    return (view_15,)

@fulgurite.region('fuser')
def log_softmax_nll_loss_forward_9(mm_10: "f32[64, 256]", tokens_bt: "i64[2, 32]"):
    # self.lm_head              tiny.py:100         logits = self.lm_head(self.norm(x))
    logits = torch.ops.aten._unsafe_view.default(mm_10, [2, 32, 256]); del mm_10  # fuser   view
    #                           tiny.py:101         return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    getitem_14 = torch.ops.aten.slice.Tensor(logits, 1, 0, -1); del logits  # fuser   view
    clone = torch.ops.aten.clone.default(getitem_14, memory_format=torch.contiguous_format); del getitem_14  # fuser   124.0 KiB
    flatten_2 = torch.ops.aten._unsafe_view.default(clone, [62, 256]); del clone  # fuser   view
    getitem_15 = torch.ops.aten.slice.Tensor(tokens_bt, 1, 1, 9223372036854775807); del tokens_bt  # fuser   view
    clone_1 = torch.ops.aten.clone.default(getitem_15, memory_format=torch.contiguous_format); del getitem_15  # fuser   992 B
    flatten_3 = torch.ops.aten._unsafe_view.default(clone_1, [62]); del clone_1  # fuser   view
    amax = torch.ops.aten.amax.default(flatten_2, [1], True)          # fuser   62.2 KiB
    sub = torch.ops.aten.sub.Tensor(flatten_2, amax); del flatten_2, amax  # fuser   124.2 KiB
    exp = torch.ops.aten.exp.default(sub)                             # fuser   124.0 KiB
    sum_1 = torch.ops.aten.sum.dim_IntList(exp, [1], True); del exp   # fuser   62.2 KiB
    log = torch.ops.aten.log.default(sum_1); del sum_1                # fuser   496 B
    sub_1 = torch.ops.aten.sub.Tensor(sub, log); del sub, log         # fuser   124.2 KiB
    ne = torch.ops.aten.ne.Scalar(flatten_3, -100)                    # fuser   558 B
    scalar_tensor = torch.ops.aten.scalar_tensor.default(0, dtype=torch.int64, layout=torch.strided, device=torch.device('cpu'))  # fuser   8 B
    where = torch.ops.aten.where.self(ne, flatten_3, scalar_tensor); del ne, scalar_tensor  # fuser   1.0 KiB
    unsqueeze = torch.ops.aten.unsqueeze.default(where, 1); del where  # fuser   view
    gather = torch.ops.aten.gather.default(sub_1, 1, unsqueeze); del sub_1, unsqueeze  # fuser   62.7 KiB
    squeeze = torch.ops.aten.squeeze.dim(gather, 1); del gather       # fuser   view
    neg = torch.ops.aten.neg.default(squeeze); del squeeze            # fuser   496 B
    ne_1 = torch.ops.aten.ne.Scalar(flatten_3, -100)                  # fuser   558 B
    scalar_tensor_1 = torch.ops.aten.scalar_tensor.default(0, dtype=torch.float32, layout=torch.strided, device=torch.device('cpu'))  # fuser   4 B
    where_1 = torch.ops.aten.where.self(ne_1, neg, scalar_tensor_1); del ne_1, neg, scalar_tensor_1  # fuser   562 B
    ne_2 = torch.ops.aten.ne.Scalar(flatten_3, -100); del flatten_3   # fuser   558 B
    sum_2 = torch.ops.aten.sum.default(ne_2); del ne_2                # fuser   70 B
    _to_copy = torch.ops.aten._to_copy.default(sum_2, dtype=torch.float32, device=torch.device('cpu')); del sum_2  # fuser   12 B
    sum_3 = torch.ops.aten.sum.default(where_1); del where_1          # fuser   252 B
    div = torch.ops.aten.div.Tensor(sum_3, _to_copy); del sum_3, _to_copy  # fuser   12 B
    return (div,)

def forward(
    embed_tokens_weight: "f32[256, 64]",
    tokens_bt: "i64[2, 32]",
    layers_0_attention_norm_weight: "f32[64]",
    layers_0_attention_qkv_proj_weight: "f32[192, 64]",
    layers_0_attention_o_proj_weight: "f32[64, 64]",
    layers_0_feed_forward_norm_weight: "f32[64]",
    layers_0_feed_forward_gate_proj_weight: "f32[160, 64]",
    layers_0_feed_forward_up_proj_weight: "f32[160, 64]",
    layers_0_feed_forward_down_proj_weight: "f32[64, 160]",
    layers_1_attention_norm_weight: "f32[64]",
    layers_1_attention_qkv_proj_weight: "f32[192, 64]",
    layers_1_attention_o_proj_weight: "f32[64, 64]",
    layers_1_feed_forward_norm_weight: "f32[64]",
    layers_1_feed_forward_gate_proj_weight: "f32[160, 64]",
    layers_1_feed_forward_up_proj_weight: "f32[160, 64]",
    layers_1_feed_forward_down_proj_weight: "f32[64, 160]",
    norm_weight: "f32[64]",
    lm_head_weight: "f32[256, 64]",
):
    layers_0_attention_qkv_proj_packed_weight, layers_0_attention_o_proj_packed_weight, layers_0_feed_forward_gate_proj_packed_weight, layers_0_feed_forward_up_proj_packed_weight, layers_0_feed_forward_down_proj_packed_weight, layers_1_attention_qkv_proj_packed_weight, layers_1_attention_o_proj_packed_weight, layers_1_feed_forward_gate_proj_packed_weight, layers_1_feed_forward_up_proj_packed_weight, layers_1_feed_forward_down_proj_packed_weight, lm_head_packed_weight = packed_weights(layers_0_attention_qkv_proj_weight, layers_0_attention_o_proj_weight, layers_0_feed_forward_gate_proj_weight, layers_0_feed_forward_up_proj_weight, layers_0_feed_forward_down_proj_weight, layers_1_attention_qkv_proj_weight, layers_1_attention_o_proj_weight, layers_1_feed_forward_gate_proj_weight, layers_1_feed_forward_up_proj_weight, layers_1_feed_forward_down_proj_weight, lm_head_weight); del layers_0_attention_qkv_proj_weight, layers_0_attention_o_proj_weight, layers_0_feed_forward_gate_proj_weight, layers_0_feed_forward_up_proj_weight, layers_0_feed_forward_down_proj_weight, layers_1_attention_qkv_proj_weight, layers_1_attention_o_proj_weight, layers_1_feed_forward_gate_proj_weight, layers_1_feed_forward_up_proj_weight, layers_1_feed_forward_down_proj_weight, lm_head_weight  # torch   11 weights packed once   432.0 KiB
    # self.embed_tokens         tiny.py:96          x = self.embed_tokens(tokens_BT)
    x, view_1 = embedding_pow_0(embed_tokens_weight, tokens_bt, layers_0_attention_norm_weight); del embed_tokens_weight, layers_0_attention_norm_weight  # fuser   7 ops   96.8 KiB
    # self.layers.0.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    mm = fulgurite.kernels.conv.direct.packed_linear(view_1, layers_0_attention_qkv_proj_packed_weight, None, None, 192, 'none', []); del view_1, layers_0_attention_qkv_proj_packed_weight  # torch   112.0 KiB
    #                           tiny.py:91          position = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    cos, sin, v, q_1, k_1 = arange_repeat_1(folded_0_1, mm); del mm   # fuser   15 ops   100.0 KiB
    # self.layers.0.attention   tiny.py:43          attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attended, _ = torch._scaled_dot_product_flash_attention_for_cpu(q_1, k_1, v, 0.0, True); del q_1, k_1, v, _  # torch   65.0 KiB
    # self.layers.0.attention   tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    transpose = torch.transpose(attended, 1, 2); del attended         # torch   view
    flatten = transpose.view([2, 32, 64]); del transpose              # torch   view
    # self.layers.0.attention.o_proj  tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    view_4 = flatten.view([64, 64]); del flatten                      # torch   view
    mm_1 = fulgurite.kernels.conv.direct.packed_linear(view_4, layers_0_attention_o_proj_packed_weight, None, None, 64, 'none', []); del view_4, layers_0_attention_o_proj_packed_weight  # torch   48.0 KiB
    x_1, view_5 = pow_rsqrt_2(mm_1, x, layers_0_feed_forward_norm_weight); del mm_1, x, layers_0_feed_forward_norm_weight  # fuser   7 ops   64.2 KiB
    mm_2 = fulgurite.kernels.conv.direct.packed_linear(view_5, layers_0_feed_forward_gate_proj_packed_weight, None, None, 160, 'silu', []); del layers_0_feed_forward_gate_proj_packed_weight  # torch   96.0 KiB
    # self.layers.0.feed_forward.up_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mm_3 = fulgurite.kernels.conv.direct.packed_linear(view_5, layers_0_feed_forward_up_proj_packed_weight, None, None, 160, 'none', []); del view_5, layers_0_feed_forward_up_proj_packed_weight  # torch   96.0 KiB
    # self.layers.0.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_7, = mul_3(mm_2, mm_3); del mm_2, mm_3                       # fuser   1 op   120.0 KiB
    # self.layers.0.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mm_4 = fulgurite.kernels.conv.direct.packed_linear(view_7, layers_0_feed_forward_down_proj_packed_weight, None, None, 64, 'none', []); del view_7, layers_0_feed_forward_down_proj_packed_weight  # torch   96.0 KiB
    x_2, view_8 = pow_rsqrt_4(mm_4, x_1, layers_1_attention_norm_weight); del mm_4, x_1, layers_1_attention_norm_weight  # fuser   7 ops   64.2 KiB
    # self.layers.1.attention.qkv_proj  tiny.py:40          qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
    mm_5 = fulgurite.kernels.conv.direct.packed_linear(view_8, layers_1_attention_qkv_proj_packed_weight, None, None, 192, 'none', []); del view_8, layers_1_attention_qkv_proj_packed_weight  # torch   112.0 KiB
    v_1, q_3, k_3 = cat_5(mm_5, cos, sin); del mm_5, cos, sin         # fuser   10 ops   100.0 KiB
    # self.layers.1.attention   tiny.py:43          attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    attended_1, _ = torch._scaled_dot_product_flash_attention_for_cpu(q_3, k_3, v_1, 0.0, True); del q_3, k_3, v_1, _  # torch   65.0 KiB
    # self.layers.1.attention   tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    transpose_1 = torch.transpose(attended_1, 1, 2); del attended_1   # torch   view
    flatten_1 = transpose_1.view([2, 32, 64]); del transpose_1        # torch   view
    # self.layers.1.attention.o_proj  tiny.py:44          return self.o_proj(attended.transpose(1, 2).flatten(2))
    view_11 = flatten_1.view([64, 64]); del flatten_1                 # torch   view
    mm_6 = fulgurite.kernels.conv.direct.packed_linear(view_11, layers_1_attention_o_proj_packed_weight, None, None, 64, 'none', []); del view_11, layers_1_attention_o_proj_packed_weight  # torch   48.0 KiB
    x_3, view_12 = pow_rsqrt_6(mm_6, x_2, layers_1_feed_forward_norm_weight); del mm_6, x_2, layers_1_feed_forward_norm_weight  # fuser   7 ops   64.2 KiB
    mm_7 = fulgurite.kernels.conv.direct.packed_linear(view_12, layers_1_feed_forward_gate_proj_packed_weight, None, None, 160, 'silu', []); del layers_1_feed_forward_gate_proj_packed_weight  # torch   96.0 KiB
    # self.layers.1.feed_forward.up_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mm_8 = fulgurite.kernels.conv.direct.packed_linear(view_12, layers_1_feed_forward_up_proj_packed_weight, None, None, 160, 'none', []); del view_12, layers_1_feed_forward_up_proj_packed_weight  # torch   96.0 KiB
    # self.layers.1.feed_forward.gate_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    view_14, = mul_7(mm_7, mm_8); del mm_7, mm_8                      # fuser   1 op   120.0 KiB
    # self.layers.1.feed_forward.down_proj  tiny.py:55          return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    mm_9 = fulgurite.kernels.conv.direct.packed_linear(view_14, layers_1_feed_forward_down_proj_packed_weight, None, None, 64, 'none', []); del view_14, layers_1_feed_forward_down_proj_packed_weight  # torch   96.0 KiB
    view_15, = pow_rsqrt_8(mm_9, x_3, norm_weight); del mm_9, x_3, norm_weight  # fuser   7 ops   48.2 KiB
    # self.lm_head              tiny.py:100         logits = self.lm_head(self.norm(x))
    mm_10 = fulgurite.kernels.conv.direct.packed_linear(view_15, lm_head_packed_weight, None, None, 256, 'none', []); del view_15, lm_head_packed_weight  # torch   144.0 KiB
    div, = log_softmax_nll_loss_forward_9(mm_10, tokens_bt); del tokens_bt, mm_10  # fuser   21 ops   64.5 KiB
    return (div,)
