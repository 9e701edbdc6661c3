// SPDX-License-Identifier: Apache-2.0
#include "infer/writer.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "comm/message_tag.h"
#include "infer/writing_memory.h"
#include "model/models.h"
#include "plan/stage.h"

namespace ds::infer {
namespace {

using model::Mode;

// A sequence in progress, with its keys and values.
struct Sequence {
  size_t prompt = 0;
  i64 place = 0;              // index among the sequences processed together
  std::vector<i32> fresh;     // tokens for the next pass: the prompt, then the last token
  i64 seen = 0, written = 0;  // tokens of both in the caches; tokens generated
  std::vector<LayerCaches> kept;
  std::vector<model::KvCache> caches;  // by layer
};

class Writer {
 public:
  Writer(stage::Stage& stage, std::span<const std::vector<i32>> prompts, const WriteOptions& options)
      : stage_(stage),
        model_(stage.model()),
        plan_(stage.plan()),
        device_(stage.device()),
        prompts_(prompts),
        options_(options) {
    const ModelConfig& config = stage.model_config();
    for (size_t p = 0; p < prompts.size(); ++p)
      DS_ASSERT(!prompts[p].empty() && (capacity(p) <= config.max_positions || config.any_length()));
    planned_ = plan_writing(model_, plan_, prompts, options.max_tokens, options.at_once);
    take_memory();
  }

  void write(const std::function<bool(size_t, i32)>& token) {
    for (size_t next = 0; next < prompts_.size() || !under_way_.empty();) {
      // The prompts of free places, each in a pass of its own; then one token for each sequence.
      if (next < prompts_.size() && std::ssize(under_way_) < planned_.at_once) {
        under_way_.push_back(begin(next++));
        run({&under_way_.back(), 1}, token);
      } else {
        run(under_way_, token);
      }
      std::erase_if(under_way_, [](const std::unique_ptr<Sequence>& s) { return s->fresh.empty(); });
    }
  }

 private:
  i64 capacity(size_t prompt) const { return std::ssize(prompts_[prompt]) + options_.max_tokens; }

  Buffer buffer(Tag tag, i64 bytes) { return device_buffer(device_, stage_.ledger(), tag, bytes); }

  void take_memory() {
    const WritingMemory& m = planned_;
    working_ = buffer(Tag::Activations, m.working_bytes);
    temporary_ = buffer(Tag::Workspace, m.temporary_bytes);
    message_ = buffer(Tag::Workspace, m.message_bytes);
    memory_ = m.pass;
    memory_.for_each([&](Tag tag, TensorView& v) {
      if (v.rank > 0) v.data = buffers_.emplace_back(buffer(tag, v.bytes())).data();
    });
    model::upload_layout(memory_, model_, device_);
    if (!m.rope_apart) model::upload_rotations(memory_, model_, 0, m.largest, device_);
    logits_.resize(m.at_once * model_.vocab);
    places_.resize(m.at_once);
  }

  std::unique_ptr<Sequence> begin(size_t prompt) {
    auto s = std::make_unique<Sequence>();
    s->prompt = prompt;
    s->fresh = prompts_[prompt];
    const auto taken = [&](const std::unique_ptr<Sequence>& other) { return other->place == s->place; };
    while (std::ranges::any_of(under_way_, taken)) ++s->place;

    s->kept = planned_.plan_caches(std::ssize(prompts_[prompt]));
    const i64 bytes = planned_.bytes_of(s->kept);
    // Reuses the memory of an ended sequence. In any order of sequences, the places together hold at most the largest
    // caches.
    Buffer& memory = places_[s->place];
    if (memory.bytes() < bytes) {
      memory = {};
      memory = buffer(Tag::Activations, bytes);
    }
    lay_out(*s, static_cast<char*>(memory.data()));
    if (planned_.rope_apart)
      model::upload_rotations(memory_, model_, s->place * planned_.largest, capacity(prompt), device_);
    return s;
  }

  // Lays out the caches of a sequence: for each shape the pages, then the arrays of one layer after the other.
  void lay_out(Sequence& s, char* at) {
    s.caches.resize(model_.layers.size());
    for (const LayerCaches& of : s.kept) {
      const KeptKeys& keys = of.keys;
      const std::vector<TensorView> arrays = planned_.arrays_of(of);
      const i32* pages = nullptr;
      if (keys.page() > 0) {
        // Keys that are not kept are not seen, but kernels read them and multiply by 0, so they must be numbers.
        std::vector<i32> places = keys.places();
        std::ranges::replace(places, -1, 0);
        device_.upload(at, places.data(), std::ssize(places) * 4);
        pages = reinterpret_cast<const i32*>(std::exchange(at, at + WritingMemory::pages_bytes(keys)));
        device_.zero(at, std::ssize(of.layers) * planned_.array_bytes(of));
      }
      for (const i64 l : of.layers) {
        model::KvCache& cache = s.caches[l];
        cache = {.arrays = arrays, .page = keys.page(), .places = keys.places(), .pages = pages};
        for (TensorView& array : cache.arrays)
          array.data = std::exchange(at, at + align_up(array.bytes(), WritingMemory::kCacheAlign));
      }
    }
  }

  // A pass over the fresh tokens of the sequences, which have equally many; then each sequence's next token.
  void run(std::span<const std::unique_ptr<Sequence>> sequences, const std::function<bool(size_t, i32)>& token) {
    const i64 B = std::ssize(sequences), T = std::ssize(sequences.front()->fresh), V = model_.vocab;
    upload_tokens(sequences);
    const TensorView logits = memory_.logits.rows(0, B);
    if (model_.shard.tp > 1) device_.zero(logits.data, logits.bytes());  // the ranks' parts are added
    run_layers(sequences, B, T);
    stage_.mesh()
        .pp()
        .broadcast(logits.data, logits.bytes(), plan_.last_stage, message_text(Axis::Pp, Collective::Broadcast))
        .wait();
    device_.download(logits_.data(), logits.data, logits.bytes());
    for (i64 b = 0; b < B; ++b) {
      Sequence& s = *sequences[b];
      s.seen += T;
      const std::span<const float> row(logits_.data() + b * V, static_cast<size_t>(V));
      DS_CHECK(std::ranges::all_of(row, [](float y) { return std::isfinite(y); }), Errc::Numeric,
               "the logits of token {} are not finite: weights or activations exceed the range of {}", s.seen,
               dtype_name(plan_.work));
      const i32 id = sample(row, options_.sampling, s.seen, order_);
      s.fresh.assign(1, id);
      if (!token(s.prompt, id) || ++s.written == options_.max_tokens) s.fresh.clear();
    }
  }

  void upload_tokens(std::span<const std::unique_ptr<Sequence>> sequences) {
    ids_.clear(), rotations_.clear(), positions_.clear();
    for (const auto& s : sequences) {
      const i64 first = planned_.rope_apart ? s->place * planned_.largest : 0;
      for (i64 t = 0; t < std::ssize(s->fresh); ++t) {
        positions_.push_back(narrow<i32>(s->seen + t));
        rotations_.push_back(narrow<i32>(first + s->seen + t));
      }
      ids_.insert(ids_.end(), s->fresh.begin(), s->fresh.end());
    }
    const i64 bytes = std::ssize(ids_) * 4;
    device_.upload(memory_.ids.data, ids_.data(), bytes);
    device_.upload(memory_.positions.data, rotations_.data(), bytes);
    device_.upload(memory_.row_positions.data, positions_.data(), bytes);
  }

  void run_layers(std::span<const std::unique_ptr<Sequence>> sequences, i64 B, i64 T) {
    model::PassContext ctx = stage_.context(memory_, {.mode = Mode::Generate, .B = B, .T = T});
    std::vector<model::KvCache*> caches(sequences.size());
    ctx.caches = caches;
    TensorView x{};
    for (size_t c = 0; c < plan_.stage.chunks.size(); ++c) {
      const plan::ChunkPlan& chunk = plan_.stage.chunks[c];
      model::ActivationPlanner planner({.working = working_.data(), .temporary = temporary_.data()});
      const auto acts = plan::plan_acts(model_, chunk, plan_, planner, Mode::Generate, {B, T, B * T});
      DS_ASSERT(planner.working_bytes() <= planned_.working_bytes &&
                planner.temporary_bytes() <= planned_.temporary_bytes);
      if (chunk.receives()) {
        x = TensorView::of(message_.data(), plan_.work, {B * T, model_.hidden});
        stage_.receive(pipeline::Op::RecvActivation, static_cast<i64>(c), x).wait();
      }
      x = stage_.forward(c, ctx, x, acts, [&](i64 l) {
        for (size_t b = 0; b < sequences.size(); ++b) caches[b] = &sequences[b]->caches[l];
      });
      if (!chunk.last && !plan_.stage.stays(c))
        stage_.send(pipeline::Op::SendActivation, static_cast<i64>(c), x).wait();
    }
  }

  stage::Stage& stage_;
  const model::Model& model_;
  const plan::RunPlan& plan_;
  Device& device_;
  std::span<const std::vector<i32>> prompts_;
  WriteOptions options_;
  WritingMemory planned_;
  model::PassMemory memory_;
  std::vector<Buffer> buffers_, places_;  // places_: of caches
  Buffer working_, temporary_, message_;
  std::vector<std::unique_ptr<Sequence>> under_way_;
  std::vector<float> logits_;
  std::vector<i32> ids_, rotations_, positions_, order_;
};

}  // namespace

void write(stage::Stage& stage, std::span<const std::vector<i32>> prompts, const WriteOptions& options,
           const std::function<bool(size_t, i32)>& token) {
  if (!prompts.empty()) Writer(stage, prompts, options).write(token);
}

}  // namespace ds::infer
