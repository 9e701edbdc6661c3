// SPDX-License-Identifier: Apache-2.0
// Attention on one rank, with a cache, and over the tokens of a sequence-parallel group in two ways.
//
// Ulysses: an all-to-all turns [T/P tokens, all heads] into [T tokens, 1/P of the heads]; another one turns the result
// back. With fewer key/value heads than ranks, each head is sent to all ranks that need it, and their gradients are
// returned and added.
//
// Ring: P steps, in which a rank's keys and values travel around. A rank has two chunks of the sequence
// (Shard::tokens). Each pair of chunks is one call of the attention, skipped if the causal mask hides it, and the
// results of the pairs are merged by their log-sum-exps. The backward pass goes around once more with the final
// log-sum-exps, and the gradients of keys and values travel with them until they are back at their owner.

#include "ds/building_blocks.h"

#include "base/check.h"
#include "comm/message_tag.h"
#include "ds/communicator.h"

namespace ds::model {
namespace {

i64 kv_share(i64 kv_heads, int P) { return std::max<i64>(kv_heads / P, 1); }

// Parameters for some of a rank's heads: dropout and layouts are indexed by the heads of the whole model.
AttentionParams of_heads(const PassContext& ctx, AttentionParams params, i64 heads, i64 first) {
  const Shard& shard = ctx.groups.shard;
  params.blocks = ctx.blocks;
  if (ctx.documents) params.documents = ctx.documents.as<i32>(), params.positions = ctx.groups.sequence_length;
  params.grid.heads = heads * shard.tp;
  params.grid.head0 = heads * shard.tp_rank + first;
  return params;
}

// Heads of a tensor [B,T,heads,D] from `first` on.
TensorView some_heads(TensorView x, i64 first, i64 count) {
  x.data = static_cast<char*>(x.data) + first * x.stride[2] * dtype_bytes(x.dtype);
  x.shape[2] = count;
  return x;
}
// Its tokens from `first` on.
TensorView some_tokens(TensorView x, i64 first, i64 count) {
  x.data = static_cast<char*>(x.data) + first * x.stride[1] * dtype_bytes(x.dtype);
  x.shape[1] = count;
  return x;
}

// Writes keys or values [1,T,G,D] of the positions from cache.length on to their pages, if they are kept.
void keep(const PassContext& ctx, TensorView to, const KvCache& cache, TensorView fresh) {
  const i64 T = fresh.dim(1);
  if (cache.page == 0) return ctx.ops.copy_heads(some_tokens(to, cache.length, T), fresh, ctx.stream);
  for (i64 t = 0; t < T;) {
    const i64 at = cache.length + t, n = std::min(T - t, cache.page - at % cache.page);
    if (const i64 place = cache.places[at / cache.page]; place >= 0) {
      ctx.ops.copy_heads(some_tokens(to, place * cache.page + at % cache.page, n), some_tokens(fresh, t, n),
                         ctx.stream);
    }
    t += n;
  }
}

// One sequence after the other, since they differ in length and each must have the bits that it has alone. The first
// tokens attend to each other; later ones, one by one, to the cache.
void attend_cached(const PassContext& ctx, TensorView o, TensorView lse, const Heads& h, AttentionParams params) {
  const i64 T = h.k.dim(1);
  params = of_heads(ctx, params, h.q.dim(2), 0);
  params.dropout = 0;
  for (i64 b = 0; b < ctx.B; ++b) {
    KvCache& cache = *ctx.caches[b];
    const bool first = cache.length == 0;
    DS_ASSERT(first || T == 1);
    const TensorView k = cache.arrays[0], v = cache.arrays[1];
    keep(ctx, k, cache, h.k.rows(b, 1));
    keep(ctx, v, cache, h.v.rows(b, 1));
    params.grid.row0 = cache.length;
    params.pages = first ? nullptr : cache.pages;
    params.page = cache.page;
    cache.length += T;
    const auto so_far = [&](TensorView kept, TensorView fresh) {
      return first ? fresh.rows(b, 1) : some_tokens(kept, 0, cache.length);
    };
    ctx.ops.attention_fwd(o.rows(b, 1), lse.rows(b, 1), h.q.rows(b, 1), so_far(k, h.k), so_far(v, h.v), params,
                          ctx.stream);
  }
}

// Slice `slice` of a message to or from each rank: several tensors, one after the other.
class Parcel {
 public:
  Parcel(TensorView memory, i64 slice_elems, i64 slice) : memory_(memory), at_(slice * slice_elems) {}
  TensorView next(i64 B, i64 T, i64 heads, i64 D) {
    char* const data = static_cast<char*>(memory_.data) + at_ * dtype_bytes(memory_.dtype);
    at_ += B * T * heads * D;
    return TensorView::of(data, memory_.dtype, {B, T, heads, D});
  }

 private:
  TensorView memory_;
  i64 at_;
};

struct Ulysses {
  enum Memory : size_t { kSend, kReceive, kQ, kK, kV, kO, kDO, kDQ, kDK, kDV };
  // A tensor as stored here, [B,T,all heads,D], and at the other ranks, [B,P T,some heads,D].
  struct Part {
    TensorView mine;
    Memory theirs;
    bool kv;
  };

  const PassContext& ctx;
  const LayerActs& acts;
  int P;
  i64 B, T, D, q_heads, kv_heads, h, g;  // T: tokens of a rank before the exchange; h, g: heads of a rank after it

  Ulysses(const PassContext& c, const Heads& heads, const LayerActs& a)
      : ctx(c),
        acts(a),
        P(c.groups.shard.sp),
        B(heads.q.dim(0)),
        T(heads.q.dim(1)),
        D(heads.q.dim(3)),
        q_heads(heads.q.dim(2)),
        kv_heads(heads.k.dim(2)),
        h(q_heads / P),
        g(kv_share(kv_heads, P)) {}

  TensorView memory(Memory which) const { return acts.exchange[which]; }
  TensorView whole(Memory which, bool kv) const {
    return TensorView::of(memory(which).data, memory(which).dtype, {B, P * T, kv ? g : h, D});
  }
  // The heads for which rank q attends.
  TensorView heads_of(const Part& p, int q) const {
    return p.kv ? some_heads(p.mine, q * kv_heads / P, g) : some_heads(p.mine, q * h, h);
  }
  i64 slice_elems(std::span<const Part> parts) const {
    i64 n = 0;
    for (const Part& p : parts) n += B * T * (p.kv ? g : h) * D;
    return n;
  }
  void exchange(i64 slice) const {
    const TensorView send = memory(kSend);
    ctx.groups[Axis::Sp]
        .all_to_all(send.data, memory(kReceive).data, slice * dtype_bytes(send.dtype),
                    message_text(Axis::Sp, Collective::AllToAll))
        .wait();
  }

  // Some tokens of all heads -> all tokens of some heads.
  void to_heads(std::initializer_list<Part> parts) const {
    const i64 slice = slice_elems(parts);
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kSend), slice, q);
      for (const Part& p : parts) {
        const TensorView part = heads_of(p, q);
        ctx.ops.copy_heads(parcel.next(B, T, part.dim(2), D), part, ctx.stream);
      }
    }
    exchange(slice);
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kReceive), slice, q);
      for (const Part& p : parts) {
        const TensorView to = some_tokens(whole(p.theirs, p.kv), q * T, T);
        ctx.ops.copy_heads(to, parcel.next(B, T, to.dim(2), D), ctx.stream);
      }
    }
  }

  // The way back. If several ranks had the same key or value head, their partial gradients are added in rank order.
  void to_tokens(std::initializer_list<Part> parts) const {
    const i64 slice = slice_elems(parts);
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kSend), slice, q);
      for (const Part& p : parts) {
        const TensorView from = some_tokens(whole(p.theirs, p.kv), q * T, T);
        ctx.ops.copy_heads(parcel.next(B, T, from.dim(2), D), from, ctx.stream);
      }
    }
    exchange(slice);
    const int copies = std::max(1, P / narrow<int>(kv_heads));
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kReceive), slice, q);
      for (const Part& p : parts) {
        const TensorView got = parcel.next(B, T, p.kv ? g : h, D);
        if (p.kv && q % copies != 0) continue;
        for (int c = 1; p.kv && c < copies; ++c) {
          TensorView other = got;
          other.data = static_cast<char*>(got.data) + c * slice * dtype_bytes(got.dtype);
          ctx.ops.add(got, got, other, ctx.stream);
        }
        ctx.ops.copy_heads(heads_of(p, q), got, ctx.stream);
      }
    }
  }

  TensorView stats(TensorView lse) const { return lse.reshaped({B, h, P * T}); }
  AttentionParams params(const AttentionParams& p) const {
    return of_heads(ctx, p, q_heads, h * ctx.groups.shard.sp_rank);
  }
  void forward(TensorView o, TensorView lse, const Heads& x, const AttentionParams& p) const {
    to_heads({{x.q, kQ, false}, {x.k, kK, true}, {x.v, kV, true}});
    ctx.ops.attention_fwd(whole(kO, false), stats(lse), whole(kQ, false), whole(kK, true), whole(kV, true), params(p),
                          ctx.stream);
    to_tokens({{o, kO, false}});
  }
  void backward(const Heads& d, TensorView dout, const Heads& x, TensorView o, TensorView lse,
                const AttentionParams& p) const {
    to_heads({{x.q, kQ, false}, {x.k, kK, true}, {x.v, kV, true}, {o, kO, false}, {dout, kDO, false}});
    ctx.ops.attention_bwd(whole(kDQ, false), whole(kDK, true), whole(kDV, true), whole(kDO, false), whole(kQ, false),
                          whole(kK, true), whole(kV, true), whole(kO, false), stats(lse), params(p), ctx.stream);
    to_tokens({{d.q, kDQ, false}, {d.k, kDK, true}, {d.v, kDV, true}});
  }
};

struct Ring {
  enum Memory : size_t { kBlock, kNextBlock, kPart, kPartLse, kSum, kDBlock, kNextDBlock, kDQ, kDK, kDV, kDQSum };

  const PassContext& ctx;
  const LayerActs& acts;
  int P, rank;
  i64 B, T, H, G, D;  // T: tokens of a chunk; a rank has two

  Ring(const PassContext& c, const Heads& heads, const LayerActs& a)
      : ctx(c),
        acts(a),
        P(c.groups.shard.sp),
        rank(c.groups.shard.sp_rank),
        B(heads.q.dim(0)),
        T(heads.q.dim(1) / 2),
        H(heads.q.dim(2)),
        G(heads.k.dim(2)),
        D(heads.q.dim(3)) {}

  TensorView memory(Memory which) const { return acts.exchange[which]; }
  // Part i of memory that contains chunks [B,T,heads,D] one after the other.
  TensorView chunk(Memory which, i64 i, i64 heads) const {
    const TensorView all = memory(which);
    return TensorView::of(static_cast<char*>(all.data) + i * B * T * heads * D * dtype_bytes(all.dtype), all.dtype,
                          {B, T, heads, D});
  }
  TensorView key(Memory block, i64 i) const { return chunk(block, i, G); }
  TensorView value(Memory block, i64 i) const { return chunk(block, 2 + i, G); }
  TensorView stats(TensorView lse, i64 i) const {
    return TensorView::of(lse.as<float>() + i * B * H * T, DType::F32, {B, H, T});
  }
  TensorView tokens(TensorView x, i64 i) const { return some_tokens(x, i * T, T); }

  // Calls pair(query chunk, key chunk, parameters) for the pairs that see each other: our queries, keys of rank `of`.
  template <class F>
  void for_each_pair(int of, const AttentionParams& params, F&& pair) const {
    const auto place = [&](int r, i64 i) { return i == 0 ? i64{r} : i64{2 * P - 1 - r}; };  // in chunks of the sequence
    for (i64 i = 0; i < 2; ++i) {
      for (i64 j = 0; j < 2; ++j) {
        const i64 query = place(rank, i), keys = place(of, j);
        if (params.causal && keys > query) continue;
        AttentionParams p = of_heads(ctx, params, H, 0);
        p.causal = params.causal && keys == query;
        p.grid.rows = p.grid.cols = 2 * P * T;
        p.grid.row0 = query * T;
        p.grid.col0 = keys * T;
        pair(i, j, p);
      }
    }
  }

  void load(const Heads& x) const {
    for (i64 i = 0; i < 2; ++i) {
      ctx.ops.copy_heads(key(kBlock, i), tokens(x.k, i), ctx.stream);
      ctx.ops.copy_heads(value(kBlock, i), tokens(x.v, i), ctx.stream);
    }
  }
  // Sends our block to the next rank and receives that of the previous rank. The two buffers alternate.
  void pass_on(Memory& block, Memory& next) const {
    Communicator& sp = ctx.groups[Axis::Sp];
    Ticket sent =
        sp.send(memory(block).data, memory(block).bytes(), (rank + 1) % P, message_text(Axis::Sp, Collective::Send));
    sp.recv(memory(next).data, memory(next).bytes(), (rank + P - 1) % P, message_text(Axis::Sp, Collective::Recv))
        .wait();
    sent.wait();
    std::swap(block, next);
  }

  void forward(TensorView o, TensorView lse, const Heads& x, const AttentionParams& params) const {
    load(x);
    Memory block = kBlock, next = kNextBlock;
    bool first[2] = {true, true};
    const TensorView part = chunk(kPart, 0, H), part_lse = stats(memory(kPartLse), 0);
    for (int step = 0; step < P; ++step) {
      for_each_pair((rank + P - step) % P, params, [&](i64 i, i64 j, const AttentionParams& p) {
        ctx.ops.attention_fwd(part, part_lse, tokens(x.q, i), key(block, j), value(block, j), p, ctx.stream);
        ctx.ops.attention_merge(chunk(kSum, i, H), stats(lse, i), part, part_lse, first[i], ctx.stream);
        first[i] = false;
      });
      if (step + 1 < P) pass_on(block, next);
    }
    for (i64 i = 0; i < 2; ++i) store(tokens(o, i), part, chunk(kSum, i, H));
  }

  void backward(const Heads& d, TensorView dout, const Heads& x, TensorView o, TensorView lse,
                const AttentionParams& params) const {
    load(x);
    Memory block = kBlock, next = kNextBlock, dblock = kDBlock, next_dblock = kNextDBlock;
    const TensorView dq = chunk(kDQ, 0, H), dk = chunk(kDK, 0, G), dv = chunk(kDV, 0, G);
    for (int step = 0; step < P; ++step) {
      bool first_query[2] = {step == 0, step == 0}, first_key[2] = {step == 0, step == 0};
      const auto add = [&](TensorView sum, TensorView part, bool first) {
        ctx.ops.fold(sum, {&part, 1}, !first, ctx.stream);
      };
      for_each_pair((rank + P - step) % P, params, [&](i64 i, i64 j, const AttentionParams& p) {
        ctx.ops.attention_bwd(dq, dk, dv, tokens(dout, i), tokens(x.q, i), key(block, j), value(block, j), tokens(o, i),
                              stats(lse, i), p, ctx.stream);
        add(chunk(kDQSum, i, H), dq, first_query[i]);
        add(key(dblock, j), dk, first_key[j]);
        add(value(dblock, j), dv, first_key[j]);
        first_query[i] = first_key[j] = false;
      });
      if (step + 1 < P) pass_on(block, next);
      pass_on(dblock, next_dblock);  // the last time: to its owner
    }
    for (i64 i = 0; i < 2; ++i) {
      store(tokens(d.q, i), dq, chunk(kDQSum, i, H));
      store(tokens(d.k, i), dk, key(dblock, i));
      store(tokens(d.v, i), dv, value(dblock, i));
    }
  }

  void store(TensorView to, TensorView rounded, TensorView sum) const {
    ctx.ops.cast(rounded, sum, ctx.stream);
    ctx.ops.copy_heads(to, rounded, ctx.stream);
  }
};

}  // namespace

void rotate(const PassContext& ctx, TensorView x, const RopeViews& rotation, bool inverse) {
  x.shape[3] = 2 * rotation.cos.dim(1);                                           // the others stay as they are
  if (ctx.positions.dim(0) != ctx.T) x.shape[0] = 1, x.shape[1] = ctx.B * ctx.T;  // each row has its own position
  ctx.ops.rope(x, x, rotation.cos, rotation.sin, ctx.positions, inverse, ctx.stream);
}

void plan_attention(LayerActs& acts, ActivationPlanner& planner, const Shard& shard, const PlannedPass& pass,
                    const HeadCounts& n) {
  if (shard.sp == 1 || pass.mode == Mode::Generate) return;
  const bool train = pass.mode == Mode::Train;
  const auto take = [&](DType dtype, std::initializer_list<i64> sizes) {
    for (const i64 elems : sizes) acts.exchange.push_back(planner.temporary(dtype, {elems}));
  };
  const auto work = pass.work, f32 = DType::F32;
  const i64 R = pass.rows(), Q = R * n.q * n.dim, K = R * n.kv * n.dim;  // elements on this rank
  // In the order of Memory.
  if (shard.mode == SequenceMode::Ulysses) {
    const i64 there = R * kv_share(n.kv, shard.sp) * n.dim * shard.sp, message = (train ? 3 : 1) * Q + 2 * there;
    take(work, {message, message, Q, there, there, Q});
    if (train) take(work, {Q, Q, there, there});
  } else {
    take(work, {2 * K, 2 * K, Q / 2});
    take(f32, {R * n.q / 2, Q});
    if (train) {
      take(f32, {2 * K, 2 * K});
      take(work, {Q / 2, K / 2, K / 2});
      take(f32, {Q});
    }
  }
}

void attend(const PassContext& ctx, TensorView o, TensorView lse, const Heads& heads, const AttentionParams& params,
            const LayerActs& acts) {
  const Shard& shard = ctx.groups.shard;
  if (ctx.mode == Mode::Generate) {
    attend_cached(ctx, o, lse, heads, params);
  } else if (shard.sp == 1) {
    ctx.ops.attention_fwd(o, lse, heads.q, heads.k, heads.v, of_heads(ctx, params, heads.q.dim(2), 0), ctx.stream);
  } else if (shard.mode == SequenceMode::Ulysses) {
    Ulysses(ctx, heads, acts).forward(o, lse, heads, params);
  } else {
    Ring(ctx, heads, acts).forward(o, lse, heads, params);
  }
}

void attend_backward(const PassContext& ctx, const Heads& gradients, TensorView dout, const Heads& heads, TensorView o,
                     TensorView lse, const AttentionParams& params, const LayerActs& acts) {
  const Shard& shard = ctx.groups.shard;
  if (shard.sp == 1) {
    ctx.ops.attention_bwd(gradients.q, gradients.k, gradients.v, dout, heads.q, heads.k, heads.v, o, lse,
                          of_heads(ctx, params, heads.q.dim(2), 0), ctx.stream);
  } else if (shard.mode == SequenceMode::Ulysses) {
    Ulysses(ctx, heads, acts).backward(gradients, dout, heads, o, lse, params);
  } else {
    Ring(ctx, heads, acts).backward(gradients, dout, heads, o, lse, params);
  }
}

}  // namespace ds::model
