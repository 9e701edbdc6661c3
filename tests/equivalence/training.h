// SPDX-License-Identifier: Apache-2.0
#pragma once
// Trains tiny models with ranks as threads and returns everything that a strategy must not change: the trace of losses
// and norms, and the whole state merged over ranks.

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "comm/make_communicator.h"
#include "data/documents.h"
#include "engine/engine.h"
#include "engine/host_state.h"
#include "engine/param_table.h"
#include "formats/tensor_io.h"
#include "infer/session.h"
#include "mesh/from_config.h"
#include "plan/planned.h"
#include "run/connect.h"
#include "run/served.h"

namespace ds::testing {

inline ModelConfig tiny_gpt2() {
  ModelConfig c;
  c.family = Family::Gpt2;
  c.vocab_size = 67;
  c.hidden = 36;
  c.layers = 3;
  c.heads = c.kv_heads = 3;
  c.head_dim = 12;
  c.intermediate = 4 * 36;
  c.max_positions = 24;
  return c;
}

inline ModelConfig tiny_llama() {
  ModelConfig c;
  c.family = Family::Qwen3;
  c.vocab_size = 61;
  c.hidden = 40;
  c.layers = 2;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.intermediate = 52;
  c.max_positions = 24;
  c.activation = Activation::Silu;
  c.tie_embeddings = false;
  c.attention_bias = c.output_bias = c.mlp_bias = false;
  c.qk_norm = true;
  return c;
}

// A model whose maps of one input are joined (LinearGroup), with biases that lie apart from the matrices.
inline ModelConfig joinable_qwen2() {
  ModelConfig c = tiny_llama();
  c.family = Family::Qwen2;
  c.hidden = 16;
  c.heads = 16;
  c.kv_heads = 8;
  c.head_dim = 32;
  c.intermediate = 64;
  c.qk_norm = false;
  c.attention_bias = true;
  return c;
}

// Multi-head latent attention, whose heads have values of another size than keys; tp and sp of 2 and 4 divide it.
inline ModelConfig tiny_latent(bool latent_queries = true) {
  ModelConfig c = tiny_llama();
  c.family = Family::Llama;
  c.qk_norm = false;
  c.hidden = 48;
  c.heads = c.kv_heads = 4;
  c.head_dim = 20;
  c.intermediate = 64;
  c.latent = {.rank = 24, .query_rank = latent_queries ? 16 : 0, .rope_dim = 8, .value_dim = 14};
  return c;
}

// `c` with four heads, and with widths that tp and sp of 2 and 4 divide.
inline ModelConfig of_four_heads(ModelConfig c) {
  c.kv_heads = c.kv_heads == c.heads ? 4 : 2;
  c.heads = 4;
  c.hidden = 48;
  c.head_dim = 12;
  c.intermediate = 64;
  return c;
}

inline ModelConfig tiny_bert() {
  ModelConfig c = tiny_gpt2();
  c.family = Family::Bert;
  c.vocab_size = 59;
  c.layers = 2;
  c.intermediate = 52;
  c.token_types = 2;
  c.activation = Activation::GeluErf;
  c.pad_token_id = -1;  // every token of its text is one
  return c;
}

// A configuration without a file: every value resolved.
inline Config tiny_config(const ModelConfig& model, int replicas, i64 accumulation, i64 stage) {
  Config c;
  c.model = model;
  c.batch = {.train = 2 * accumulation * replicas, .micro = 2, .accumulation = accumulation};
  c.zero.stage = stage;
  c.zero.param_persistence_threshold = 0;  // so that small models are really sharded
  c.zero.max_reuse_distance = 0;
  c.zero.overlap_comm = true;
  c.data.seq_length = 13;
  c.optimizer.lr = 3e-3;
  c.optimizer.weight_decay = 0.1;
  c.reduce_order = stage >= 2 ? ReduceOrder::Micro : ReduceOrder::Boundary;
  return c;
}

// Sample k of an endless synthetic text that a model can learn: ids of a noisy arithmetic progression.
inline void fill_sample(i64 sample, i64 vocab, std::span<i32> ids, std::span<i32> targets) {
  const RngKey key{99, 5, 0};
  const i64 start = key.bits(static_cast<u64>(3 * sample)) % vocab,
            stride = 1 + key.bits(static_cast<u64>(3 * sample + 1)) % 3;
  for (size_t t = 0; t < ids.size(); ++t) {
    ids[t] = static_cast<i32>((start + static_cast<i64>(t) * stride) % vocab);
    targets[t] = static_cast<i32>((start + static_cast<i64>(t + 1) * stride) % vocab);
  }
  if (sample % 5 == 0) targets[1] = -100;  // some positions do not count
}

inline void separate_documents(Config& c, i64 token) {
  c.data.document_token = token;
  c.data.separate_documents = true;
}

// The documents of whole sequences of `length` tokens, as data.document_token marks them; nothing if they are not kept
// apart.
inline void fill_documents(const Config& c, i64 length, std::span<const i32> ids, std::span<const i32> targets,
                           std::span<i32> documents) {
  const auto n = static_cast<size_t>(length);
  for (size_t at = 0; at < documents.size(); at += n)
    find_marked_documents(DocumentRule::of(c.data), c.model.causal(), ids.subspan(at, n), targets.subspan(at, n),
                          documents.subspan(at, n));
}

struct Trace {
  std::vector<double> losses, norms, scales, lrs;
  std::vector<double> aux_losses;     // of a model whose layers add losses
  std::vector<ExpertTokens> experts;  // of all steps
  std::vector<bool> skipped;
  update::Update::NamedNorms compression{};  // of the last step
  std::vector<float> logits;                 // after the last step, of samples that are the same on every rank
  double eval_loss = 0;                      // of the same
  std::vector<float> weights;                // whole, in the order of the parameters
  PerState<std::vector<float>> states;       // of optimizers, likewise; zero where a parameter has none
  plan::TagBytes counted{}, predicted{};
  std::map<std::string, CommCount> sent, planned;  // of rank 0, over all steps; per step
};

struct Hooks {
  engine::EngineParts parts = {};
  std::function<void(plan::RunPlan&)> change_plan = {};  // of each rank, before its engine is made
  std::vector<DpSplit> splits = {};                      // of the mesh
  bool same_logits = true;                               // all ranks of dp compute with the same parameters
  std::function<void(engine::Engine&)> start = {};       // instead of random weights
  std::function<i64(i64 step)> length = {};  // tokens of the samples of step s, fewer than the configuration's
  // Called on every rank before and after step s (from 0), and when all else is done; may poison the engine.
  std::function<void(engine::Engine&, i64 step)> before_step = {}, after_step = {};
  std::function<void(engine::Engine&)> at_end = {};
};

// Trains on a device; returns the trace (merged state on every rank).
inline Trace train_on(Device& device, Mesh& mesh, const Config& config, i64 steps, const Hooks& hooks = {}) {
  Trace trace;
  MemoryLedger ledger;
  engine::EngineParts parts = hooks.parts;
  if (hooks.change_plan) {
    const auto planned = std::make_shared<plan::Planned>(config, mesh.shape(), mesh.rank(), device.kind());
    hooks.change_plan(planned->plan);
    parts.planned = planned;
  }
  engine::Engine engine(config, mesh, ledger, device, parts);
  hooks.start ? hooks.start(engine) : engine.init_weights();
  if (engine.server() != nullptr) {
    const engine::ParamTable table = engine::make_param_table(engine.config(), engine.model(), engine.plan());
    CheckpointMeta meta;
    meta.work_dtype = engine.plan().work;
    meta.optimizer = table.optimizer;
    run::publish_states(engine, engine.served_record(), meta, table.params);
  }
  mesh.reset_counts();
  const i64 B = config.batch.micro, T = config.data.seq_length, m = config.batch.accumulation;
  const MeshShape& shape = mesh.shape();
  std::vector<i32> ids(static_cast<size_t>(m * B * T)), targets(ids.size()),
      documents(config.data.separate_documents ? ids.size() : 0);
  for (auto* values : {&trace.losses, &trace.norms, &trace.scales, &trace.lrs})
    values->reserve(static_cast<size_t>(steps));
  trace.skipped.reserve(steps);
  const auto note = [&](const StepRecord& r) {
    trace.losses.push_back(r.loss);
    trace.norms.push_back(r.grad_norm);
    trace.scales.push_back(r.loss_scale);
    if (r.aux_loss) trace.aux_losses.push_back(*r.aux_loss);
    trace.experts.insert(trace.experts.end(), r.experts.begin(), r.experts.end());
    trace.lrs.push_back(r.lr);
    trace.skipped.push_back(r.skipped);
    trace.compression = engine.compression();
  };
  for (i64 step = engine.progress().step, end = step + steps; step < end; ++step) {
    const i64 length = hooks.length ? hooks.length(step) : T;
    engine.train_at(length);
    for (i64 j = 0; j < m; ++j) {
      for (i64 b = 0; b < B; ++b) {
        const i64 worker = step * shape.workers + mesh.coord().worker;
        const i64 sample = ((worker * m + j) * shape.dp + mesh.coord().dp) * B + b;
        const size_t at = static_cast<size_t>((j * B + b) * length), n = static_cast<size_t>(length);
        fill_sample(sample, config.model.vocab_size, std::span(ids).subspan(at, n), std::span(targets).subspan(at, n));
      }
    }
    if (hooks.before_step) hooks.before_step(engine, step);
    const size_t all = static_cast<size_t>(m * B * length);
    const std::span<i32> begins = std::span(documents).first(documents.empty() ? 0 : all);
    fill_documents(config, length, ids, targets, begins);
    engine.take_step({std::span(ids).first(all), std::span(targets).first(all), begins}, note);
    if (!hooks.after_step) continue;
    engine.finish_step(note);
    hooks.after_step(engine, step);
  }
  engine.finish_step(note);
  trace.sent = mesh.counts();
  trace.planned = engine.plan().traffic.last;
  trace.predicted = engine.plan().memory.by_tag;
  for (size_t t = 0; t < trace.counted.size(); ++t) trace.counted[t] = ledger.peak(static_cast<Tag>(t));

  // Every rank's own forward pass over the parameters in their work type, as the last step published them.
  trace.eval_loss =
      *engine.evaluate(1, [&](i64, std::span<i32> eval_ids, std::span<i32> eval_targets, std::span<i32> begins) {
        for (i64 b = 0; b < B; ++b) {
          const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
          fill_sample(1'000'000 + b, config.model.vocab_size, eval_ids.subspan(at, n), eval_targets.subspan(at, n));
        }
        fill_documents(config, T, eval_ids, eval_targets, begins);
        return true;
      });
  engine.read_logits(trace.logits);

  // Merge: every rank writes what it saves, then everything is summed (the rest is zero).
  i64 total = 0;
  std::vector<i64> first;
  for (const model::ParamRow* row : engine.model().params()) {
    first.push_back(total);
    total += row->whole_numel();
  }
  trace.weights.assign(static_cast<size_t>(total), 0.0f);
  for (const State s : kOptimizerStates) {
    if (engine.plan().groups.any_has(s)) trace.states[s].assign(static_cast<size_t>(total), 0.0f);
  }
  engine::HostState held(engine, engine.saved_pieces());
  held.download();
  for (const StatePiece& st : held.pieces()) {
    const model::ParamRow& row = engine.row_of(st.param);
    const bool own_master = st.data[State::Master] == nullptr;
    const DType dtype = own_master ? engine.plan().work_of(st.param) : DType::F32;
    const auto* const weights = static_cast<const char*>(st.data[own_master ? State::Param : State::Master]);
    model::SliceMap(row.slice, row.whole_shape()).for_each_run(st.begin, st.count, [&](i64 local, i64 global, i64 n) {
      const size_t at = static_cast<size_t>(first[st.param] + global);
      convert_elements(DType::F32, &trace.weights[at], dtype, weights + (local - st.begin) * dtype_bytes(dtype), n);
      for (const State s : kOptimizerStates) {
        if (st.data[s] != nullptr) decode_state(&trace.states[s][at], st.state(s), local - st.begin, n);
      }
    });
  }
  mesh.world().all_reduce(trace.weights.data(), total, DType::F32, ReduceOp::Sum, "test.merge").wait();
  for (const State s : kOptimizerStates) {
    if (!trace.states[s].empty())
      mesh.world().all_reduce(trace.states[s].data(), total, DType::F32, ReduceOp::Sum, "test.merge").wait();
  }
  if (hooks.at_end) hooks.at_end(engine);
  return trace;
}

// On the CPU, over an existing communicator.
inline Trace train_rank(std::unique_ptr<Communicator> world, const Config& config, i64 steps, int num_threads,
                        const OpTable& ops, const Hooks& hooks) {
  const auto device = make_cpu_device(ops, num_threads);
  const int size = world->size();
  const CommOptions options{.timeout_s = 60, .progress_thread = config.zero.overlap_comm};
  Mesh mesh(std::move(world), mesh_shape(config, size), options, {}, mesh_splits(config, hooks.splits));
  return train_on(*device, mesh, config, steps, hooks);
}

// Calls body on each rank's engine, with random weights, over threads.
inline void with_engines(const Config& config, int ranks, const std::function<void(engine::Engine&)>& body,
                         const OpTable& ops = *cpu_ops(), int num_threads = 1, const engine::EngineParts& parts = {}) {
  std::vector<std::unique_ptr<Communicator>> worlds = make_thread_communicators(ranks, {.timeout_s = 60});
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (auto& world : worlds) {
    threads.emplace_back([&, &mine = world] {
      try {
        const auto device = make_cpu_device(ops, num_threads);
        const MeshShape shape = mesh_shape(config, ranks);
        Mesh mesh(std::move(mine), shape, {.timeout_s = 60}, {},
                  mesh_splits(config, model::expert_splits(model::shard_of(config, shape, {}))));
        MemoryLedger ledger;
        engine::Engine engine(config, mesh, ledger, *device, parts);
        engine.init_weights();
        body(engine);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (error) std::rethrow_exception(error);
}

struct Writing {
  i64 max_tokens = 8;
  infer::Sampling sampling{.temperature = 0};
  SessionSizes sizes{.at_once = 1, .context = 0};  // context 0: as much as is needed
};
using Texts = std::vector<std::vector<i32>>;

// Collects the tokens of each sequence, which ends at the token `last`, too.
struct TokenCollector : infer::Session::Listener {
  explicit TokenCollector(i32 end = -1) : last(end) {}
  bool token(infer::Session::Id id, i32 token, const infer::Row& row) override {
    texts[id].push_back(token);
    logprobs[id].push_back(row.logprob);
    return token != last;
  }
  void scored(infer::Session::Id id, i64 at, const infer::Row& row) override {
    EXPECT_TRUE(scores[id].emplace(at, row.logprob).second);
  }
  void ended(infer::Session::Id id) override { EXPECT_TRUE(has_ended.insert(id).second); }

  i32 last;
  std::map<infer::Session::Id, std::vector<i32>> texts;
  std::map<infer::Session::Id, std::vector<float>> logprobs;
  std::map<infer::Session::Id, std::map<i64, float>> scores;
  std::set<infer::Session::Id> has_ended;
};

inline SessionSizes sizes_for(const Texts& prompts, const Writing& w) {
  SessionSizes sizes = w.sizes;
  for (const auto& prompt : prompts) sizes.context = std::max(sizes.context, std::ssize(prompt) + w.max_tokens);
  return sizes;
}
// The completions that a model writes for prompts.
inline Texts texts_of(engine::Engine& engine, const Texts& prompts, const Writing& w, i32 last = -1) {
  infer::Session session(engine.stage(), sizes_for(prompts, w));
  TokenCollector collector(last);
  for (const auto& prompt : prompts)
    session.add({.tokens = prompt, .max_tokens = w.max_tokens, .sampling = w.sampling});
  while (!session.idle()) session.step(collector);
  EXPECT_EQ(collector.has_ended.size(), prompts.size());
  Texts texts;
  for (size_t i = 0; i < prompts.size(); ++i) texts.push_back(collector.texts[i]);
  return texts;
}
inline std::vector<i32> text_of(engine::Engine& engine, std::vector<i32> prompt, const Writing& w) {
  return texts_of(engine, {std::move(prompt)}, w)[0];
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The traces of all ranks. On `comms`, or on new ones over threads.
inline std::vector<Trace> traces_of_threads(const Config& config, int ranks, i64 steps, int num_threads = 1,
                                            const Hooks& hooks = {},
                                            std::vector<std::unique_ptr<Communicator>> comms = {},
                                            const OpTable& ops = *cpu_ops()) {
  if (comms.empty()) {
    comms = make_thread_communicators(ranks, {.timeout_s = 60, .progress_thread = config.zero.overlap_comm});
  }
  std::vector<Trace> traces(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr error;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const size_t at = static_cast<size_t>(r);
      try {
        traces[at] = train_rank(std::move(comms[at]), config, steps, num_threads, ops, hooks);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (error) std::rethrow_exception(error);
  return traces;
}

// Rank 0's trace; checks that all ranks agree, and that each has the memory of its plan.
inline Trace train_threads(const Config& config, int ranks, i64 steps, int num_threads = 1, const Hooks& hooks = {},
                           std::vector<std::unique_ptr<Communicator>> comms = {}, const OpTable& ops = *cpu_ops()) {
  std::vector<Trace> traces = traces_of_threads(config, ranks, steps, num_threads, hooks, std::move(comms), ops);
  for (int r = 0; r < ranks; ++r) {
    Trace& t = traces[r];
    EXPECT_TRUE(same_bits(t.losses, traces[0].losses)) << "rank " << r;
    EXPECT_TRUE(same_bits(t.norms, traces[0].norms)) << "rank " << r;
    EXPECT_TRUE(same_bits(t.aux_losses, traces[0].aux_losses)) << "rank " << r;
    EXPECT_EQ(t.scales, traces[0].scales) << "rank " << r;
    EXPECT_EQ(t.skipped, traces[0].skipped) << "rank " << r;
    EXPECT_EQ(std::bit_cast<u64>(t.eval_loss), std::bit_cast<u64>(traces[0].eval_loss)) << "rank " << r;
    if (traces[0].logits.empty()) traces[0].logits = t.logits;  // of another stage
    EXPECT_TRUE(t.logits.empty() || !hooks.same_logits || same_bits(t.logits, traces[0].logits)) << "rank " << r;
    for (size_t tag = 0; tag < t.counted.size(); ++tag) {
      // Plans don't know of a tier that checkpoints are copied to, and that sums of micro-batches go to.
      if (hooks.parts.tiers.states && hooks.start && static_cast<Tag>(tag) == Tag::Host) continue;
      if (hooks.parts.tiers.grads && static_cast<Tag>(tag) == Tag::GradAccum) continue;
      EXPECT_EQ(t.counted[tag], t.predicted[tag]) << "rank " << r << ": " << tag_name(static_cast<Tag>(tag));
    }
  }
  return traces[0];
}

inline void expect_same_experts(std::span<const ExpertTokens> got, std::span<const ExpertTokens> want,
                                const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].layer, want[i].layer) << what;
    EXPECT_EQ(got[i].tokens, want[i].tokens) << what << ": " << want[i].layer << ", record " << i;
    EXPECT_EQ(got[i].dropped, want[i].dropped) << what << ": " << want[i].layer << ", record " << i;
    EXPECT_EQ(got[i].entropy, want[i].entropy) << what << ": " << want[i].layer << ", record " << i;
  }
}

inline void expect_same_training(const Trace& got, const Trace& want, const std::string& what) {
  expect_same_experts(got.experts, want.experts, what);
  EXPECT_TRUE(same_bits(got.losses, want.losses)) << what << ": losses";
  EXPECT_TRUE(same_bits(got.norms, want.norms)) << what << ": norms";
  EXPECT_TRUE(same_bits(got.aux_losses, want.aux_losses)) << what << ": auxiliary losses";
  EXPECT_EQ(got.skipped, want.skipped) << what;
  EXPECT_TRUE(same_bits(got.logits, want.logits)) << what << ": logits after the last step";
  EXPECT_EQ(std::bit_cast<u64>(got.eval_loss), std::bit_cast<u64>(want.eval_loss)) << what << ": evaluation";
  EXPECT_TRUE(same_bits(got.weights, want.weights)) << what << ": weights";
  for (const State s : kOptimizerStates)
    EXPECT_TRUE(same_bits(got.states[s], want.states[s])) << what << ": " << state_name(s);
}

}  // namespace ds::testing
