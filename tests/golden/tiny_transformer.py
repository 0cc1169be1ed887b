# inference 0 · final
import torch

folded_0 = torch.tensor([1.0, 0.3162277638912201, 0.10000000149011612, 0.03162277489900589, 0.009999999776482582, 0.003162277629598975, 0.0010000000474974513, 0.0003162277571391314], dtype=torch.float32)

def forward(
    embedding_weight: "f32[256, 64]",
    tokens_bt: "i64[2, 32]",
    layers_0_attention_norm_weight: "f32[64]",
    layers_0_attention_qkv_weight: "f32[192, 64]",
    layers_0_attention_out_weight: "f32[64, 64]",
    layers_0_feed_forward_norm_weight: "f32[64]",
    layers_0_feed_forward_gate_weight: "f32[160, 64]",
    layers_0_feed_forward_up_weight: "f32[160, 64]",
    layers_0_feed_forward_down_weight: "f32[64, 160]",
    layers_1_attention_norm_weight: "f32[64]",
    layers_1_attention_qkv_weight: "f32[192, 64]",
    layers_1_attention_out_weight: "f32[64, 64]",
    layers_1_feed_forward_norm_weight: "f32[64]",
    layers_1_feed_forward_gate_weight: "f32[160, 64]",
    layers_1_feed_forward_up_weight: "f32[160, 64]",
    layers_1_feed_forward_down_weight: "f32[64, 160]",
    norm_weight: "f32[64]",
    head_weight: "f32[256, 64]",
):
    # self.embedding            tiny.py:94          x = self.embedding(tokens_BT)
    x = torch.embedding(embedding_weight, tokens_bt); del embedding_weight  # torch   80.5 KiB
    #                           tiny.py:89          position = torch.arange(length, device=device)
    position = torch.arange(32, device=torch.device('cpu'), pin_memory=False)  # torch   256 B
    #                           tiny.py:90          angle = torch.outer(position, 10_000.0**-channel).repeat(1, 2)
    view = position.view([32, 1]); del position                       # torch   view
    outer = torch.mul(view, folded_0); del view                       # torch   1.3 KiB
    angle = outer.repeat([1, 2]); del outer                           # torch   3.0 KiB
    #                           tiny.py:91          return angle.cos(), angle.sin()
    cos = torch.cos(angle)                                            # torch   4.0 KiB
    sin = torch.sin(angle); del angle                                 # torch   4.0 KiB
    # self.layers.0.attention_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square = torch.pow(x, 2)                                          # torch   32.0 KiB
    mean = torch.mean(square, [-1], True); del square                 # torch   16.2 KiB
    add = torch.add(mean, 1e-06); del mean                            # torch   512 B
    scale = torch.rsqrt(add); del add                                 # torch   512 B
    # self.layers.0.attention_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_21 = torch.mul(x, scale); del scale                           # torch   32.2 KiB
    mul_22 = torch.mul(mul_21, layers_0_attention_norm_weight); del mul_21, layers_0_attention_norm_weight  # torch   32.2 KiB
    # self.layers.0.attention.qkv  tiny.py:40          qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
    t = torch.t(layers_0_attention_qkv_weight); del layers_0_attention_qkv_weight  # torch   view
    view_1 = mul_22.view([64, 64]); del mul_22                        # torch   view
    mm = torch.mm(view_1, t); del view_1, t                           # torch   1.6 MFLOP
    linear = mm.view([2, 32, 192]); del mm                            # torch   view
    # self.layers.0.attention   tiny.py:40          qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
    qkv = linear.view([2, 32, 3, 4, 16]); del linear                  # torch   view
    # self.layers.0.attention   tiny.py:41          q, k, v = qkv.permute(2, 0, 3, 1, 4)
    permute = torch.permute(qkv, [2, 0, 3, 1, 4]); del qkv            # torch   view
    q = torch.select(permute, 0, 0)                                   # torch   view
    k = torch.select(permute, 0, 1)                                   # torch   view
    v = torch.select(permute, 0, 2); del permute                      # torch   view
    # self.layers.0.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem, getitem_1 = torch.ops.aten.split.Tensor(q, 8, -1)        # torch   view
    # self.layers.0.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_23 = torch.mul(q, cos); del q                                 # torch   34.0 KiB
    neg_1 = torch.neg(getitem_1); del getitem_1                       # torch   16.0 KiB
    cat = torch.cat([neg_1, getitem], -1); del neg_1, getitem         # torch   32.0 KiB
    mul_24 = torch.mul(cat, sin); del cat                             # torch   34.0 KiB
    q_1 = torch.add(mul_23, mul_24); del mul_23, mul_24               # torch   48.0 KiB
    # self.layers.0.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_2, getitem_3 = torch.ops.aten.split.Tensor(k, 8, -1)      # torch   view
    # self.layers.0.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_25 = torch.mul(k, cos); del k                                 # torch   34.0 KiB
    neg_2 = torch.neg(getitem_3); del getitem_3                       # torch   16.0 KiB
    cat_1 = torch.cat([neg_2, getitem_2], -1); del neg_2, getitem_2   # torch   32.0 KiB
    mul_26 = torch.mul(cat_1, sin); del cat_1                         # torch   34.0 KiB
    k_1 = torch.add(mul_25, mul_26); del mul_25, mul_26               # torch   48.0 KiB
    # self.layers.0.attention   tiny.py:43          mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed, _ = torch._scaled_dot_product_flash_attention_for_cpu(q_1, k_1, v, 0.0, True); del q_1, k_1, v, _  # torch   65.0 KiB
    # self.layers.0.attention   tiny.py:44          return self.out(mixed.transpose(1, 2).flatten(2))
    transpose = torch.transpose(mixed, 1, 2); del mixed               # torch   view
    flatten = transpose.view([2, 32, 64]); del transpose              # torch   view
    # self.layers.0.attention.out  tiny.py:44          return self.out(mixed.transpose(1, 2).flatten(2))
    t_1 = torch.t(layers_0_attention_out_weight); del layers_0_attention_out_weight  # torch   view
    view_4 = flatten.view([64, 64]); del flatten                      # torch   view
    mm_1 = torch.mm(view_4, t_1); del view_4, t_1                     # torch   524.3 kFLOP
    linear_1 = mm_1.view([2, 32, 64]); del mm_1                       # torch   view
    # self.layers.0             tiny.py:67          x = x + self.attention(self.attention_norm(x), cos, sin)
    x_1 = torch.add(x, linear_1); del x, linear_1                     # torch   48.0 KiB
    # self.layers.0.feed_forward_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_1 = torch.pow(x_1, 2)                                      # torch   32.0 KiB
    mean_1 = torch.mean(square_1, [-1], True); del square_1           # torch   16.2 KiB
    add_4 = torch.add(mean_1, 1e-06); del mean_1                      # torch   512 B
    scale_1 = torch.rsqrt(add_4); del add_4                           # torch   512 B
    # self.layers.0.feed_forward_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_27 = torch.mul(x_1, scale_1); del scale_1                     # torch   32.2 KiB
    mul_28 = torch.mul(mul_27, layers_0_feed_forward_norm_weight); del mul_27, layers_0_feed_forward_norm_weight  # torch   32.2 KiB
    # self.layers.0.feed_forward.gate  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_2 = torch.t(layers_0_feed_forward_gate_weight); del layers_0_feed_forward_gate_weight  # torch   view
    view_5 = mul_28.view([64, 64]); del mul_28                        # torch   view
    mm_2 = torch.mm(view_5, t_2); del t_2                             # torch   1.3 MFLOP
    linear_2 = mm_2.view([2, 32, 160]); del mm_2                      # torch   view
    # self.layers.0.feed_forward  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    silu = torch._C._nn.silu(linear_2); del linear_2                  # torch   80.0 KiB
    # self.layers.0.feed_forward.up  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_3 = torch.t(layers_0_feed_forward_up_weight); del layers_0_feed_forward_up_weight  # torch   view
    mm_3 = torch.mm(view_5, t_3); del view_5, t_3                     # torch   1.3 MFLOP
    linear_3 = mm_3.view([2, 32, 160]); del mm_3                      # torch   view
    # self.layers.0.feed_forward  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    mul_29 = torch.mul(silu, linear_3); del silu, linear_3            # torch   120.0 KiB
    # self.layers.0.feed_forward.down  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_4 = torch.t(layers_0_feed_forward_down_weight); del layers_0_feed_forward_down_weight  # torch   view
    view_7 = mul_29.view([64, 160]); del mul_29                       # torch   view
    mm_4 = torch.mm(view_7, t_4); del view_7, t_4                     # torch   1.3 MFLOP
    linear_4 = mm_4.view([2, 32, 64]); del mm_4                       # torch   view
    # self.layers.0             tiny.py:68          return x + self.feed_forward(self.feed_forward_norm(x))
    x_2 = torch.add(x_1, linear_4); del x_1, linear_4                 # torch   48.0 KiB
    # self.layers.1.attention_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_2 = torch.pow(x_2, 2)                                      # torch   32.0 KiB
    mean_2 = torch.mean(square_2, [-1], True); del square_2           # torch   16.2 KiB
    add_6 = torch.add(mean_2, 1e-06); del mean_2                      # torch   512 B
    scale_2 = torch.rsqrt(add_6); del add_6                           # torch   512 B
    # self.layers.1.attention_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_30 = torch.mul(x_2, scale_2); del scale_2                     # torch   32.2 KiB
    mul_31 = torch.mul(mul_30, layers_1_attention_norm_weight); del mul_30, layers_1_attention_norm_weight  # torch   32.2 KiB
    # self.layers.1.attention.qkv  tiny.py:40          qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
    t_5 = torch.t(layers_1_attention_qkv_weight); del layers_1_attention_qkv_weight  # torch   view
    view_8 = mul_31.view([64, 64]); del mul_31                        # torch   view
    mm_5 = torch.mm(view_8, t_5); del view_8, t_5                     # torch   1.6 MFLOP
    linear_5 = mm_5.view([2, 32, 192]); del mm_5                      # torch   view
    # self.layers.1.attention   tiny.py:40          qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
    qkv_1 = linear_5.view([2, 32, 3, 4, 16]); del linear_5            # torch   view
    # self.layers.1.attention   tiny.py:41          q, k, v = qkv.permute(2, 0, 3, 1, 4)
    permute_1 = torch.permute(qkv_1, [2, 0, 3, 1, 4]); del qkv_1      # torch   view
    q_2 = torch.select(permute_1, 0, 0)                               # torch   view
    k_2 = torch.select(permute_1, 0, 1)                               # torch   view
    v_1 = torch.select(permute_1, 0, 2); del permute_1                # torch   view
    # self.layers.1.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_6, getitem_7 = torch.ops.aten.split.Tensor(q_2, 8, -1)    # torch   view
    # self.layers.1.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_32 = torch.mul(q_2, cos); del q_2                             # torch   34.0 KiB
    neg_3 = torch.neg(getitem_7); del getitem_7                       # torch   16.0 KiB
    cat_2 = torch.cat([neg_3, getitem_6], -1); del neg_3, getitem_6   # torch   32.0 KiB
    mul_33 = torch.mul(cat_2, sin); del cat_2                         # torch   34.0 KiB
    q_3 = torch.add(mul_32, mul_33); del mul_32, mul_33               # torch   48.0 KiB
    # self.layers.1.attention   tiny.py:28          left, right = x_BNTH.chunk(2, dim=-1)
    getitem_8, getitem_9 = torch.ops.aten.split.Tensor(k_2, 8, -1)    # torch   view
    # self.layers.1.attention   tiny.py:29          return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH
    mul_34 = torch.mul(k_2, cos); del cos, k_2                        # torch   34.0 KiB
    neg_4 = torch.neg(getitem_9); del getitem_9                       # torch   16.0 KiB
    cat_3 = torch.cat([neg_4, getitem_8], -1); del neg_4, getitem_8   # torch   32.0 KiB
    mul_35 = torch.mul(cat_3, sin); del sin, cat_3                    # torch   34.0 KiB
    k_3 = torch.add(mul_34, mul_35); del mul_34, mul_35               # torch   48.0 KiB
    # self.layers.1.attention   tiny.py:43          mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed_1, _ = torch._scaled_dot_product_flash_attention_for_cpu(q_3, k_3, v_1, 0.0, True); del q_3, k_3, v_1, _  # torch   65.0 KiB
    # self.layers.1.attention   tiny.py:44          return self.out(mixed.transpose(1, 2).flatten(2))
    transpose_1 = torch.transpose(mixed_1, 1, 2); del mixed_1         # torch   view
    flatten_1 = transpose_1.view([2, 32, 64]); del transpose_1        # torch   view
    # self.layers.1.attention.out  tiny.py:44          return self.out(mixed.transpose(1, 2).flatten(2))
    t_6 = torch.t(layers_1_attention_out_weight); del layers_1_attention_out_weight  # torch   view
    view_11 = flatten_1.view([64, 64]); del flatten_1                 # torch   view
    mm_6 = torch.mm(view_11, t_6); del view_11, t_6                   # torch   524.3 kFLOP
    linear_6 = mm_6.view([2, 32, 64]); del mm_6                       # torch   view
    # self.layers.1             tiny.py:67          x = x + self.attention(self.attention_norm(x), cos, sin)
    x_3 = torch.add(x_2, linear_6); del x_2, linear_6                 # torch   48.0 KiB
    # self.layers.1.feed_forward_norm  tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_3 = torch.pow(x_3, 2)                                      # torch   32.0 KiB
    mean_3 = torch.mean(square_3, [-1], True); del square_3           # torch   16.2 KiB
    add_10 = torch.add(mean_3, 1e-06); del mean_3                     # torch   512 B
    scale_3 = torch.rsqrt(add_10); del add_10                         # torch   512 B
    # self.layers.1.feed_forward_norm  tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_36 = torch.mul(x_3, scale_3); del scale_3                     # torch   32.2 KiB
    mul_37 = torch.mul(mul_36, layers_1_feed_forward_norm_weight); del mul_36, layers_1_feed_forward_norm_weight  # torch   32.2 KiB
    # self.layers.1.feed_forward.gate  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_7 = torch.t(layers_1_feed_forward_gate_weight); del layers_1_feed_forward_gate_weight  # torch   view
    view_12 = mul_37.view([64, 64]); del mul_37                       # torch   view
    mm_7 = torch.mm(view_12, t_7); del t_7                            # torch   1.3 MFLOP
    linear_7 = mm_7.view([2, 32, 160]); del mm_7                      # torch   view
    # self.layers.1.feed_forward  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    silu_1 = torch._C._nn.silu(linear_7); del linear_7                # torch   80.0 KiB
    # self.layers.1.feed_forward.up  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_8 = torch.t(layers_1_feed_forward_up_weight); del layers_1_feed_forward_up_weight  # torch   view
    mm_8 = torch.mm(view_12, t_8); del view_12, t_8                   # torch   1.3 MFLOP
    linear_8 = mm_8.view([2, 32, 160]); del mm_8                      # torch   view
    # self.layers.1.feed_forward  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    mul_38 = torch.mul(silu_1, linear_8); del silu_1, linear_8        # torch   120.0 KiB
    # self.layers.1.feed_forward.down  tiny.py:55          return self.down(F.silu(self.gate(x)) * self.up(x))
    t_9 = torch.t(layers_1_feed_forward_down_weight); del layers_1_feed_forward_down_weight  # torch   view
    view_14 = mul_38.view([64, 160]); del mul_38                      # torch   view
    mm_9 = torch.mm(view_14, t_9); del view_14, t_9                   # torch   1.3 MFLOP
    linear_9 = mm_9.view([2, 32, 64]); del mm_9                       # torch   view
    # self.layers.1             tiny.py:68          return x + self.feed_forward(self.feed_forward_norm(x))
    x_4 = torch.add(x_3, linear_9); del x_3, linear_9                 # torch   48.0 KiB
    # self.norm                 tiny.py:22          scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    square_4 = torch.pow(x_4, 2)                                      # torch   32.0 KiB
    mean_4 = torch.mean(square_4, [-1], True); del square_4           # torch   16.2 KiB
    add_12 = torch.add(mean_4, 1e-06); del mean_4                     # torch   512 B
    scale_4 = torch.rsqrt(add_12); del add_12                         # torch   512 B
    # self.norm                 tiny.py:23          return (x * scale).type_as(x) * self.weight
    mul_39 = torch.mul(x_4, scale_4); del x_4, scale_4                # torch   32.2 KiB
    mul_40 = torch.mul(mul_39, norm_weight); del mul_39, norm_weight  # torch   32.2 KiB
    # self.head                 tiny.py:98          logits = self.head(self.norm(x))
    t_10 = torch.t(head_weight); del head_weight                      # torch   view
    view_15 = mul_40.view([64, 64]); del mul_40                       # torch   view
    mm_10 = torch.mm(view_15, t_10); del view_15, t_10                # torch   2.1 MFLOP
    logits = mm_10.view([2, 32, 256]); del mm_10                      # torch   view
    #                           tiny.py:99          return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    getitem_14 = torch.ops.aten.slice.Tensor(logits, 1, 0, -1); del logits  # torch   view
    clone = torch.clone(getitem_14, memory_format=torch.contiguous_format); del getitem_14  # torch   124.0 KiB
    flatten_2 = clone.view([62, 256]); del clone                      # torch   view
    getitem_15 = torch.ops.aten.slice.Tensor(tokens_bt, 1, 1, 9223372036854775807); del tokens_bt  # torch   view
    clone_1 = torch.clone(getitem_15, memory_format=torch.contiguous_format); del getitem_15  # torch   992 B
    flatten_3 = clone_1.view([62]); del clone_1                       # torch   view
    _log_softmax = torch._log_softmax(flatten_2, 1, False); del flatten_2  # torch   124.0 KiB
    cross_entropy, _ = torch.ops.aten.nll_loss_forward.default(_log_softmax, flatten_3, None, 1, -100); del _log_softmax, flatten_3, _  # torch   62.5 KiB
    return (cross_entropy,)
