// SPDX-License-Identifier: Apache-2.0
// Inference: requests of texts, which rank 0 reads, become requests of a session on every rank, and its tokens texts.

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/json.h"
#include "comm/message_tag.h"
#include "data/text_stream.h"
#include "data/tokenizer.h"
#include "infer/drafter.h"
#include "infer/session.h"
#include "run/model_folder.h"
#include "run/run_state.h"

namespace ds {

namespace {

using infer::Row;
using infer::Session;

TokenScore score_of(const Row& row, i32 id, i64 most) {
  TokenScore score{.id = id, .logprob = row.logprob, .most_likely = row.most_likely == id};
  if (most == 0) return score;
  const std::span<const float> logits = row.logits();
  const auto before = [&](i32 a, i32 b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  };
  std::vector<i32> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto top = order.begin() + std::min(most, std::ssize(order));
  std::partial_sort(order.begin(), top, order.end(), before);
  for (auto i = order.begin(); i != top; ++i)
    score.top.emplace_back(*i, *i == id ? row.logprob : row.logprob_of(logits[static_cast<size_t>(*i)]));
  return score;
}

// A result, by the number of its request in the run.
struct Done {
  u64 number = 0;
  TextResult result{};
};

// The texts under way, alike on the ranks that compute them together.
class Writing final : public Session::Listener {
 public:
  Writing(const Tokenizer& tokenizer, std::vector<i32> ends) : tokenizer_(tokenizer), ends_(std::move(ends)) {}

  void add(Session& session, u64 number, TextRequest r) {
    infer::Request request{.tokens = r.tokens,
                           .max_tokens = r.max_tokens,
                           .sampling = {.temperature = r.temperature,
                                        .top_k = r.top_k,
                                        .top_p = r.top_p,
                                        .min_p = r.min_p,
                                        .repetition_penalty = r.repetition_penalty,
                                        .presence_penalty = r.presence_penalty,
                                        .frequency_penalty = r.frequency_penalty,
                                        .seed = r.seed,
                                        .index = r.index},
                           .scored_from = r.scored_from,
                           .logprobs = r.logprobs >= 0};
    if (!r.ignore_end) r.stop_tokens.insert(r.stop_tokens.end(), ends_.begin(), ends_.end());
    if (r.min_tokens > 0) request.sampling.banned = r.stop_tokens, request.sampling.banned_for = r.min_tokens;
    const Session::Id id = session.add(std::move(request));
    TextStream stream(tokenizer_, r.tokens);
    texts_.emplace(id, Text{number, std::move(r), std::move(stream), {}});
  }

  bool token(Session::Id id, i32 token, const Row& row) override {
    Text& text = texts_.at(id);
    TextResult& result = text.result;
    if (std::ranges::find(text.request.stop_tokens, token) != text.request.stop_tokens.end()) {
      result.end = TextResult::End::Stop;
      return false;
    }
    result.tokens.push_back(token);
    if (text.request.logprobs >= 0) result.scores.push_back(score_of(row, token, text.request.logprobs));
    append(text, text.stream.push(token));
    return result.end != TextResult::End::Stop;
  }
  void scored(Session::Id id, i64 at, const Row& row) override {
    Text& text = texts_.at(id);
    text.result.prompt_scores.push_back(
        score_of(row, text.request.tokens[static_cast<size_t>(at)], std::max<i64>(text.request.logprobs, 0)));
  }
  void failed(Session::Id id, const std::string& why) override { texts_.at(id).result.error = why; }
  void ended(Session::Id id) override {
    const auto found = texts_.find(id);
    Text& text = found->second;
    if (text.result.end != TextResult::End::Stop || text.cut == std::string::npos) append(text, text.stream.end());
    done_.push_back({text.number, std::move(text.result)});
    texts_.erase(found);
  }
  // Those that have ended since the last call.
  std::vector<Done> take_done() noexcept { return std::exchange(done_, {}); }

 private:
  struct Text {
    u64 number;
    TextRequest request;
    TextStream stream;
    TextResult result;
    size_t cut = std::string::npos;  // where a stop string began
  };

  // Ends the text before the first stop string.
  void append(Text& text, const std::string& more) {
    std::string& all = text.result.text;
    const size_t before = all.size();
    all += more;
    for (const std::string& stop : text.request.stop) {
      const size_t from = before < stop.size() ? 0 : before - stop.size() + 1;
      text.cut = std::min(text.cut, all.find(stop, from));
    }
    if (text.cut == std::string::npos) return;
    all.resize(text.cut);
    text.result.end = TextResult::End::Stop;
  }

  const Tokenizer& tokenizer_;
  std::vector<i32> ends_;
  std::map<Session::Id, Text> texts_;
  std::vector<Done> done_;
};

// Members of a request, for both directions of a message. Stop strings may have any bytes.
template <class R, class F>
void for_members(R& r, F&& f) {
  f("tokens", r.tokens), f("max_tokens", r.max_tokens), f("min_tokens", r.min_tokens);
  f("repetition_penalty", r.repetition_penalty), f("presence_penalty", r.presence_penalty);
  f("frequency_penalty", r.frequency_penalty), f("temperature", r.temperature), f("top_k", r.top_k);
  f("top_p", r.top_p), f("min_p", r.min_p), f("seed", r.seed), f("index", r.index);
  f("stop_tokens", r.stop_tokens), f("ignore_end", r.ignore_end), f("logprobs", r.logprobs);
  f("scored_from", r.scored_from);
}

Json bytes_of(const std::string& text) { return Json::binary({text.begin(), text.end()}); }
std::string text_of(const Json& bytes) {
  const std::vector<u8>& b = bytes.get_binary();
  return {b.begin(), b.end()};
}

// The news of rank 0 before a pass, on every rank: requests, and the groups of ranks that take them.
struct Message {
  struct Given {
    u64 number = 0;
    int group = 0;
    TextRequest request{};
  };
  std::vector<Given> requests{};
  bool over = false;  // there will be no more
  int stop_signal = 0;

  std::vector<u8> bytes() const {
    Json all = Json::array();
    for (const Given& given : requests) {
      Json one = {{"number", given.number}, {"group", given.group}, {"stop", Json::array()}};
      for_members(given.request, [&](const char* name, const auto& value) { one[name] = value; });
      for (const std::string& stop : given.request.stop) one["stop"].push_back(bytes_of(stop));
      all.push_back(std::move(one));
    }
    return Json::to_cbor({{"requests", std::move(all)}, {"over", over}, {"signal", stop_signal}});
  }
  static Message of(const std::vector<u8>& bytes) {
    const Json all = Json::from_cbor(bytes);
    Message m{.over = all["over"], .stop_signal = all["signal"]};
    for (const Json& one : all["requests"]) {
      Given& given = m.requests.emplace_back(Given{.number = one["number"], .group = one["group"]});
      for_members(given.request, [&](const char* name, auto& value) { one[name].get_to(value); });
      for (const Json& stop : one["stop"]) given.request.stop.push_back(text_of(stop));
    }
    return m;
  }
};

Json json_of(const std::vector<TokenScore>& scores) {
  Json all = Json::array();
  for (const TokenScore& s : scores) all.push_back({s.id, s.logprob, s.most_likely, s.top});
  return all;
}
std::vector<TokenScore> scores_of(const Json& all) {
  std::vector<TokenScore> scores;
  for (const Json& one : all) {
    TokenScore& s = scores.emplace_back();
    one[0].get_to(s.id), one[1].get_to(s.logprob), one[2].get_to(s.most_likely), one[3].get_to(s.top);
  }
  return scores;
}

std::vector<u8> bytes_of(const std::vector<Done>& done) {
  Json all = Json::array();
  for (const auto& [number, r] : done)
    all.push_back({number, bytes_of(r.text), r.tokens, static_cast<int>(r.end), json_of(r.scores),
                   json_of(r.prompt_scores), r.error});
  return Json::to_cbor(all);
}
std::vector<Done> done_of(const std::vector<u8>& bytes) {
  std::vector<Done> done;
  for (const Json& one : Json::from_cbor(bytes)) {
    TextResult& r = done.emplace_back(Done{.number = one[0]}).result;
    r.text = text_of(one[1]);
    one[2].get_to(r.tokens);
    r.end = static_cast<TextResult::End>(one[3].get<int>());
    r.scores = scores_of(one[4]), r.prompt_scores = scores_of(one[5]);
    one[6].get_to(r.error);
  }
  return done;
}

// The bytes of rank `root`.
std::vector<u8> share(Communicator& world, std::vector<u8> bytes, i64 size, int root) {
  bytes.resize(static_cast<size_t>(size));
  world.broadcast(bytes.data(), size, root, kStatsText).wait();
  return bytes;
}

// The sessions of a run. Ranks that have whole parameters of their own, with those that share their layers and
// matrices, are a group, which takes requests of its own; all groups have a pass at the same time, and then exchange
// what has ended.
class Sessions {
 public:
  Sessions(TrainingRun::State& state, const SessionSizes& sizes, const InferHooks& hooks)
      : world_(state.mesh->world()),
        mesh_(*state.mesh),
        hooks_(hooks),
        at_once_(sizes.at_once),
        open_(state.request.config.zero.stage < 3 ? static_cast<size_t>(mesh_.shape().data_size()) : 1),
        tokenizer_(open_tokenizer(state.request.config.data.tokenizer)),
        writing_(*tokenizer_, end_tokens(*tokenizer_, run::model_folder(state.request.config),
                                         state.request.config.model.vocab_size)),
        drafter_(drafter_of(state, sizes)),
        session_(state.engine().stage(), sizes, drafter_.get()) {}

  InferCounts run() {
    InferCounts counts;
    const Clock::time_point begin = Clock::now();
    while (!over_ || counts.texts > ended_) {
      Message message = world_.rank() == 0 ? next_message() : Message{};
      if (world_.size() > 1) {
        std::vector<u8> bytes = world_.rank() == 0 ? message.bytes() : std::vector<u8>{};
        i64 size = std::ssize(bytes);
        world_.broadcast(&size, sizeof size, 0, kStatsText).wait();
        bytes = share(world_, std::move(bytes), size, 0);
        if (world_.rank() > 0) message = Message::of(bytes);
      }
      if (counts.stop_signal = message.stop_signal; counts.stop_signal != 0) break;
      over_ |= message.over;
      counts.texts += std::ssize(message.requests);
      for (auto& [number, group, request] : message.requests)
        if (group == my_group()) writing_.add(session_, number, std::move(request));
      session_.step(writing_);
      for (Done& done : exchange()) {
        ++ended_;
        counts.new_tokens += std::ssize(done.result.tokens);
        if (world_.rank() > 0) continue;
        --open_[group_of_.extract(done.number).mapped()];
        hooks_.done(done.number, std::move(done.result));
      }
    }
    counts.seconds = seconds_since(begin);
    add_groups(counts);
    return counts;
  }

 private:
  static std::unique_ptr<infer::Drafter> drafter_of(TrainingRun::State& state, const SessionSizes& sizes) {
    if (sizes.draft_tokens == 0) return nullptr;
    DS_CHECK(state.draft, Errc::Config, "the run has no draft that proposes tokens: RunOptions::draft");
    return std::make_unique<infer::Drafter>(state.draft->stage(), sizes, state.request.config.model.vocab_size);
  }
  int my_group() const { return open_.size() > 1 ? mesh_.data_rank() : 0; }
  // Whether the results of its group are this rank's to tell.
  bool speaks() const {
    const MeshCoord& place = mesh_.coord();
    return place.pp == 0 && place.tp == 0 && place.sp == 0 && (open_.size() > 1 || world_.rank() == 0);
  }

  void add_groups(InferCounts& counts) {
    const Session::Counts& c = session_.counts();
    counts.passes = c.passes;
    const std::pair<i64*, i64> all[] = {{&counts.tokens, c.rows},
                                        {&counts.reused, c.reused},
                                        {&counts.put_off, c.put_off},
                                        {&counts.proposed, c.proposed},
                                        {&counts.accepted, c.accepted}};
    std::vector<i64> sums;
    for (const auto& [to, mine] : all) sums.push_back(speaks() ? mine : 0);
    world_.all_reduce(sums.data(), std::ssize(sums), DType::I64, ReduceOp::Sum, kStatsText).wait();
    for (size_t i = 0; i < sums.size(); ++i) *all[i].first = sums[i];
  }

  // As many requests as find a place soon, each for the group that has fewest.
  Message next_message() {
    Message m;
    while (!over_) {
      const auto least = std::ranges::min_element(open_);
      if (*least >= 2 * at_once_) break;
      const bool waits = *std::ranges::max_element(open_) == 0 && m.requests.empty();
      std::optional<TextRequest> request = hooks_.next(waits);
      if (!request) {
        m.over = hooks_.ended();
        break;
      }
      const int group = static_cast<int>(least - open_.begin());
      ++*least;
      group_of_[next_] = static_cast<size_t>(group);
      m.requests.push_back({next_++, group, std::move(*request)});
    }
    if (hooks_.stop_signal) m.stop_signal = hooks_.stop_signal();
    return m;
  }

  // The results of all groups.
  std::vector<Done> exchange() {
    std::vector<Done> mine = writing_.take_done();
    if (open_.size() == 1) return mine;
    const std::vector<u8> bytes = speaks() && !mine.empty() ? bytes_of(mine) : std::vector<u8>{};
    std::vector<i64> sizes(static_cast<size_t>(world_.size()));
    sizes[static_cast<size_t>(world_.rank())] = std::ssize(bytes);
    const AllGatherSegment all{sizes.data(), sizeof(i64)};
    world_.all_gather({&all, 1}, kStatsText).wait();
    std::vector<Done> done;
    for (int r = 0; r < world_.size(); ++r) {
      const i64 size = sizes[static_cast<size_t>(r)];
      if (size == 0) continue;
      for (Done& one : done_of(share(world_, r == world_.rank() ? bytes : std::vector<u8>{}, size, r)))
        done.push_back(std::move(one));
    }
    return done;
  }

  Communicator& world_;
  const Mesh& mesh_;
  const InferHooks& hooks_;
  i64 at_once_;
  std::vector<i64> open_;  // requests that have not ended, by group; on rank 0
  std::map<u64, size_t> group_of_;
  u64 next_ = 0;
  i64 ended_ = 0;
  bool over_ = false;
  std::unique_ptr<Tokenizer> tokenizer_;
  Writing writing_;
  std::unique_ptr<infer::Drafter> drafter_;  // null: none
  Session session_;
};

}  // namespace

InferCounts TrainingRun::infer(const SessionSizes& sizes, const InferHooks& hooks) {
  State& s = *state_;
  return s.collective([&] { return Sessions(s, sizes, hooks).run(); });
}

}  // namespace ds
