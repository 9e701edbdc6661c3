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

#include <algorithm>

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
  params.rowwise = ctx.rowwise();
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

// Calls f(cache, first row, rows) for each sequence of a pass.
template <class F>
void for_sequences(const PassContext& ctx, F&& f) {
  i64 first = 0;
  for (size_t s = 0; s < ctx.caches.size(); ++s) {
    f(*ctx.caches[s], first, ctx.fresh[s]);
    first += ctx.fresh[s];
  }
}

// Parameters of all sequences together, whose keys are in their blocks. There is at least one sequence.
AttentionParams of_sequences(const PassContext& ctx, AttentionParams params) {
  const KvCache& any = *ctx.caches[0];
  params.pages = any.pages;
  params.page = any.block;
  params.sequences = ctx.sequences;
  params.sequences.stride = any.table;
  return params;
}

// Appends new positions [1,T,heads,dim] of all sequences to each array of their caches.
void keep(const PassContext& ctx, std::span<const TensorView> fresh) {
  const AttentionParams params = of_sequences(ctx, {});
  for (size_t i = 0; i < fresh.size(); ++i) ctx.ops.append_keys(ctx.caches[0]->arrays[i], fresh[i], params, ctx.stream);
  for (size_t s = 0; s < ctx.caches.size(); ++s) ctx.caches[s]->length += ctx.fresh[s];
}

// A query's attention is that of its own sequence alone, whatever its pass contains.
AttentionParams of_generation(const PassContext& ctx, const AttentionParams& params, i64 heads) {
  AttentionParams p = of_heads(ctx, params, heads, 0);
  p.dropout = 0;
  p.rowwise = true;
  return p;
}

// The new positions of each sequence attend to all of its positions, by keys and values as they are cached.
void attend_cached(const PassContext& ctx, const TensorView& o, const TensorView& lse, const Heads& h,
                   const AttentionParams& params) {
  if (ctx.caches.empty()) return;
  const TensorView fresh[] = {h.k, h.v};
  keep(ctx, fresh);
  TensorView k = ctx.caches[0]->arrays[0], v = ctx.caches[0]->arrays[1];
  k.shape[1] = v.shape[1] = std::ranges::max(ctx.caches, {}, &KvCache::length)->length;
  ctx.ops.attention_fwd(o, lse, h.q, k, v, of_sequences(ctx, of_generation(ctx, params, h.q.dim(2))), ctx.stream);
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
    i64 dim() const noexcept { return mine.dim(3); }
  };

  const PassContext& ctx;
  const LayerActs& acts;
  int P;
  i64 B, T, q_heads, kv_heads, h, g;  // T: tokens of a rank before the exchange; h, g: heads of a rank after it

  Ulysses(const PassContext& c, const Heads& heads, const LayerActs& a)
      : ctx(c),
        acts(a),
        P(c.groups.shard.sp),
        B(heads.q.dim(0)),
        T(heads.q.dim(1)),
        q_heads(heads.q.dim(2)),
        kv_heads(heads.k.dim(2)),
        h(q_heads / P),
        g(kv_share(kv_heads, P)) {}

  TensorView memory(Memory which) const { return acts.exchange[which]; }
  TensorView whole(const Part& p) const {
    return TensorView::of(memory(p.theirs).data, memory(p.theirs).dtype, {B, P * T, p.kv ? g : h, p.dim()});
  }
  // The heads for which rank q attends.
  TensorView heads_of(const Part& p, int q) const {
    return p.kv ? some_heads(p.mine, q * kv_heads / P, g) : some_heads(p.mine, q * h, h);
  }
  i64 slice_elems(std::span<const Part> parts) const {
    i64 n = 0;
    for (const Part& p : parts) n += B * T * (p.kv ? g : h) * p.dim();
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
        ctx.ops.copy_heads(parcel.next(B, T, part.dim(2), p.dim()), part, ctx.stream);
      }
    }
    exchange(slice);
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kReceive), slice, q);
      for (const Part& p : parts) {
        const TensorView to = some_tokens(whole(p), q * T, T);
        ctx.ops.copy_heads(to, parcel.next(B, T, to.dim(2), p.dim()), ctx.stream);
      }
    }
  }

  // The way back. If several ranks had the same key or value head, their partial gradients are added in rank order.
  void to_tokens(std::initializer_list<Part> parts) const {
    const i64 slice = slice_elems(parts);
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kSend), slice, q);
      for (const Part& p : parts) {
        const TensorView from = some_tokens(whole(p), q * T, T);
        ctx.ops.copy_heads(parcel.next(B, T, from.dim(2), p.dim()), from, ctx.stream);
      }
    }
    exchange(slice);
    const int copies = std::max(1, P / narrow<int>(kv_heads));
    for (int q = 0; q < P; ++q) {
      Parcel parcel(memory(kReceive), slice, q);
      for (const Part& p : parts) {
        const TensorView got = parcel.next(B, T, p.kv ? g : h, p.dim());
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
    const Part q{x.q, kQ, false}, k{x.k, kK, true}, v{x.v, kV, true}, out{o, kO, false};
    to_heads({q, k, v});
    ctx.ops.attention_fwd(whole(out), stats(lse), whole(q), whole(k), whole(v), params(p), ctx.stream);
    to_tokens({out});
  }
  void backward(const Heads& d, TensorView dout, const Heads& x, TensorView o, TensorView lse,
                const AttentionParams& p) const {
    const Part q{x.q, kQ, false}, k{x.k, kK, true}, v{x.v, kV, true}, out{o, kO, false};
    const Part dq{d.q, kDQ, false}, dk{d.k, kDK, true}, dv{d.v, kDV, true}, grad{dout, kDO, false};
    to_heads({q, k, v, out, grad});
    ctx.ops.attention_bwd(whole(dq), whole(dk), whole(dv), whole(grad), whole(q), whole(k), whole(v), whole(out),
                          stats(lse), params(p), ctx.stream);
    to_tokens({dq, dk, dv});
  }
};

struct Ring {
  enum Memory : size_t { kBlock, kNextBlock, kPart, kPartLse, kSum, kDBlock, kNextDBlock, kDQ, kDK, kDV, kDQSum };

  const PassContext& ctx;
  const LayerActs& acts;
  int P, rank;
  i64 B, T, H, G, D, Dv;  // T: tokens of a chunk; a rank has two

  Ring(const PassContext& c, const Heads& heads, const LayerActs& a)
      : ctx(c),
        acts(a),
        P(c.groups.shard.sp),
        rank(c.groups.shard.sp_rank),
        B(heads.q.dim(0)),
        T(heads.q.dim(1) / 2),
        H(heads.q.dim(2)),
        G(heads.k.dim(2)),
        D(heads.q.dim(3)),
        Dv(heads.v.dim(3)) {}

  TensorView memory(Memory which) const { return acts.exchange[which]; }
  // A chunk [B,T,heads,dim] of memory, from element `at` on.
  TensorView chunk(Memory which, i64 at, i64 heads, i64 dim) const {
    const TensorView all = memory(which);
    return TensorView::of(static_cast<char*>(all.data) + at * dtype_bytes(all.dtype), all.dtype, {B, T, heads, dim});
  }
  // Queries and outputs of chunk i, and a block's keys, which values follow.
  TensorView query(Memory which, i64 i) const { return chunk(which, i * B * T * H * D, H, D); }
  TensorView output(Memory which, i64 i) const { return chunk(which, i * B * T * H * Dv, H, Dv); }
  TensorView key(Memory block, i64 i) const { return chunk(block, i * B * T * G * D, G, D); }
  TensorView value(Memory block, i64 i) const { return chunk(block, B * T * G * (2 * D + i * Dv), G, Dv); }
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
    const TensorView part = output(kPart, 0), part_lse = stats(memory(kPartLse), 0);
    for (int step = 0; step < P; ++step) {
      for_each_pair((rank + P - step) % P, params, [&](i64 i, i64 j, const AttentionParams& p) {
        ctx.ops.attention_fwd(part, part_lse, tokens(x.q, i), key(block, j), value(block, j), p, ctx.stream);
        ctx.ops.attention_merge(output(kSum, i), stats(lse, i), part, part_lse, first[i], ctx.stream);
        first[i] = false;
      });
      if (step + 1 < P) pass_on(block, next);
    }
    for (i64 i = 0; i < 2; ++i) store(tokens(o, i), part, output(kSum, i));
  }

  void backward(const Heads& d, TensorView dout, const Heads& x, TensorView o, TensorView lse,
                const AttentionParams& params) const {
    load(x);
    Memory block = kBlock, next = kNextBlock, dblock = kDBlock, next_dblock = kNextDBlock;
    const TensorView dq = query(kDQ, 0), dk = chunk(kDK, 0, G, D), dv = chunk(kDV, 0, G, Dv);
    for (int step = 0; step < P; ++step) {
      bool first_query[2] = {step == 0, step == 0}, first_key[2] = {step == 0, step == 0};
      const auto add = [&](TensorView sum, TensorView part, bool first) {
        ctx.ops.fold(sum, {&part, 1}, !first, ctx.stream);
      };
      for_each_pair((rank + P - step) % P, params, [&](i64 i, i64 j, const AttentionParams& p) {
        ctx.ops.attention_bwd(dq, dk, dv, tokens(dout, i), tokens(x.q, i), key(block, j), value(block, j), tokens(o, i),
                              stats(lse, i), p, ctx.stream);
        add(query(kDQSum, i), dq, first_query[i]);
        add(key(dblock, j), dk, first_key[j]);
        add(value(dblock, j), dv, first_key[j]);
        first_query[i] = first_key[j] = false;
      });
      if (step + 1 < P) pass_on(block, next);
      pass_on(dblock, next_dblock);  // the last time: to its owner
    }
    for (i64 i = 0; i < 2; ++i) {
      store(tokens(d.q, i), dq, query(kDQSum, i));
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

void attend_made(const PassContext& ctx, TensorView o, TensorView lse, TensorView q, std::span<const TensorView> fresh,
                 const AttentionParams& params, FunctionRef<Heads(const KvCache&)> make) {
  if (ctx.caches.empty()) return;
  keep(ctx, fresh);
  AttentionParams p = of_generation(ctx, params, q.dim(2));
  for_sequences(ctx, [&](KvCache& cache, i64 first, i64 T) {
    const Heads made = make(cache);
    p.grid.row0 = cache.length - T;
    ctx.ops.attention_fwd(some_tokens(o, first, T), TensorView::of(lse.data, DType::F32, {1, q.dim(2), T}),
                          some_tokens(q, first, T), made.k, made.v, p, ctx.stream);
  });
}

void copy_cached(const PassContext& ctx, const KvCache& cache, size_t array, TensorView to) {
  const TensorView rows = cache.arrays[array];
  for (i64 t = 0; t < cache.length; t += cache.block) {
    const i64 n = std::min(cache.length - t, cache.block), row = std::max<i64>(0, cache.blocks[t / cache.block]);
    ctx.ops.copy_heads(some_tokens(to, t, n), some_tokens(rows, row * cache.block, n), ctx.stream);
  }
}

void rotate(const PassContext& ctx, TensorView x, const RopeViews& rotation, const RopeParams& params) {
  x.shape[3] = 2 * rotation.cos.dim(1);                                           // the others stay as they are
  if (ctx.positions.dim(0) != ctx.T) x.shape[0] = 1, x.shape[1] = ctx.B * ctx.T;  // each row has its own position
  ctx.ops.rope(x, x, rotation.cos, rotation.sin, ctx.positions, params, ctx.stream);
}

void plan_attention(LayerActs& acts, ActivationPlanner& planner, const Shard& shard, const PlannedPass& pass,
                    const HeadCounts& n) {
  if (shard.sp == 1 || pass.mode == Mode::Generate) return;
  const bool train = pass.mode == Mode::Train;
  const auto take = [&](DType dtype, std::initializer_list<i64> sizes) {
    for (const i64 elems : sizes) acts.exchange.push_back(planner.temporary(dtype, {elems}));
  };
  const auto work = pass.work, f32 = DType::F32;
  // Elements on this rank: of queries, outputs, and of keys and values together.
  const i64 R = pass.rows(), Q = R * n.q * n.dim, O = R * n.q * n.value_dim, K = R * n.kv * n.dim,
            V = R * n.kv * n.value_dim;
  // In the order of Memory.
  if (shard.mode == SequenceMode::Ulysses) {
    const i64 share = R * kv_share(n.kv, shard.sp) * shard.sp, k = share * n.dim, v = share * n.value_dim;
    const i64 message = Q + k + v + (train ? 2 * O : 0);  // at most
    take(work, {message, message, Q, k, v, O});
    if (train) take(work, {O, Q, k, v});
  } else {
    take(work, {K + V, K + V, O / 2});
    take(f32, {R * n.q / 2, O});
    if (train) {
      take(f32, {K + V, K + V});
      take(work, {Q / 2, K / 2, V / 2});
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
