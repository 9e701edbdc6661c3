// SPDX-License-Identifier: Apache-2.0
#include "infer/session.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/message_tag.h"
#include "model/models.h"
#include "plan/stage.h"

namespace ds::infer {

using model::Mode;

// A request, and its progress.
struct Session::Sequence {
  Id id = 0;
  Request request;
  std::vector<i32> tokens;  // the prompt, what has been generated, and what is proposed
  i64 prompt = 0;
  i64 proposed = 0;                      // tokens that have not been verified
  bool unaided = false;                  // nothing is proposed for the next pass
  i64 until = 0;                         // its size when it ends, or rests
  i64 followed = 0;                      // size of the text of follow()
  i64 seen = 0;                          // tokens whose keys are in the cache
  i64 next_scored = 0;                   // the first token of the prompt whose score is still wanted
  i64 closed = 0;                        // blocks that other sequences may share
  i64 place = -1;                        // its tables of blocks, among those under way; -1: none
  std::vector<std::vector<i32>> blocks;  // by space: -1 for a block that is not needed
  std::vector<i32*> tables;              // the same on the device
  bool stale = true;                     // they differ from it
  std::vector<model::KvCache> caches;    // by layer

  i64 size() const noexcept { return std::ssize(tokens) - proposed; }
  std::span<const i32> first(i64 n) const noexcept { return std::span(tokens).first(static_cast<size_t>(n)); }
  // Tokens that no later call takes back.
  i64 settled() const noexcept { return request.follows ? followed : size(); }
  // Tokens whose keys are not in the cache, but for proposed ones. The last token needs none, if none is drawn after
  // it.
  i64 fresh() const noexcept { return (generates() ? std::min(size(), until - 1) : size() - 1) - seen; }
  bool generates() const noexcept { return request.max_tokens > 0; }
  i64 first_wanted() const noexcept { return size() == prompt ? next_scored : size(); }
  // The tokens [begin, end) whose logits are wanted from a pass over the next n tokens, each by the row of the token
  // before it. Those from size() on are drawn.
  std::pair<i64, i64> wanted(i64 n) const noexcept {
    const i64 end = std::min(seen + n + 1, std::ssize(tokens) + (generates() ? 1 : 0));
    return {std::min(std::max(first_wanted(), seen + 1), end), end};
  }
  void drop_proposed() {
    tokens.resize(static_cast<size_t>(size()));
    proposed = 0;
  }
  // Keys of the first tokens stay in the cache.
  void keep_seen(i64 most) noexcept {
    seen = std::min(seen, most);
    for (model::KvCache& cache : caches) cache.length = seen;
  }
};

Session::Session(stage::Stage& stage, const SessionSizes& sizes, Proposer* proposer)
    : stage_(stage),
      proposer_(proposer),
      model_(stage.model()),
      plan_(stage.plan()),
      device_(stage.device()),
      planned_(plan_session(model_, plan_, sizes)) {
  DS_ASSERT(proposer == nullptr || sizes.draft_tokens > 0);
  take_memory();
}

Session::~Session() = default;

void Session::take_memory() {
  const auto buffer = [&](Tag tag, i64 bytes) { return device_buffer(device_, stage_.ledger(), tag, bytes); };
  const SessionPlan& p = planned_;
  working_ = buffer(Tag::Activations, p.working_bytes);
  temporary_ = buffer(Tag::Workspace, p.temporary_bytes);
  message_ = buffer(Tag::Workspace, p.message_bytes);
  tables_ = buffer(Tag::Activations, p.table_bytes);
  sequences_ = buffer(Tag::Activations, p.sequence_bytes);
  cache_ = buffer(Tag::Activations, p.cache_bytes);
  looked_up_ = buffer(Tag::Workspace, p.looked_up_bytes);
  memory_ = p.pass;
  memory_.for_each([&](Tag tag, TensorView& v) {
    if (v.rank > 0) v.data = buffers_.emplace_back(buffer(tag, v.bytes())).data();
  });
  for (TensorView* v : {&planned_.draws, &planned_.changes, &planned_.drawn})
    v->data = buffers_.emplace_back(buffer(Tag::Data, v->bytes())).data();
  model::upload_layout(memory_, model_, device_);
  if (!p.rope_apart) model::upload_rotations(memory_, model_, 0, p.sizes.context, device_);
  places_.resize(static_cast<size_t>(p.sizes.at_once));
  arrays_.resize(model_.layers.size());
  char* at = static_cast<char*>(cache_.data());
  for (const CacheSpace& space : p.spaces) {
    blocks_.emplace_back(space.blocks);
    for (const i64 l : space.layers) {
      arrays_[l] = p.arrays_of(*model_.layers[l], space, plan_.work);
      for (TensorView& array : arrays_[l])
        SessionPlan::place(array, std::exchange(at, at + SessionPlan::array_bytes(array)));
    }
  }
}

Session::Id Session::add(Request request) {
  const i64 size = std::ssize(request.tokens);
  const auto is_unknown = [&](i32 id) { return id < 0 || id >= model_.vocab; };
  DS_ASSERT(size > 0 && request.scored_from != 0 && std::ranges::none_of(request.tokens, is_unknown));
  std::erase_if(request.sampling.banned, is_unknown);
  DS_ASSERT(request.max_tokens > 0
                ? size + request.max_tokens <= planned_.sizes.context
                : request.scored_from > 0 && request.scored_from < size && size <= planned_.sizes.context + 1);
  auto s = std::make_unique<Sequence>();
  s->id = next_++;
  s->prompt = std::ssize(request.tokens);
  s->tokens = request.tokens;
  s->tokens.reserve(static_cast<size_t>(s->prompt + request.max_tokens));
  s->next_scored = request.scored_from > 0 ? request.scored_from : s->prompt;
  s->until = s->prompt + (request.follows ? 0 : request.max_tokens);
  s->followed = s->prompt;
  s->request = std::move(request);
  waiting_.push_back(std::move(s));
  return waiting_.back()->id;
}

void Session::follow(Id id, std::span<const i32> text, i64 new_tokens) {
  const auto is_it = [&](const std::unique_ptr<Sequence>& s) { return s->id == id; };
  const auto found = std::ranges::find_if(under_way_, is_it);
  Sequence& s = found == under_way_.end() ? **std::ranges::find_if(waiting_, is_it) : **found;
  const i64 size = std::ssize(text), same = std::ranges::mismatch(text, s.tokens).in1 - text.begin();
  DS_ASSERT(s.request.follows && same >= s.followed && new_tokens > 0 &&
            size + new_tokens <= s.prompt + s.request.max_tokens);
  s.tokens.assign(text.begin(), text.end());
  s.followed = size;
  s.until = size + new_tokens;
  s.keep_seen(std::min(same, size - 1));
}

void Session::cancel(Id id) {
  if (proposer_ != nullptr) proposer_->forget(id);
  const auto is_it = [&](const std::unique_ptr<Sequence>& s) { return s->id == id; };
  std::erase_if(waiting_, is_it);
  const auto found = std::ranges::find_if(under_way_, is_it);
  if (found == under_way_.end()) return;
  give_back_blocks(**found);
  under_way_.erase(found);
}

// Whether there are blocks for its tokens so far.
bool Session::fits(const Sequence& s) const {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const CacheSpace& space = planned_.spaces[i];
    if (!space.all) continue;  // each sequence has room there
    if (blocks_[i].available() < align_up(s.size(), space.lives.block()) / space.lives.block()) return false;
  }
  return true;
}

void Session::begin_waiting() {
  while (!waiting_.empty() && std::ssize(under_way_) < planned_.sizes.at_once &&
         (under_way_.empty() || fits(*waiting_.front()))) {
    std::unique_ptr<Sequence> s = std::move(waiting_.front());
    waiting_.pop_front();
    begin(std::move(s));
  }
}

void Session::begin(std::unique_ptr<Sequence> sequence) {
  Sequence& s = *sequence;
  s.place = std::ranges::find(places_, false) - places_.begin();
  places_[s.place] = true;
  s.seen = s.closed = 0;
  s.stale = true;
  s.blocks.clear();
  s.tables.clear();
  s.caches.assign(model_.layers.size(), {});
  char* table = static_cast<char*>(tables_.data());
  for (const CacheSpace& space : planned_.spaces) {
    const std::vector<i32>& blocks = s.blocks.emplace_back(static_cast<size_t>(space.lives.count()), -1);
    const i64 bytes = align_up(space.lives.count() * i64{sizeof(i32)}, SessionPlan::kAlign);
    s.tables.push_back(reinterpret_cast<i32*>(table + s.place * bytes));
    for (const i64 l : space.layers)
      s.caches[l] = {.arrays = arrays_[l],
                     .block = space.lives.block(),
                     .blocks = blocks,
                     .pages = reinterpret_cast<const i32*>(table),
                     .table = bytes / i64{sizeof(i32)}};
    table += planned_.sizes.at_once * bytes;
  }
  if (planned_.rope_apart) {
    const i64 context = planned_.sizes.context, length = std::min(context, s.prompt + s.request.max_tokens);
    model::upload_rotations(memory_, model_, s.place * context, length, device_);
  }
  under_way_.push_back(std::move(sequence));
  reuse_blocks(s);
}

bool Session::shares_blocks() const noexcept {
  return !planned_.rope_apart && blocks_.size() == 1 && planned_.spaces[0].all;
}

Blocks::Prefix Session::prefix_of(const Sequence& s, i64 b) const {
  const i64 block = planned_.spaces[0].lives.block();
  return {b > 0 ? s.blocks[0][b - 1] : -1, {s.tokens.begin() + b * block, s.tokens.begin() + (b + 1) * block}};
}

// Finds blocks of the tokens with which it begins, but for those whose rows of logits are wanted.
void Session::reuse_blocks(Sequence& s) {
  if (!shares_blocks()) return;
  const i64 block = planned_.spaces[0].lives.block();
  for (i64 b = 0; (b + 1) * block < std::min(s.first_wanted(), s.settled()); ++b) {
    const i32 found = blocks_[0].find(prefix_of(s, b));
    if (found < 0) break;
    s.blocks[0][b] = found;
    s.seen += block;
    ++s.closed;
  }
  counts_.reused += s.seen;
  s.keep_seen(s.seen);
}

// Lets others share the blocks that it has filled for good.
void Session::close_blocks(Sequence& s) {
  if (!shares_blocks()) return;
  const i64 block = planned_.spaces[0].lives.block();
  for (i64& b = s.closed; (b + 1) * block <= std::min(s.seen, s.settled() - 1); ++b) {
    const i32 mine = s.blocks[0][b], shared = blocks_[0].remember(mine, prefix_of(s, b));
    s.stale |= shared != mine;
    s.blocks[0][b] = shared;
  }
}

// The next tokens of sequences that generate, by the proposer.
void Session::propose() {
  std::vector<Proposer::Place> places;
  std::vector<Sequence*> sequences;
  for (const auto& s : under_way_) {
    const i64 most = std::min(planned_.sizes.draft_tokens, s->until - s->size() - 1);
    if (std::exchange(s->unaided, false) || !s->generates() || s->fresh() != 1 || most <= 0) continue;
    places.push_back({s->id, s->request, s->first(s->size()), most});
    sequences.push_back(s.get());
  }
  if (places.empty()) return;
  proposer_->propose(places);
  for (size_t i = 0; i < places.size(); ++i) {
    const std::vector<i32>& tokens = places[i].tokens;
    Sequence& s = *sequences[i];
    DS_ASSERT(s.proposed == 0 && std::ssize(tokens) <= places[i].most);
    s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
    s.proposed = std::ssize(tokens);
  }
}

// The tokens of the next pass: one of each sequence that generates, with the proposed ones after it, and then prompts
// in the order of sequences.
std::vector<Session::Part> Session::choose_parts() {
  std::vector<Part> parts;
  i64 rows = planned_.rows, logits = planned_.logit_rows;
  const auto count = [&](const Part& part, i64 sign) {
    const auto [begin, end] = part.sequence->wanted(part.tokens);
    rows -= sign * part.tokens;
    logits -= sign * (end - begin);
  };
  const auto num_wanted = [](const Sequence& s, i64 n) {
    const auto [begin, end] = s.wanted(n);
    return end - begin;
  };
  for (const bool prompts : {false, true}) {
    for (size_t i = 0; i < under_way_.size(); ++i) {
      Sequence& s = *under_way_[i];
      if ((s.fresh() > 1) != prompts) continue;
      i64 n = std::min(s.fresh() + s.proposed, rows);
      while (n > 0 && num_wanted(s, n) > logits) --n;
      if (n == 0) continue;
      // If no block is left, nothing is proposed, and the last sequence gives up its own. The last one itself waits.
      bool has_blocks = take_blocks(s, n);
      if (!has_blocks && s.proposed > 0) {
        s.drop_proposed();
        has_blocks = take_blocks(s, n = s.fresh());
      }
      for (; !has_blocks && i + 1 < under_way_.size(); has_blocks = take_blocks(s, n)) {
        const auto last = std::ranges::find(parts, under_way_.back().get(), &Part::sequence);
        if (last != parts.end()) {
          count(*last, -1);
          parts.erase(last);
        }
        put_off_last();
      }
      if (has_blocks) count(parts.emplace_back(&s, n), 1);
    }
  }
  return parts;
}

// Gives it blocks for its next tokens, and takes away those that no later token sees. False: there are not enough.
bool Session::take_blocks(Sequence& s, i64 tokens) {
  const i64 first = std::min(s.seen, s.settled() - 1);  // that any later pass has
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const BlockLives& lives = planned_.spaces[i].lives;
    std::vector<i32>& blocks = s.blocks[i];
    for (i64 b = 0; b * lives.block() < s.seen; ++b) {
      if (blocks[b] < 0 || lives.needed(b, first)) continue;
      blocks_[i].give_back(std::exchange(blocks[b], -1));
      s.stale = true;
    }
    for (i64 b = s.seen / lives.block(); b * lives.block() < s.seen + tokens; ++b) {
      if (blocks[b] >= 0 || !lives.needed(b, first)) continue;
      blocks[b] = blocks_[i].take();
      if (blocks[b] < 0) return false;
      s.stale = true;
    }
  }
  for (size_t i = 0; s.stale && i < blocks_.size(); ++i) {
    std::vector<i32> table = s.blocks[i];
    std::ranges::replace(table, -1, 0);
    device_.upload(s.tables[i], table.data(), std::ssize(table) * i64{sizeof(i32)});
  }
  s.stale = false;
  return true;
}

void Session::give_back_blocks(Sequence& s) {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    for (i64 b = std::ssize(s.blocks[i]); b-- > 0;) {
      if (i32& block = s.blocks[i][b]; block >= 0) blocks_[i].give_back(std::exchange(block, -1));
    }
  }
  places_[s.place] = false;
}

// It waits, as the first, to be computed again.
void Session::put_off_last() {
  if (proposer_ != nullptr) proposer_->forget(under_way_.back()->id);
  under_way_.back()->drop_proposed();
  give_back_blocks(*under_way_.back());
  waiting_.push_front(std::move(under_way_.back()));
  under_way_.pop_back();
  ++counts_.put_off;
}

bool Session::step(Listener& listener) {
  begin_waiting();
  if (proposer_ != nullptr) propose();
  const std::vector<Part> parts = choose_parts();
  const i64 largest = largest_pass(parts);
  if (largest == 0) return false;
  upload(parts);
  run_layers(parts, largest);
  for (const Part& part : parts) part.sequence->seen += part.tokens;
  ++counts_.passes;
  counts_.rows += std::ssize(ids_);
  draw();
  deliver(parts, listener);
  return true;
}

// The rows of the largest pass among ranks that exchange rows of experts, which run layers together: if need be without
// rows of their own.
i64 Session::largest_pass(std::span<const Part> parts) const {
  i64 rows = 0;
  for (const Part& part : parts) rows += part.tokens;
  if (model_.shard.ep > 1) stage_.mesh().dp().all_reduce(&rows, 1, DType::I64, ReduceOp::Max, kStatsText).wait();
  return rows;
}

void Session::upload(std::span<const Part> parts) {
  ids_.clear(), positions_.clear(), rotations_.clear(), wanted_.clear(), logit_rows_.clear();
  SequenceArrays sequences;
  for (const auto& [s, n] : parts) {
    const i64 rope = planned_.rope_apart ? s->place * planned_.sizes.context : 0, before = std::ssize(ids_) - s->seen;
    const auto [begin, end] = s->wanted(n);
    sequences.add(n, s->seen + n, s->place);
    for (i64 t = begin; t < end; ++t) {
      wanted_.push_back({s, t});
      logit_rows_.push_back(narrow<i32>(before + t - 1));
    }
    for (i64 t = s->seen; t < s->seen + n; ++t) {
      ids_.push_back(s->tokens[t]);
      positions_.push_back(narrow<i32>(t));
      rotations_.push_back(narrow<i32>(rope + t));
    }
  }
  const auto send = [&](const TensorView& to, const std::vector<i32>& from) {
    device_.upload(to.data, from.data(), std::ssize(from) * i64{sizeof(i32)});
  };
  send(memory_.ids, ids_);
  send(memory_.row_positions, positions_);
  send(memory_.positions, rotations_);
  send(memory_.logit_rows, logit_rows_);
  send(TensorView::of(sequences_.data(), DType::I32, {SequenceArrays::size(std::ssize(parts))}), sequences.joined());
}

void Session::run_layers(std::span<const Part> parts, i64 largest) {
  const i64 R = std::ssize(ids_), n = std::ssize(logit_rows_);
  const TensorView logits = memory_.logits.rows(0, n);
  if (model_.shard.tp > 1) device_.zero(logits.data, logits.bytes());  // the ranks' parts are added
  model::PassContext ctx = stage_.context(memory_, {.mode = Mode::Generate, .B = 1, .T = R, .logit_rows = n});
  std::vector<model::KvCache*> caches(parts.size());
  std::vector<i64> fresh;
  for (const Part& part : parts) fresh.push_back(part.tokens);
  ctx.caches = caches;
  ctx.fresh = fresh;
  ctx.sequences = SequenceArrays::over(sequences_.as<i32>().data(), std::ssize(parts));
  ctx.largest = largest;
  stage::LookUp look_up;
  if (planned_.looked_up > 0) {
    look_up = {.tokens = ids_, .table = TensorView::of(looked_up_.data(), plan_.work, {R, planned_.looked_up})};
    look_up.ids = TensorView::of(look_up.table.as<char>() + look_up.table.bytes(), DType::I32, {R});
  }
  TensorView x{};
  for (size_t c = 0; c < plan_.stage.chunks.size(); ++c) {
    const plan::ChunkPlan& chunk = plan_.stage.chunks[c];
    model::ActivationPlanner planner({.working = working_.data(), .temporary = temporary_.data()});
    const auto acts =
        plan::plan_acts(model_, chunk, plan_, planner, Mode::Generate, {1, R, R, planned_.sizes.context, largest});
    DS_ASSERT(planner.working_bytes() <= planned_.working_bytes &&
              planner.temporary_bytes() <= planned_.temporary_bytes);
    if (chunk.receives()) x = TensorView::of(message_.data(), plan_.work, {R, model_.hidden});
    if (chunk.receives() && R > 0) stage_.receive(pipeline::Op::RecvActivation, static_cast<i64>(c), x).wait();
    x = stage_.forward(
        c, ctx, x, acts,
        [&](i64 l) {
          for (size_t i = 0; i < parts.size(); ++i) caches[i] = &parts[i].sequence->caches[l];
        },
        look_up);
    if (!chunk.last && !plan_.stage.stays(c) && R > 0)
      stage_.send(pipeline::Op::SendActivation, static_cast<i64>(c), x).wait();
  }
  if (n == 0) return;
  stage_.mesh()
      .pp()
      .broadcast(logits.data, logits.bytes(), plan_.last_stage, message_text(Axis::Pp, Collective::Broadcast))
      .wait();
}

bool Session::Wanted::draws() const noexcept { return at >= sequence->size(); }
bool Session::Wanted::has_logprob() const noexcept { return !draws() || sequence->request.logprobs; }

// The tokens that the rows of logits ask for, and the logarithms of their probabilities.
void Session::draw() {
  if (wanted_.empty()) return;
  sample_rows();
  targets_.clear();
  for (size_t row = 0; row < wanted_.size(); ++row) {
    auto& [s, at, logits] = wanted_[row];
    if (drawn_[row] < 0) logits = Logits::Infinite;
    if (at > s->size() && (wanted_[row - 1].logits != Logits::Sound || targets_.back() != s->tokens[at - 1]))
      logits = Logits::Refuted;
    targets_.push_back(!wanted_[row].draws() ? s->tokens[at] : logits == Logits::Sound ? drawn_[row] : 0);
  }
  if (std::ranges::any_of(wanted_, &Wanted::has_logprob)) compute_losses();
}

// Draws a token for each row of logits, those after proposed tokens as if these stood, and the most likely token for
// rows whose token is given. A call has as many rows as there is room for their changes.
void Session::sample_rows() {
  const i64 n = std::ssize(wanted_);
  const auto results = [&](i64 which) { return TensorView::of(planned_.drawn.as<i32>() + which * n, DType::I32, {n}); };
  const i64 most_changes = planned_.changes.bytes() / i64{sizeof(LogitChange)};
  for (i64 begin = 0, end = 0; begin < n; begin = end) {
    draws_.clear(), changes_.clear();
    for (; end < n; ++end) {
      const Wanted& row = wanted_[end];
      const Sequence& s = *row.sequence;
      const i64 before = std::ssize(changes_);
      draws_.push_back(row.draws() ? draw_of(s.request.sampling, s.first(row.at), s.prompt, changes_)
                                   : Draw{.temperature = 0});
      if (std::ssize(changes_) <= most_changes) continue;
      changes_.resize(static_cast<size_t>(before));
      draws_.pop_back();
      break;
    }
    device_.upload(planned_.draws.data, draws_.data(), std::ssize(draws_) * i64{sizeof(Draw)});
    device_.upload(planned_.changes.data, changes_.data(), std::ssize(changes_) * i64{sizeof(LogitChange)});
    const auto part = [&](const TensorView& v) { return v.rows(begin, end - begin); };
    device_.ops().sample(part(results(0)), part(results(1)), part(memory_.logits), planned_.draws.as<const Draw>(),
                         planned_.changes.as<LogitChange>(), device_.stream());
  }
  drawn_.resize(static_cast<size_t>(2 * n));
  device_.download(drawn_.data(), planned_.drawn.data, 2 * n * i64{sizeof(i32)});
}

void Session::deliver(std::span<const Part> parts, Listener& listener) {
  size_t row = 0;
  for (const Part& part : parts) {
    Sequence& s = *part.sequence;
    const bool stops = deliver_rows(s, row, listener);
    // Those of proposed tokens that do not stand are computed again.
    s.keep_seen(s.size() - 1);
    close_blocks(s);
    if (!stops && (s.generates() ? s.size() < s.until || s.request.follows : s.fresh() > 0)) continue;
    listener.ended(s.id);
    if (proposer_ != nullptr) proposer_->forget(s.id);
    give_back_blocks(s);
    std::erase_if(under_way_, [&](const std::unique_ptr<Sequence>& other) { return other.get() == &s; });
  }
}

void Session::Listener::failed(Id, const std::string& why) { throw Error(Errc::Numeric, why); }

// True: the text ends with its last token, or has failed.
bool Session::deliver_rows(Sequence& s, size_t& row, Listener& listener) {
  const auto is_mine = [&](size_t r) { return r < wanted_.size() && wanted_[r].sequence == &s; };
  const bool aided = s.proposed > 0;
  s.drop_proposed();
  bool stops = false;
  for (; is_mine(row); ++row) {
    const auto& [sequence, at, logits] = wanted_[row];
    if (stops) continue;
    // The row of a proposed token, if there is one in the place of this one, is the next.
    if (at >= s.size() && is_mine(row + 1)) {
      ++counts_.proposed;
      counts_.accepted += wanted_[row + 1].logits != Logits::Refuted;
    }
    // Keys of proposed tokens that are not finite spoil the rows before them, too, within a call of attention.
    s.unaided |= aided && logits == Logits::Infinite;
    if (logits == Logits::Refuted || s.unaided) continue;
    if (logits == Logits::Infinite) {
      listener.failed(s.id, fmt::format("the logits of token {} are not finite: weights or activations exceed the "
                                        "range of {}",
                                        at, dtype_name(plan_.work)));
      stops = true;
      continue;
    }
    const bool given = at < s.size();
    Row here{*this, row, drawn_[wanted_.size() + row]};
    if (wanted_[row].has_logprob())
      here.logprob = 0 - losses_[row], here.top = tops_[row], here.log_sum = std::log(sums_[row]);
    if (given) {
      listener.scored(s.id, at, here);
      s.next_scored = at + 1;
    } else {
      s.tokens.push_back(targets_[row]);
      stops = !listener.token(s.id, targets_[row], here);
    }
  }
  return stops;
}

std::span<const float> Row::logits() const { return session.logits_of(index); }

std::span<const float> Session::logits_of(size_t row) {
  const TensorView z = memory_.logits.rows(static_cast<i64>(row), 1);
  const auto V = static_cast<size_t>(model_.vocab);
  if (device_.is_host()) return {z.as<float>(), V};
  logits_.resize(V);
  device_.download(logits_.data(), z.data, z.bytes());
  return logits_;
}

// losses_[i] = the loss of targets_[i], as training computes it, for rows that have one.
void Session::compute_losses() {
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  const i64 n = std::ssize(targets_);
  device_.upload(memory_.targets.data, targets_.data(), n * i64{sizeof(i32)});
  const TensorView z = memory_.logits.rows(0, n), targets = memory_.targets.rows(0, n),
                   losses = memory_.losses.rows(0, n);
  const auto stat = [&](i64 i) { return TensorView::of(memory_.stats.as<float>() + i * n, DType::F32, {n}); };
  for (i64 begin = 0, end = 0; begin < n; begin = end + 1) {
    for (end = begin; end < n && wanted_[end].has_logprob(); ++end) {
    }
    if (begin == end) continue;
    const auto part = [&](const TensorView& v) { return v.rows(begin, end - begin); };
    const CrossEntropyParams params{.chunk_tokens = end - begin, .vocab = model_.vocab};
    ops.vocab_max(part(stat(0)), part(z), stream);
    ops.vocab_sums(part(stat(1)), part(stat(2)), part(z), part(stat(0)), part(targets), 0, params, stream);
    ops.vocab_grad(part(losses), {}, part(z), part(stat(1)), part(stat(2)), part(stat(0)), part(targets), 0, params,
                   stream);
  }
  for (const auto& [to, from] : {std::pair{&losses_, losses}, {&tops_, stat(0)}, {&sums_, stat(1)}}) {
    to->resize(targets_.size());
    device_.download(to->data(), from.data, from.bytes());
  }
}

}  // namespace ds::infer
