// SPDX-License-Identifier: Apache-2.0
// Shards of a mesh: for data-, tensor-, sequence-parallel ranks and pipeline stages ds-shard writes the files that an
// engine with that mesh saves, piece by piece and byte by byte. A model that cannot be cut is reported.

#include <algorithm>

#include "base/json.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard.h"
#include "ds/checkpoint.h"
#include "equivalence/training.h"
#include "temp_directory.h"
#include "zero/ownership.h"

namespace ds {
namespace shard_mesh_test {

using namespace testing;

// Two of everything that tp cuts; a vocabulary that does not divide.
ModelConfig gpt2_model() {
  ModelConfig c = tiny_gpt2();
  c.hidden = 32;
  c.layers = 4;
  c.heads = c.kv_heads = 4;
  c.head_dim = 8;
  c.intermediate = 64;
  return c;
}
ModelConfig llama_model() {  // with 2 heads of keys and values
  ModelConfig c = tiny_llama();
  c.layers = 3;
  return c;
}
ModelConfig bert_model() {
  ModelConfig c = gpt2_model();
  c.family = Family::Bert;
  c.layers = 3;
  c.token_types = 2;
  c.activation = Activation::GeluErf;
  return c;
}

struct Case {
  MeshShape mesh;
  i64 stage = 0, threshold = 0;  // of persistent parameters
  std::string partition = "parameters";
  bool sequence = false;
};

std::string name_of(const ModelConfig& model, const Case& c) {
  return fmt::format("{} dp {} pp {} tp {} sp {} stage {} threshold {} {}", family_name(model.family), c.mesh.dp,
                     c.mesh.pp, c.mesh.tp, c.mesh.sp, c.stage, c.threshold, c.partition);
}

// Saves what an engine of each rank has after a step in which every state changes; returns the step.
std::string save_engine(const std::string& dir, const ModelConfig& model, const Case& c) {
  Config config = tiny_config(model, c.mesh.dp, 2, c.stage);
  config.data.seq_length = 16;
  config.zero.param_persistence_threshold = c.threshold;
  config.pipeline.stages = c.mesh.pp;
  config.pipeline.partition = c.partition;
  config.tensor_parallel = {.tp_size = c.mesh.tp, .sequence_parallel = c.sequence};
  config.sequence_parallel.size = c.mesh.sp;
  std::string step;
  auto comms = make_thread_communicators(c.mesh.world(), {.timeout_s = 60, .progress_thread = true});
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (int rank = 0; rank < c.mesh.world(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto device = make_cpu_device(*cpu_ops(), 1);
        Mesh mesh(std::move(comms[rank]), c.mesh, {.timeout_s = 60, .progress_thread = true});
        MemoryLedger ledger;
        engine::Engine engine(config, mesh, ledger, *device);
        engine.init_weights();
        std::vector<ParamEntry> params;
        for (const model::ParamRow* row : engine.model().params())
          params.push_back({row->name, row->whole_shape(), ""});
        for (const model::Tie& tie : engine.model().ties)
          params.push_back({tie.alias, std::ranges::find(params, tie.name, &ParamEntry::name)->shape, tie.name});
        engine::HostState state(engine, engine.saved_pieces());
        state.download();
        for (const StatePiece& p : state.pieces()) {  // another value for each element, on whichever rank
          const model::ParamRow& row = engine.row_of(p.param);
          const model::SliceMap map(row.slice, row.whole_shape());
          for (i64 i = 0; i < p.count; ++i) {
            p.values(State::ExpAvg)[i] = static_cast<float>(1000 * p.param + map.global_of(p.begin + i));
            p.values(State::ExpAvgSq)[i] = p.values(State::ExpAvg)[i] + 0.5f;
          }
        }
        CheckpointMeta meta;
        meta.step = 1;
        meta.mesh = c.mesh;
        meta.zero_stage = narrow<int>(c.stage);
        meta.layout_id = engine.plan().dp().layout.id();
        meta.model_config_json = Json::parse(model_config_json(model)).dump();  // on one line, as it is read back
        const std::string saved = save_checkpoint(dir, meta, params, state.pieces(), mesh.world());
        if (rank == 0) step = saved;
      } catch (const std::exception& e) {
        const std::lock_guard lock(mutex);
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return step;
}

std::string text_of(const PieceRange& p) {
  std::string slice;
  for (const auto& [begin, end] : p.slice.ranges) slice += fmt::format(" {}:{}", begin, end);
  return fmt::format("{}: {} + {} of dim {}{}", p.param, p.begin, p.count, p.slice.dim, slice);
}

void expect_same_pieces(const Sharding& got, const Manifest& want) {
  EXPECT_EQ(got.layout_id, want.meta.layout_id);
  ASSERT_EQ(got.ranks.size(), want.files.size());
  for (size_t r = 0; r < got.ranks.size(); ++r) {
    std::vector<std::string> g, w;
    for (const PieceRange& p : got.ranks[r]) g.push_back(text_of(p));
    for (const PieceRange& p : want.files[r].pieces) w.push_back(text_of(p));
    EXPECT_EQ(g, w) << "rank " << r;
  }
}

TEST(MeshShards, AreWhatRanksOfThatMeshSave) {
  const TempDirectory dir;
  int at = 0;
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    // In which every state is whole, to be cut.
    const std::string whole = save_engine(dir / fmt::format("{}", ++at), model, {});
    const CheckpointReader source(whole);
    for (const Case& c : {Case{},
                          {.mesh = {.tp = 2}},
                          {.mesh = {.tp = 4}, .stage = 1},  // of llama's heads of keys and values two ranks have one
                          {.mesh = {.pp = 2}},
                          {.mesh = {.pp = 5}, .stage = 2},
                          {.mesh = {.dp = 2, .pp = 3}, .stage = 3, .partition = "uniform"},
                          {.mesh = {.dp = 2, .tp = 2}, .stage = 2, .sequence = true},
                          {.mesh = {.tp = 2, .sp = 2}, .stage = 3},
                          {.mesh = {.dp = 2, .pp = 2, .tp = 2}, .stage = 0},
                          {.mesh = {.dp = 2, .pp = 2, .tp = 2}, .stage = 1, .partition = "type:block"},
                          {.mesh = {.dp = 2, .pp = 2, .tp = 2}, .stage = 3, .threshold = 100},
                          {.mesh = {.dp = 1, .pp = 2, .tp = 4}, .stage = 3, .threshold = 600},
                          {.mesh = {.dp = 3, .pp = 2, .tp = 1, .sp = 2}, .stage = 3, .threshold = 100},
                          {.mesh = {.dp = 2, .pp = 2, .tp = 2, .sp = 2}, .stage = 2}}) {
      SCOPED_TRACE(name_of(model, c));
      const CheckpointReader run(save_engine(dir / fmt::format("{}", ++at), model, c));
      const std::unique_ptr<StateSource> state = open_state(whole);
      const zero::LayoutOptions options{.num_ranks = 1,
                                        .stage = narrow<int>(c.stage),
                                        .persistence_threshold = c.threshold,
                                        .model_persistence_threshold = ZeroConfig{}.model_persistence_threshold};
      const Sharding sharding = shard_model(*state, model_to_cut(*state, ""), c.mesh, c.partition, options);
      expect_same_pieces(sharding, run.manifest());

      // The bytes: checksums of the contents of the files.
      const std::string out = dir / fmt::format("{}", ++at);
      std::filesystem::create_directory(out);
      Manifest m;
      write_sharded(*state, out, m, sharding, {});
      EXPECT_EQ(m.meta.mesh, c.mesh);
      const CheckpointReader written(find_checkpoint(out));
      EXPECT_EQ(written.manifest().params, run.manifest().params);
      ASSERT_EQ(written.manifest().files.size(), run.manifest().files.size());
      for (size_t f = 0; f < m.files.size(); ++f) {
        const auto &got = written.manifest().files[f].pieces, &want = run.manifest().files[f].pieces;
        ASSERT_EQ(got.size(), want.size());
        for (size_t p = 0; p < got.size(); ++p) {
          for (const State s : kStates) {
            ASSERT_EQ(got[p].states[s].has_value(), want[p].states[s].has_value());
            if (!got[p].states[s]) continue;
            EXPECT_EQ(got[p].states[s]->checksums, want[p].states[s]->checksums) << text_of(got[p]);
          }
        }
      }
      if (HasFailure()) return;
    }
  }
}

TEST(MeshShards, FromAnyMeshToAnyOther) {
  const TempDirectory dir;
  const ModelConfig model = llama_model();
  const std::string whole = save_engine(dir / "whole", model, {}), want = dir / "want.safetensors";
  merge_checkpoint(whole, want, {.optimizer = true});
  std::string from = want;
  int at = 0;
  for (const MeshShape& mesh : {MeshShape{.dp = 2, .pp = 2, .tp = 2}, MeshShape{.pp = 5, .tp = 4}, MeshShape{.dp = 3},
                                MeshShape{.dp = 2, .tp = 4, .sp = 3}, MeshShape{.pp = 2, .sp = 2}}) {
    for (const int stage : {0, 3}) {
      const std::string out = dir / fmt::format("{}", ++at), merged = out + ".safetensors";
      const ShardResult r = shard_checkpoint(from, out, {.mesh = mesh, .stage = stage});
      EXPECT_EQ(r.mesh, mesh);
      const CheckpointSummary summary = describe_checkpoint(out);
      EXPECT_EQ(summary.mesh, mesh);
      EXPECT_EQ(summary.world_size, mesh.world());
      merge_checkpoint(out, merged, {.optimizer = true, .verify = true});
      EXPECT_EQ(read_file(merged), read_file(want)) << at;
      from = out;
    }
  }
}

TEST(MeshShards, WhatCannotBeCutIsSaid) {
  const TempDirectory dir;
  const std::string whole = save_engine(dir / "whole", llama_model(), {});
  const auto shard = [&](const MeshShape& mesh, const std::string& config = "",
                         const std::string& partition = "parameters") {
    shard_checkpoint(whole, dir / "out", {.mesh = mesh, .config = config, .partition = partition});
  };
  EXPECT_ERROR(shard({.tp = 3}), Errc::Config,
               "--tp: the model's 4 heads cannot be shared by 3 ranks; 1, 2 or 4 would do");
  EXPECT_ERROR(shard({.pp = 6}), Errc::Config, "--pp: 6 parts are more than the 5 layers");
  EXPECT_ERROR(shard({.dp = 1000, .pp = 5, .tp = 1000}), Errc::Config, "more than 99999 ranks");
  EXPECT_ERROR(shard({.pp = 2}, "", "type:Mamba"), Errc::Config, "--partition: \"Mamba\" matches no layer");
  EXPECT_ERROR(shard({.pp = 2}, "", "even"), Errc::Config, "--partition: \"even\" is none of");
  EXPECT_ERROR(shard({.dp = 2}, dir.path()), Errc::Config, "--config");
  EXPECT_ERROR(shard({.tp = 2}, "", "uniform"), Errc::Config, "--partition");
  // Another model's config.json.
  ModelConfig other = llama_model();
  other.intermediate *= 2;
  write_file(dir / "config.json", model_config_json(other));
  EXPECT_ERROR(shard({.tp = 2}, dir.path()), Errc::Mismatch, "the model needs [104,40]");
  other.layers = 2;
  other.intermediate /= 2;
  write_file(dir / "config.json", model_config_json(other));
  EXPECT_ERROR(shard({.tp = 2}, dir.path()), Errc::Mismatch, "is not a parameter of the model");
  write_file(dir / "config.json", R"({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})");
  EXPECT_ERROR(shard({.tp = 2}, dir / "config.json"), Errc::Unavailable, "the architecture [\"MambaForCausalLM\"]");
  write_file(dir / "config.json", R"({"model_type": "qwen3"})");
  EXPECT_ERROR(shard({.tp = 2}, dir / "config.json"), Errc::Unavailable, "does not name an architecture");
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

TEST(MeshShards, TheManifestSaysTheMeshOrNothing) {
  const TempDirectory dir;
  Manifest m = CheckpointReader(save_engine(dir / "run", gpt2_model(), {.mesh = {.dp = 2}})).manifest();
  EXPECT_EQ(parse_manifest(format_manifest(m), "x").meta.mesh, (MeshShape{.dp = 2}));
  m.meta.mesh = {.dp = 2, .tp = 2};
  EXPECT_ERROR(parse_manifest(format_manifest(m), "x"), Errc::Corrupt, "a mesh of dp 2, pp 1, tp 2, sp 1, but 2 ranks");
  m.meta.mesh.reset();
  EXPECT_EQ(parse_manifest(format_manifest(m), "x").meta.mesh, std::nullopt);
}

TEST(MeshShards, EveryElementHasOneOwner) {
  for (const ModelConfig& config : {gpt2_model(), llama_model(), bert_model()}) {
    for (const MeshShape& mesh : {MeshShape{}, MeshShape{.dp = 3, .pp = 2, .tp = 4, .sp = 2}}) {
      std::vector<model::Model> shards;
      for (int r = 0; r < mesh.tp; ++r) shards.push_back(model::make_model(config, 1, {.tp = mesh.tp, .tp_rank = r}));
      std::vector<i64> cuts = {0};
      if (mesh.pp == 2) cuts.push_back(2);
      cuts.push_back(std::ssize(shards[0].layers));
      i64 elems = 0;
      const zero::LayoutOptions options{.stage = 3, .persistence_threshold = 50, .model_persistence_threshold = 500};
      for (const auto& pieces : zero::saved_pieces(shards, mesh, cuts, options)) {
        for (const zero::Piece& p : pieces) elems += p.count;
      }
      EXPECT_EQ(elems, shards[0].num_params());
    }
  }
}

}  // namespace shard_mesh_test
}  // namespace ds
