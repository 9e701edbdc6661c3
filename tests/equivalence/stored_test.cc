// SPDX-License-Identifier: Apache-2.0
// Frozen parameters that are stored in 16 bits, or as codes of 8 or 4 bits, beside trained ones in the work dtype: a
// run with them takes the steps of one whose frozen parameters are their decoded values, however it is cut; its memory
// has their codes alone, and its checkpoints the values that it used.

#include <list>

#include "checkpoint/reader.h"
#include "ds/linear.h"
#include "equivalence/checkpoints.h"
#include "equivalence/serving.h"
#include "equivalence/tiers.h"

namespace ds::testing {
namespace stored_test {

using model::Storage;

constexpr i64 kSteps = 3;

const ModelConfig kModels[] = {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), of_four_heads(tiny_bert())};

// The matrices of the first two blocks are stored, in these forms in turn.
using Forms = std::vector<Storage>;
void store_blocks(model::Model& model, const Forms& forms) {
  if (forms.empty()) return;
  size_t next = 0, blocks = 0;
  for (auto& layer : model.layers) {
    if (!layer->is_block() || blocks++ == 2) continue;
    for (size_t r = 0; r < layer->rows().size(); ++r) {
      if (layer->rows()[r].shape.size() == 2 && layer->rows()[r].name.find(".lora_") == std::string::npos)
        layer->store(r, forms[next++ % forms.size()]);
    }
  }
}

model::Model model_of(const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
  return model::make_model(c, model::shard_of(c, mesh, coord), {.sequence = c.data.seq_length});
}

Hooks stored(const Forms& forms) {
  Hooks hooks;
  hooks.parts.model = [=](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    model::Model model = model_of(c, mesh, coord);
    store_blocks(model, forms);
    return model;
  };
  return hooks;
}

// Matrices of the first two blocks are frozen, and weights begin as the final ones of a run: its frozen parameters are
// decoded values, and its other ones are those that every run starts with.
Hooks decoded(const Config& config, const Trace& of) {
  const model::Model whole = model_of(config, {}, {});
  std::vector<std::vector<float>> values;
  i64 at = 0;
  for (const model::ParamRow* row : whole.params()) {
    const i64 first = std::exchange(at, at + row->numel());
    values.emplace_back(of.weights.begin() + first, of.weights.begin() + at);
  }
  Hooks hooks = stored({Storage::Work});
  hooks.start = [values](engine::Engine& engine) {
    const std::vector<const model::ParamRow*> rows = engine.model().params();
    engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
      if (!rows[static_cast<size_t>(param)]->trained) {
        std::copy_n(values[static_cast<size_t>(param)].begin() + begin, count, out);
      } else {
        engine.init_values(param, begin, count, out);
      }
    });
  };
  return hooks;
}

Config config(const ModelConfig& model, const Layout& l, DType work, i64 micro = 4) {
  Config c = config_of(model, l, micro);
  c.model.joined_products = false;  // matrices in different forms are apart, and those of one form may be joined
  c.bf16.enabled = work == DType::BF16;
  c.fp16 = {.enabled = work == DType::F16, .loss_scale = 256};
  c.communication_data_type = wire_type_of(work);
  return c;
}

Forms forms_of(DType work) {
  if (work == DType::F32) return {Storage::Int8, Storage::BF16, Storage::Int4, Storage::F16};
  return {Storage::Int8, Storage::Int4};
}

void expect_steps_of_decoded_values(
    const std::vector<Layout>& layouts, FunctionRef<void(Config&)> change = [](Config&) {}) {
  constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};
  size_t n = 0;
  for (const ModelConfig& model : kModels) {
    for (const Layout& l : layouts) {
      const DType work = kTypes[n++ % 3];
      Config c = config(model, l, work);
      change(c);
      const std::string what = fmt::format("{} {} {}", family_name(model.family), l.name(), dtype_name(work));
      const Trace got = train_threads(c, l.ranks(), kSteps, 1, stored(forms_of(work)));
      const Trace want = train_threads(c, l.ranks(), kSteps, 1, decoded(c, got));
      const Trace exact = train_threads(c, l.ranks(), kSteps, 1, stored({Storage::Work}));
      expect_same_training(got, want, what);
      EXPECT_TRUE(same_bits(got.logits, want.logits)) << what;
      EXPECT_EQ(std::bit_cast<u64>(got.eval_loss), std::bit_cast<u64>(want.eval_loss)) << what;
      EXPECT_FALSE(same_bits(got.losses, exact.losses)) << what << ": nothing was stored";
      EXPECT_NEAR(got.losses.front(), exact.losses.front(), 0.1) << what;
      expect_planned(got, kSteps, what);
    }
  }
}

TEST(Stored, TakesTheStepsOfItsDecodedValuesAtEveryStage) {
  expect_steps_of_decoded_values(
      {{}, {.dp = 2, .stage = 0}, {.dp = 2, .stage = 1}, {.dp = 3, .stage = 2}, {.stage = 3}, {.dp = 4, .stage = 3}});
}

TEST(Stored, TakesTheStepsOfItsDecodedValuesInPipelinesAndTensorParallelRuns) {
  expect_steps_of_decoded_values({{.pp = 2, .stage = 1},
                                  {.dp = 2, .pp = 2, .stage = 3},
                                  {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                                  {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 2, .stage = 3},
                                  {.tp = 2},
                                  {.dp = 2, .tp = 2, .sequence = true, .stage = 2},
                                  {.sp = 2, .stage = 3},
                                  {.dp = 2, .checkpoints = Granularity::Layer, .stage = 1}});
}

TEST(Stored, TakesTheStepsOfItsDecodedValuesInTiles) {
  expect_steps_of_decoded_values({{.stage = 3}, {.dp = 2, .stage = 3}}, [](Config& c) { c.zero.tile_size = 1000; });
}

// Gathered whole in advance or each time, sent as codes of other weights or gathered from a second shard.
TEST(Stored, TakesTheStepsOfItsDecodedValuesHoweverItIsGathered) {
  expect_steps_of_decoded_values({{.dp = 2, .stage = 3}}, [](Config& c) {
    c.zero.max_reuse_distance = 1'000'000'000;
    c.zero.param_persistence_threshold = 5000;
  });
  expect_steps_of_decoded_values({{.dp = 4, .stage = 3}}, [](Config& c) { c.zero.hpz_partition_size = 2; });
}

TEST(Stored, IsTheSameInEveryArrangement) {
  for (const ModelConfig& model : kModels) {
    const auto train = [&](const Layout& l) {
      return train_threads(config(model, l, DType::BF16, 8), l.ranks(), kSteps, 1, stored(forms_of(DType::BF16)));
    };
    const Trace one = train({});
    for (const Layout& l : {Layout{.dp = 2},
                            {.dp = 2, .stage = 1},
                            {.dp = 4, .stage = 2},
                            {.dp = 2, .stage = 3},
                            {.dp = 4, .stage = 3},
                            {.dp = 2, .pp = 2, .stage = 3}})
      expect_same_training(train(l), one, fmt::format("{} {}", family_name(model.family), l.name()));
  }
}

TEST(Stored, IsTheSameInEveryTier) {
  const TempDirectory dir;
  std::list<Serving> servers;
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{.dp = 2, .stage = 1}, {.dp = 2, .pp = 2, .stage = 3}}) {
      Config c = tier_config(l, optimizer_named("AdamW"), work);
      c.zero.sub_group_size = 4 * kStateBlock;
      const Hooks hooks = stored(forms_of(work));
      const Trace memory = train_threads(c, l.ranks(), kTierSteps, 1, hooks);
      const auto expect = [&](const std::string& what, FunctionRef<void(Config&)> change, const Hooks& with) {
        Config other = c;
        change(other);
        const Trace t = train_threads(other, l.ranks(), kTierSteps, 1, with);
        const std::string name = fmt::format("{} {} {}", dtype_name(work), l.name(), what);
        expect_same_training(t, memory, name);
        EXPECT_EQ(t.counted, t.predicted) << name;
      };
      Hooks files = hooks;
      files.after_step = with_predicted_traffic(kTierSteps, "nvme").after_step;
      expect(
          "nvme",
          [&](Config& o) {
            o.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
            o.zero.offload_optimizer.pipeline_read = o.zero.offload_optimizer.pipeline_write = false;
            if (l.stage == 3) o.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
          },
          files);
      expect(
          "cpu",
          [&](Config& o) {
            o.zero.offload_optimizer = {.device = OffloadDevice::Cpu};
            if (l.stage == 3) o.zero.offload_param = {.device = OffloadDevice::Cpu};
          },
          hooks);
      Config of_server = served(c, servers.emplace_back());
      expect_same_training(train_threads(of_server, l.ranks(), kTierSteps, 1, hooks), memory, "a server");
    }
  }
}

i64 bytes(const Trace& t, Tag tag) { return t.counted[static_cast<size_t>(tag)]; }

// The four matrices of two blocks of GPT-2 with C = 48 and F = 64 have one form. Every row begins at a block
// of 128 elements: the vectors of a block take 7 x 128 + 128 + 48.
TEST(Stored, CostsItsCodesAlone) {
  constexpr i64 C = 48, F = 64, kMatrices = C * 3 * C + C * C + 2 * C * F, kVectors = 1024 + 48;
  for (const i64 stage : {0, 1, 2, 3}) {
    for (const auto& [form, bits] : {std::pair{Storage::Int8, i64{8}}, {Storage::Int4, i64{4}}}) {
      for (const int P : {1, 2}) {
        const Layout l{.dp = P, .stage = stage};
        const Trace t = train_threads(config(kModels[0], l, DType::BF16), P, 2, 1, stored({form}));
        const std::string what = fmt::format("{} stage {} of {} ranks", model::storage_name(form), stage, P);
        const auto padded = [&](i64 n) { return align_up(n, 128 * P); };
        const i64 in_work_dtype = 2 * padded(kVectors) + padded(kMatrices + kVectors) + padded(67 * C) +
                                  padded(24 * C) + padded(128 + C),
                  codes = 2 * (kMatrices * bits / 8 + kMatrices / 128 * 4);
        EXPECT_EQ(bytes(t, Tag::Params), (2 * in_work_dtype + codes) / (stage == 3 ? P : 1)) << what;
        EXPECT_EQ(bytes(t, Tag::Master), 4 * in_work_dtype / (stage == 0 ? 1 : P)) << what;
        // Below stage 3 one block is decoded at a time.
        if (stage < 3) {
          EXPECT_EQ(bytes(t, Tag::Gathered), 2 * kMatrices) << what;
        }
        EXPECT_EQ(t.counted, t.predicted) << what;
      }
    }
  }
}

// A base of 4 bits, and low-rank branches, which alone are trained.
TEST(Stored, CarriesBranches) {
  for (const ModelConfig& model : kModels) {
    const auto train = [&](const Layout& l) {
      Hooks hooks;
      hooks.parts.model = [](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
        model::Model m = model_of(c, mesh, coord);
        for (auto& layer : m.layers) layer->attach([](auto&) { return model::LowRank{3, 0.7f}; });
        store_blocks(m, {Storage::Int4});
        return m;
      };
      Config c = config(model, l, DType::BF16, 8);
      ParamGroupConfig trained, others;
      static_cast<UpdateConfig&>(trained) = static_cast<UpdateConfig&>(others) = c.optimizer;
      trained.params = {"*.lora_*"};
      others.params = {"*"};
      others.frozen = true;
      c.optimizer.groups = {trained, others};
      const Trace t = train_threads(c, l.ranks(), 6, 1, hooks);
      EXPECT_EQ(t.counted, t.predicted) << l.name();
      return t;
    };
    const Trace one = train({});
    EXPECT_LT(one.losses.back(), one.losses.front()) << family_name(model.family);
    for (const Layout& l : {Layout{.dp = 2, .stage = 1}, {.dp = 4, .stage = 3}, {.dp = 2, .pp = 2, .stage = 3}})
      expect_same_training(train(l), one, fmt::format("{} {}", family_name(model.family), l.name()));
  }
}

TEST(Stored, IsResumedInEveryArrangement) {
  for (const DType work : {DType::F32, DType::BF16, DType::F16}) {
    const TempDirectory dir;
    const ModelConfig& model = kModels[1];
    const auto at = [&](const Layout& l) { return config(model, l, work, 4); };
    const Hooks hooks = stored(forms_of(work));
    const Layout first{.dp = 2, .stage = 3};
    const Trace whole = train_threads(at(first), 2, 5, 1, hooks);
    const Saved saved = train_and_save(at(first), first, 3, dir / "run", hooks);
    for (const Layout& l :
         {first, Layout{.dp = 4, .stage = 3}, {.stage = 0}, {.dp = 2, .pp = 2, .stage = 2}, {.dp = 2, .stage = 0}}) {
      const Trace t = resume(at(l), l, 2, saved.step, hooks);
      EXPECT_TRUE(same_bits(t.weights, whole.weights)) << l.name() << " " << dtype_name(work);
      EXPECT_EQ(t.losses.back(), whole.losses.back()) << l.name() << " " << dtype_name(work);
    }
    // Other forms, or none: a checkpoint contains values.
    const Trace plain = resume(at(first), first, 2, saved.step, stored({Storage::Work}));
    EXPECT_TRUE(same_bits(plain.weights, whole.weights)) << dtype_name(work);
    // Cut anew, and merged, without a model.
    (void)merge_checkpoint(saved.step, dir / "a.safetensors", {});
    (void)shard_checkpoint(saved.step, dir / "sharded", {.mesh = {.dp = 3}, .stage = 3});
    (void)merge_checkpoint(dir / "sharded", dir / "b.safetensors", {});
    EXPECT_EQ(bytes_of(dir / "a.safetensors"), bytes_of(dir / "b.safetensors"));
  }
}

TEST(Stored, IsRefusedWhereItMeansNothing) {
  const auto refused = [](DType work, FunctionRef<void(model::Model&)> change) -> std::string {
    const Config c = config(kModels[0], {}, work);
    model::Model model = model_of(c, {}, {});
    change(model);
    try {
      optim::freeze_groups(model, c);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Config);
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refused(DType::F32, [](model::Model& m) { store_blocks(m, {Storage::BF16}); }), "accepted");
  EXPECT_NE(refused(DType::BF16, [](model::Model& m) { store_blocks(m, {Storage::F16}); })
                .find("is stored as fp16, and the run computes in bf16"),
            std::string::npos);
  EXPECT_NE(refused(DType::F32, [](model::Model& m) { m.shared.front().storage = Storage::Int8; })
                .find("transformer.wte.weight is stored as int8 and trained"),
            std::string::npos);
}

}  // namespace stored_test
}  // namespace ds::testing
